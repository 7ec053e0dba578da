"""Writers, compactions, crashes and vacuums in any order against a model that fits on a page.

The model keeps, for each episode, the takes that landed and what the tables must show; after every step the lake is
compared with it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.pipelines.test_crashes import COMMITS, Crash, crash_at

import trajlake
from trajlake.storage import Won
from trajlake.table.retention import vacuum
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam

EPISODES = [f"e{number}" for number in range(4)]


@dataclass(eq=False)
class Piece:
    """What one segment holds of a take; `said` is how many steps its end says that there are."""

    order: int
    messages: list[str]
    begins: bool
    said: int | None
    key: str | None  # None: it may be more than one segment
    new: bool = True  # no compaction has read it


@dataclass(eq=False)
class Take:
    """What one writer recorded of one attempt, as far as it is in landing and not settled; `order` is that of the
    writers."""

    attempt: int
    order: int
    pieces: list[Piece] = field(default_factory=list)

    @property
    def messages(self) -> list[str]:
        return [message for piece in sorted(self.pieces, key=lambda piece: piece.order) for message in piece.messages]

    @property
    def begun(self) -> bool:
        return any(piece.begins for piece in self.pieces)

    @property
    def ended(self) -> bool:
        return any(piece.said is not None for piece in self.pieces)

    @property
    def complete(self) -> bool:
        return self.begun and any(piece.said == len(self.messages) for piece in self.pieces)

    @property
    def length(self) -> int:
        """Of takes that are not complete the longest is kept."""
        return 0 if self.complete else self.begun + len(self.messages) + self.ended


@dataclass
class Known:
    """What the tables show of one episode."""

    attempt: int
    messages: list[str]
    begun: bool
    complete: bool


@dataclass
class Recording:
    """A writer and the episode that it records."""

    writer: trajlake.Writer
    episode: trajlake.Episode
    episode_id: str
    attempt: int
    steps: int = 0
    pieces: int = 0
    keys: set[str] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trajlake-machine-"))
        self.lake = trajlake.create(self.folder / "lake")
        self.recordings: dict[int, Recording] = {}
        self.open: set[int] = set()
        self.takes: dict[str, list[Take]] = {episode: [] for episode in EPISODES}  # landed, not settled
        self.withheld: list[tuple[int, Piece, bytes]] = []
        self.table: dict[str, Known] = {}

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        for number in self.open:
            self.recordings[number].writer.close()
        shutil.rmtree(self.folder)

    # -- what writers do ---------------------------------------------------------------------------------------

    @rule(episode_id=st.sampled_from(EPISODES), attempt=st.integers(0, 2), steps=st.integers(0, 3), ends=st.booleans())
    def record(self, episode_id: str, attempt: int, steps: int, ends: bool) -> None:
        number = len(self.recordings)
        writer = self.lake.writer(run="run", worker=f"w{number:04d}", spool=self.folder / "spool")
        episode = writer.episode(episode_id=episode_id, attempt=attempt)
        self.recordings[number] = Recording(writer, episode, episode_id, attempt)
        self.open.add(number)
        self._go_on(number, steps, ends)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), steps=st.integers(0, 2), ends=st.booleans())
    def go_on(self, data: st.DataObject, steps: int, ends: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        if not steps and not ends:
            return
        self._go_on(number, steps, ends)

    def _go_on(self, number: int, steps: int, ends: bool) -> None:
        one = self.recordings[number]
        messages = [f"{number}/{one.steps + step}" for step in range(steps)]
        one.steps += steps
        for message in messages:
            one.episode.step(message=message)
        if ends:
            one.episode.end(reward=float(number))
            one.writer.close()
            self.open.remove(number)
        else:
            one.writer.flush()
        landed = {info.key for info in self.lake.store.list(f"landing/run/w{number:04d}/")}
        came, one.keys = landed - one.keys, landed | one.keys
        key = came.pop() if len(came) == 1 else None
        self._arrive(number, Piece(one.pieces, messages, one.pieces == 0, one.steps if ends else None, key))
        one.pieces += 1

    def _arrive(self, number: int, piece: Piece) -> None:
        one = self.recordings[number]
        takes = self.takes[one.episode_id]
        # Where it was settled as a duplicate, only what comes after is there.
        take = next((take for take in takes if take.order == number), None)
        if take is None:
            take = Take(one.attempt, number)
            takes.append(take)
        take.pieces.append(piece)

    def _may_be_lost(self) -> list[tuple[int, Piece]]:
        every = [take for takes in self.takes.values() for take in takes]
        return [(take.order, piece) for take in every for piece in take.pieces if piece.new and piece.key]

    @precondition(lambda self: self._may_be_lost())
    @rule(data=st.data())
    def withhold(self, data: st.DataObject) -> None:
        """A segment does not arrive, or not yet."""
        number, piece = data.draw(st.sampled_from(self._may_be_lost()))
        assert piece.key is not None
        self.withheld.append((number, piece, self.lake.store.get(piece.key)))
        self.lake.store.delete(piece.key)
        takes = self.takes[self.recordings[number].episode_id]
        take = next(take for take in takes if take.order == number)
        take.pieces.remove(piece)
        if not take.pieces:
            takes.remove(take)

    @precondition(lambda self: self.withheld)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        number, piece, content = self.withheld.pop(data.draw(st.integers(0, len(self.withheld) - 1)))
        assert piece.key is not None
        assert isinstance(self.lake.store.put_if_absent(piece.key, content), Won)
        self._arrive(number, piece)

    # -- what is done to the lake ------------------------------------------------------------------------------

    @rule(seal=st.booleans())
    def compact(self, seal: bool) -> None:
        compact(self.lake, stale_after=0 if seal else None)
        self._compacted(seal)
        self._compacted(seal)  # what was new is old now, and may be sealed

    @rule(table=st.sampled_from(COMMITS), when=st.sampled_from(["before", "after"]), seal=st.booleans())
    def crash_and_compact(self, table: str, when: str, seal: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, table, when)
            with contextlib.suppress(Crash):  # where nothing is to be done nothing is committed
                compact(self.lake, stale_after=0 if seal else None)
        compact(self.lake)  # finishes what was begun, as it was planned
        self._compacted(seal)

    @rule()
    def vacuum(self) -> None:
        vacuum(self.lake, older_than_hours=0, force=True)

    # -- the model ---------------------------------------------------------------------------------------------

    def _compacted(self, seal: bool) -> None:
        for episode_id, takes in self.takes.items():
            new = [piece for take in takes for piece in take.pieces if piece.new]
            sealed = seal and not any(piece.said is not None for piece in new)
            sealed = sealed and (bool(new) or episode_id not in self.table)
            if takes and (new or sealed):
                self._settle(episode_id, takes, sealed)
            for piece in new:
                piece.new = False

    def _settle(self, episode_id: str, takes: list[Take], sealed: bool) -> None:
        before = self.table.get(episode_id)

        def replaces(take: Take) -> bool:
            """A rest must not replace what is there."""
            return take.begun or before is None or (not before.begun and len(take.messages) >= len(before.messages))

        ranked = sorted(takes, key=lambda take: (take.complete, take.attempt, take.length, take.order), reverse=True)
        first, *others = ranked
        waits = not first.complete and not (sealed and replaces(first))
        # What comes of an episode that was sealed is added at once.
        grows = before is not None and not before.complete and replaces(first) and first.attempt == before.attempt
        grows = grows and before is not None and len(first.messages) >= len(before.messages)
        older = before is not None and before.complete and first.attempt <= before.attempt
        if older or (before is not None and before.complete and not first.complete and not waits):
            verdict = "duplicate"
        else:
            verdict = "pending" if waits and not grows else "keep"
        remains = verdict != "duplicate" and not first.complete
        if verdict == "keep":
            self.table[episode_id] = Known(first.attempt, first.messages, first.begun, first.complete)
        more = waits and verdict != "duplicate"
        for take in others:
            waits = not take.complete and not (sealed and replaces(take))
            remains |= waits and (more or take.attempt > first.attempt)
        # Where one of them waits, all segments that hold something of the episode are read again.
        self.takes[episode_id] = takes if remains else []

    @invariant()
    def the_tables_show_what_the_model_shows(self) -> None:
        if not hasattr(self, "folder"):
            return
        snapshot = self.lake.snapshot()
        found = {trajectory.episode_id: trajectory for trajectory in snapshot.trajectories(
            snapshot.episodes.collect()["episode_id"])}  # fmt: skip
        assert sorted(found) == sorted(self.table)
        for episode_id, known in self.table.items():
            trajectory = found[episode_id]
            assert [step["message"] for step in trajectory.steps] == known.messages
            assert trajectory.episode["attempt"] == known.attempt
            assert (trajectory.episode["status"] == "completed") == known.complete
        assert len(snapshot.steps.collect()) == sum(len(known.messages) for known in self.table.values())


Machine.TestCase.settings = settings(max_examples=6, stateful_step_count=12)
TestMachine = Machine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_machine_runs_for_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    started = time.monotonic()
    while time.monotonic() - started < 600:
        run_state_machine_as_test(Machine, settings=settings(max_examples=10, stateful_step_count=40))
