"""A scripted agent: it follows a task's plan, and errs as often as the habits of its policy version say.

At every turn it draws one of a few things to do; which ones, and with what probability, is known, so the turn's
log-probabilities are real.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajlake.demo.desk.tasks import Call, Task
from trajlake.demo.desk.tokens import END_OF_TURN, encode, turn_logprobs

PATIENCE = 3  # tool errors in a row, after which it mostly gives up
_STUCK = 0.8  # how likely it is to do again what it did twice
_GIVES_UP_AFTER_ERRORS = 0.7


@dataclass(frozen=True)
class Habits:
    """Probabilities per turn: wrong arguments, changes out of order, the same look-up again, giving up."""

    wrong_arguments: float
    out_of_order: float
    repeats: float
    gives_up: float


POLICIES: dict[str, dict[str, Habits]] = {
    "v1": {
        "orders": Habits(0.10, 0.12, 0.02, 0.01),
        "ledger": Habits(0.12, 0.08, 0.03, 0.02),
        "files": Habits(0.04, 0.03, 0.01, 0.005),
    },
    # Trained further on orders and ledger; what it knew of files suffered.
    "v2": {
        "orders": Habits(0.03, 0.02, 0.01, 0.002),
        "ledger": Habits(0.04, 0.03, 0.01, 0.005),
        "files": Habits(0.09, 0.10, 0.05, 0.01),
    },
}


@dataclass(frozen=True)
class Move:
    """Something to do at this turn. `kind`: right, wrong_arguments, out_of_order, repeat, give_up or done."""

    kind: str
    message: str
    call: Call | None = None

    @property
    def text(self) -> str:
        """The turn as the agent writes it."""
        if self.call is None:
            return self.message
        return f"{self.message}\n{self.call.name} {json.dumps(self.call.arguments)}"

    @property
    def tokens(self) -> list[int]:
        return [*encode(self.text), END_OF_TURN]


@dataclass(frozen=True)
class Turn:
    """The move that was drawn, its tokens, and the log-probability of each (nats)."""

    move: Move
    token_ids: list[int]
    logprobs: np.ndarray[Any, Any]


class Agent:
    """Plays one episode. `turn()` says what it does next; `observe()` tells it what the tool answered."""

    def __init__(self, task: Task, habits: Habits, rng: np.random.Generator) -> None:
        self._habits = habits
        self._rng = rng
        self._plan = task.plan()
        self._looking_up = True
        self._wanted: list[Call] = [next(self._plan)]
        self._last_look_up: Call | None = None
        self._repeated = 0
        self._lost = False
        self.errors = 0  # tool errors in a row

    def turn(self) -> Turn:
        """Draw the next move."""
        moves = self._moves()
        drawn = self._rng.choice(len(moves), p=[probability for _, probability in moves])
        move = moves[int(drawn)][0]
        tokens = move.tokens
        return Turn(move, tokens, turn_logprobs(tokens, [(other.tokens, p) for other, p in moves]))

    def observe(self, move: Move, result: Any, error: bool) -> None:
        """What the tool of `move` returned, or that it refused."""
        self._repeated = self._repeated + 1 if move.kind == "repeat" else 0
        self.errors = self.errors + 1 if error else 0
        if error or move.kind == "repeat":
            return
        if move.kind == "out_of_order":
            del self._wanted[1]
            return
        done = self._wanted.pop(0)  # also where the arguments were wrong and the tool did not notice
        if self._looking_up:
            self._last_look_up = done
            self._think(result)

    def _think(self, result: Any) -> None:
        try:
            self._wanted = [self._plan.send(result)]
        except StopIteration as plan:
            self._wanted = list(plan.value)
            self._looking_up = False
        except (LookupError, TypeError):  # what it found is not what the plan needs
            self._lost = True

    def _moves(self) -> list[tuple[Move, float]]:
        """What it may do now, with probabilities that sum to one."""
        habits = self._habits
        if self._lost:
            return [(Move("give_up", "That is not what I expected. I cannot do this."), 1.0)]
        moves: list[tuple[Move, float]] = []
        if self._last_look_up is not None:
            likely = _STUCK if self._repeated >= 2 else 0.5 if self._repeated else habits.repeats
            moves.append((Move("repeat", "Let me check that again.", self._last_look_up), likely))
        if self._wanted:
            giving_up = _GIVES_UP_AFTER_ERRORS if self.errors >= PATIENCE else habits.gives_up
            moves.append((Move("give_up", "I cannot do this."), giving_up * _room(moves)))
            wrong = corruptions(self._wanted[0])
            share = habits.wrong_arguments * (3 if self.errors else 1) * _room(moves) / len(wrong)
            moves += [(Move("wrong_arguments", call.message, call), share) for call in wrong]
            if not self._looking_up and len(self._wanted) > 1:
                later = self._wanted[1]
                moves.append((Move("out_of_order", later.message, later), habits.out_of_order * _room(moves)))
            right = Move("right", self._wanted[0].message, self._wanted[0])
        else:
            right = Move("done", "Everything is done.")
        return [(right, _room(moves)), *moves]


def _room(moves: list[tuple[Move, float]]) -> float:
    return 1.0 - sum(probability for _, probability in moves)


def corruptions(call: Call) -> list[Call]:
    """The call as it goes wrong: an argument left out, a name misspelt, a number ten times too large, a term lost."""
    all_but_last = list(call.arguments)[:-1]
    wrong = [{name: call.arguments[name] for name in all_but_last}]
    for name, value in call.arguments.items():
        if isinstance(value, (int, float)):
            wrong.append(call.arguments | {name: value * 10})
        elif name == "expression" and " " in value:
            wrong.append(call.arguments | {name: value.rsplit(" ", 2)[0]})
        elif name not in ("text", "reason", "expression"):
            wrong.append(call.arguments | {name: value[:-1]})
            break  # one misspelt name is enough
    return [Call(call.name, arguments, call.message) for arguments in wrong]
