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
from trajlake.table.retention import vacuum
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam

EPISODES = [f"e{number}" for number in range(4)]


@dataclass
class Take:
    """What one writer recorded of one attempt; `order` is that of the writers."""

    attempt: int
    order: int
    messages: list[str] = field(default_factory=list)
    complete: bool = False
    begun: bool = True  # False: only the rest, after what came before was settled
    waits: bool = False  # it was read before, and nothing came of it yet


@dataclass
class Known:
    """What the tables show of one episode."""

    take: Take
    messages: list[str]
    complete: bool


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trajlake-machine-"))
        self.lake = trajlake.create(self.folder / "lake")
        self.writers: dict[int, tuple[trajlake.Writer, trajlake.Episode, str, Take]] = {}
        self.takes: dict[str, list[Take]] = {episode: [] for episode in EPISODES}  # landed, not settled
        self.fresh: set[str] = set()  # episodes with events that landed since the last compaction
        self.table: dict[str, Known] = {}
        self.count = 0

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        for writer, *_ in self.writers.values():
            writer.close()
        shutil.rmtree(self.folder)

    # -- what writers do ---------------------------------------------------------------------------------------

    @rule(episode_id=st.sampled_from(EPISODES), attempt=st.integers(0, 2), steps=st.integers(0, 3), ends=st.booleans())
    def record(self, episode_id: str, attempt: int, steps: int, ends: bool) -> None:
        number = self.count
        self.count += 1
        writer = self.lake.writer(run="run", worker=f"w{number:04d}", spool=self.folder / "spool")
        episode = writer.episode(episode_id=episode_id, attempt=attempt)
        take = Take(attempt, number)
        self.takes[episode_id].append(take)
        self.writers[number] = (writer, episode, episode_id, take)
        self._go_on(number, steps, ends)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), steps=st.integers(0, 2), ends=st.booleans())
    def go_on(self, data: st.DataObject, steps: int, ends: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.writers)))
        if not steps and not ends:
            return
        self._go_on(number, steps, ends)

    def _go_on(self, number: int, steps: int, ends: bool) -> None:
        writer, episode, episode_id, take = self.writers[number]
        for _ in range(steps):
            take.messages.append(f"{number}/{len(take.messages)}")
            episode.step(message=take.messages[-1])
        if ends:
            episode.end(reward=float(number))
            take.complete = True
            writer.close()
            del self.writers[number]
        else:
            writer.flush()
        self.fresh.add(episode_id)
        if take not in self.takes[episode_id]:
            # It was settled as a duplicate, and only what came after is new.
            late = Take(take.attempt, take.order, take.messages[-steps:] if steps else [], take.complete, begun=False)
            self.takes[episode_id].append(late)
            if number in self.writers:
                self.writers[number] = (writer, episode, episode_id, late)

    # -- what is done to the lake ------------------------------------------------------------------------------

    @rule(seal=st.booleans())
    def compact(self, seal: bool) -> None:
        compact(self.lake, stale_after=0 if seal else None)
        self._compacted(seal)

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
        for episode_id in EPISODES:
            takes = self.takes[episode_id]
            sealed = seal and not any(take.complete and not take.waits for take in takes)
            sealed = sealed and (episode_id in self.fresh or episode_id not in self.table)
            if takes and (episode_id in self.fresh or sealed):
                self._settle(episode_id, takes, sealed)
        self.fresh.clear()

    def _settle(self, episode_id: str, takes: list[Take], sealed: bool) -> None:
        before = self.table.get(episode_id)

        def whole(take: Take) -> bool:
            """A rest must not replace what is there."""
            return take.begun or before is None

        def complete(take: Take) -> bool:
            return take.complete and whole(take)

        def length(take: Take) -> int:
            """Of takes that were cut off the longest is kept."""
            return 0 if complete(take) else take.begun + len(take.messages) + take.complete

        ranked = sorted(takes, key=lambda take: (complete(take), take.attempt, length(take), take.order), reverse=True)
        first, *others = ranked
        waits = not complete(first) and not (sealed and whole(first))
        older = before is not None and before.complete and first.attempt <= before.take.attempt
        if older or (before is not None and before.complete and not complete(first) and not waits):
            verdict = "duplicate"
        else:
            verdict = "pending" if waits else "keep"
        left = [first] if verdict == "pending" or (verdict == "keep" and not complete(first)) else []
        if verdict == "keep":
            self.table[episode_id] = Known(first, list(first.messages), complete(first))
        for take in others:
            waits = not complete(take) and not (sealed and whole(take))
            if waits and (verdict == "pending" or take.attempt > first.attempt):
                left.append(take)
        for take in left:
            take.waits = True
        self.takes[episode_id] = left

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
            assert trajectory.episode["attempt"] == known.take.attempt
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
