"""Classic RL: CartPole and FrozenLake from Gymnasium, each with a random policy and one that knows something.

A step is one action: what was seen before it, what was done and with which log-probability, and what came back. The
last step also has the final observation.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from trajlake.demo.assignment import Assignment
from trajlake.errors import UsageError
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields

if TYPE_CHECKING:
    import gymnasium

Policy = Callable[[Any], np.ndarray[Any, Any]]
"""From an observation to the probability of each action."""
Steps = Generator[StepFields, None, EndFields]

CARTPOLE = "CartPole-v1"
FROZENLAKE = "FrozenLake-v1"
_CARTPOLE_EXPLORES = 0.1  # how often the policy that knows something still acts at random: enough to fail at times
_FROZENLAKE_EXPLORES = 0.02
_ACTION = np.int64


def require_gymnasium() -> None:
    """Raises UsageError, with how to install it, where gymnasium is missing."""
    if importlib.util.find_spec("gymnasium") is None:
        raise UsageError("the demo's environments need gymnasium: pip install 'trajlake[demo]'")


def cartpole(episodes: int, *, pause: float = 0.0) -> list[Assignment]:
    """`episodes` of CartPole by turns: a random policy, and one that mostly pushes to where the pole falls."""
    env = _make(CARTPOLE)
    policies = {"random": _at_random(2), "balance": _mostly(_balance, 2, _CARTPOLE_EXPLORES)}
    return [_assignment(env, "classic-control", policies, number, pause) for number in range(episodes)]


def frozenlake(episodes: int, *, pause: float = 0.0) -> list[Assignment]:
    """`episodes` of the slippery FrozenLake by turns: a random policy, and the one that value iteration finds."""
    env = _make(FROZENLAKE)
    best = solve(env.unwrapped.P)
    policies = {"random": _at_random(4), "planned": _mostly(lambda state: int(best[state]), 4, _FROZENLAKE_EXPLORES)}
    return [_assignment(env, "toy-text", policies, number, pause) for number in range(episodes)]


def play(env: gymnasium.Env[Any, Any], policy: Policy, seed: int, *, pause: float = 0.0) -> Steps:
    """Play one episode. Everything but the measured latencies follows from the policy and the seed."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    total = 0.0
    while True:
        began = time.perf_counter()
        chances = policy(observation)
        action = int(rng.choice(len(chances), p=chances))
        seen = observation
        observation, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        time.sleep(pause)
        step: StepFields = {
            "source": "agent",
            "observation": np.asarray(seen),
            "action": _ACTION(action),
            "tensors": {"action_logprob": np.float32(math.log(chances[action]))},
            "reward": float(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "latency_ms": (time.perf_counter() - began) * 1000,
        }
        if terminated or truncated:
            step["tensors"] = {**step["tensors"], "final_observation": np.asarray(observation)}
            yield step
            return _outcome(env, observation, total, bool(terminated), bool(truncated))
        yield step


def solve(transitions: Any, discount: float = 0.99, sweeps: int = 500) -> np.ndarray[Any, Any]:
    """The best action in each state by value iteration (Sutton & Barto 2018, §4.4), from Gymnasium's table
    `transitions[state][action]` of (probability, next state, reward, terminated)."""
    value = np.zeros(len(transitions))
    for _ in range(sweeps):
        gains = np.array(
            [
                [
                    sum(p * (reward + (0.0 if ended else discount * value[after])) for p, after, reward, ended in rows)
                    for rows in actions.values()
                ]
                for actions in transitions.values()
            ]
        )
        value = gains.max(axis=1)
    return np.asarray(gains.argmax(axis=1))


def _make(name: str) -> gymnasium.Env[Any, Any]:
    require_gymnasium()
    import gymnasium

    return gymnasium.make(name)


def _assignment(
    env: gymnasium.Env[Any, Any], domain: str, policies: dict[str, Policy], number: int, pause: float
) -> Assignment:
    import gymnasium

    assert env.spec is not None
    trial, turn = divmod(number, len(policies))
    version = list(policies)[turn]
    begin: EpisodeFields = {
        "task_id": env.spec.id,
        "task_family": env.spec.id,
        "domain": domain,
        "group_id": f"{env.spec.id}@{version}",
        "trial": trial,
        "seed": trial,
        "env_name": env.spec.id,
        "env_version": gymnasium.__version__,
        "policy_name": env.spec.name.lower(),
        "policy_version": version,
    }
    return Assignment(begin, lambda: play(env, policies[version], trial, pause=pause))


def _at_random(actions: int) -> Policy:
    chances = np.full(actions, 1 / actions)
    return lambda observation: chances


def _mostly(choose: Callable[[Any], int], actions: int, explores: float) -> Policy:
    def policy(observation: Any) -> np.ndarray[Any, Any]:
        chances = np.full(actions, explores / actions)
        chances[choose(observation)] += 1 - explores
        return chances

    return policy


def _balance(observation: Any) -> int:
    """Push to the side to which the pole leans and turns; what the cart does is left to chance."""
    _, _, angle, turning = observation
    return int(angle + turning > 0)


def _outcome(
    env: gymnasium.Env[Any, Any], observation: Any, total: float, terminated: bool, truncated: bool
) -> EndFields:
    assert env.spec is not None
    outcome: EndFields = {"reward": total, "terminated": terminated, "truncated": truncated}
    if env.spec.id == CARTPOLE:
        outcome["success"] = truncated and not terminated  # it stood until the time was up
        outcome["stop_reason"] = "time limit" if truncated else "the pole fell, or the cart left the track"
        if not outcome["success"]:
            outcome["failure_stage"], outcome["failure_detail"] = "other", f"it stood for {total:.0f} steps"
        return outcome
    outcome["success"] = total > 0
    outcome["stop_reason"] = "goal" if total > 0 else "hole" if terminated else "time limit"
    if total <= 0:
        row, column = divmod(int(observation), 4)
        if not terminated:
            outcome["failure_stage"], outcome["failure_detail"] = "budget", "the goal was not reached in 100 steps"
        else:
            outcome["failure_stage"] = "other"
            outcome["failure_detail"] = f"it fell into the hole in row {row}, column {column}"
    return outcome
