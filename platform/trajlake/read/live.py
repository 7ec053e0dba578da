"""Live sampling: a trainer draws an episode seconds after its end, from landing before a compaction has seen it, from
the tables afterwards, and never twice for that. Scores and retractions hold as soon as they have landed, too.

The ledger is read before the tables, and the tables before landing: an episode that moves meanwhile is found in both
and taken once, never in neither. A live sequence depends on when episodes arrive, so it cannot be drawn again; its
state still says what was drawn, and a resumed trainer goes on without repeating or leaving out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from trajlake.errors import EpisodeMissing, UsageError
from trajlake.read.batch import Batch
from trajlake.read.draws import words
from trajlake.read.flow import MinSize, RateLimiter
from trajlake.read.items import NothingFits, Pieces
from trajlake.read.landing import Landed, LandingTail
from trajlake.read.population import Recipe, columns_of, population, rows_of
from trajlake.read.prioritized import checked
from trajlake.read.sampler import Sample, Sampler, ensure_same, refusing_damaged
from trajlake.read.tags import filtered
from trajlake.table.rewrite import LATE, add_late
from trajlake.table.sealed import is_sealed
from trajlake_schemas import EPISODES

if TYPE_CHECKING:
    from trajlake.lake import Lake
    from trajlake.read.strategies import Strategy

_ONCE = ("fifo", "lifo", "group")
_REFUSED = ("epochs", "curriculum")


class LiveView:
    """The episodes of the tables and of the landing tail, each once; `token` is that of the tables' snapshot."""

    def __init__(self, lake: Lake, table_seconds: float) -> None:
        self._lake = lake
        self._table_seconds = table_seconds
        self._tail = LandingTail(lake.store)
        self._landed: dict[str, Landed] = {}
        self._frames: list[pl.DataFrame] = []  # the rows of what landed since `rows` was asked
        self._chosen: pl.DataFrame | None = None
        self._open_tables()

    def _open_tables(self) -> None:
        self._tail.skip_consumed()
        self.snapshot = self._lake.snapshot()
        self._opened = time.monotonic()
        known = self.snapshot.episodes.select("episode_id", "attempt", sealed=is_sealed())
        rows = self.snapshot.collect(known)
        self._attempts = {
            episode_id: -1 if sealed else attempt  # the whole replaces what was sealed
            for episode_id, attempt, sealed in rows.iter_rows()
        }
        self._landed = {key: each for key, each in self._landed.items() if self._is_news(each)}
        self._frames = []
        self._chosen = None
        self._anew({*self._landed, *self._tail.scores, *self._tail.retractions})

    def _is_news(self, landed: Landed) -> bool:
        known = self._landed.get(landed.row["episode_id"])
        if known is not None and known.row["attempt"] > landed.row["attempt"]:
            return False
        return bool(landed.row["attempt"] > self._attempts.get(landed.row["episode_id"], -1))

    @property
    def token(self) -> str:
        return self.snapshot.token

    @property
    def lake_id(self) -> str:
        return self.snapshot.lake_id

    def refresh(self) -> bool:
        """Look for what is new; True where something is."""
        changed = False
        if time.monotonic() - self._opened >= self._table_seconds:
            before = self.token
            self._open_tables()
            changed = self.token != before
        news = self._tail.poll()
        came = set(news.late)
        for each in news.ended:
            if self._is_news(each):
                self._landed[each.row["episode_id"]] = each  # a later attempt in place of the first
                came.add(each.row["episode_id"])
        return self._anew(came) or changed

    def _anew(self, episode_ids: set[str]) -> bool:
        """Let `rows` look again at those of these episodes that there are. False where there is none: a score may come
        before its episode."""
        there = [key for key in episode_ids if key in self._landed or key in self._attempts]
        if there:
            self._frames = [*(self._without(frame, there) for frame in self._frames), self.rows_of(there)]
        return bool(there)

    def rows(self, recipe: Recipe) -> pl.DataFrame:
        """What a population is made of: those that fit `where`. The same frame until there is something new."""
        chosen = columns_of(recipe)
        if self._chosen is None:
            self._chosen = rows_of(self.snapshot, recipe).sort("episode_id")
        if self._frames:
            tail = pl.concat(self._frames, how="vertical_relaxed").lazy()
            if recipe.where and recipe.where.strip():
                tail = filtered(tail, recipe.where)
            came = [episode_id for frame in self._frames for episode_id in frame["episode_id"]]
            before = self._chosen.filter(~pl.col("episode_id").is_in(came))  # only what is new is filtered
            both = pl.concat([before, tail.select(chosen).collect()], how="vertical_relaxed")
            self._chosen = both.sort("episode_id")
            self._frames = []
        return self._chosen

    @staticmethod
    def _without(frame: pl.DataFrame, episode_ids: list[str]) -> pl.DataFrame:
        return frame.filter(~pl.col("episode_id").is_in(episode_ids))

    @staticmethod
    def _frame(rows: list[dict[str, Any]]) -> pl.DataFrame:
        frame = pl.from_arrow(pa.Table.from_pylist(rows, EPISODES.arrow))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def rows_of(self, episode_ids: Sequence[str]) -> pl.DataFrame:
        """See Source."""
        stored = [episode_id for episode_id in dict.fromkeys(episode_ids) if episode_id not in self._landed]
        here = [self._landed[key].row for key in dict.fromkeys(episode_ids) if key in self._landed]
        tables = self.snapshot.rows_of(stored) if stored else None
        parts = ([tables] if tables is not None else []) + ([self._frame(here)] if here else [])
        if not parts:
            raise EpisodeMissing("no episode was asked for")
        found = pl.concat(parts, how="vertical_relaxed")
        wanted = pl.DataFrame({"episode_id": episode_ids}, schema={"episode_id": pl.String})
        found = wanted.join(found, on="episode_id", how="left", maintain_order="left").select(found.columns)
        return self._with_late(found)

    def _with_late(self, rows: pl.DataFrame) -> pl.DataFrame:
        """With the scores and retractions that no compaction has applied yet."""
        ids = rows["episode_id"].to_list()
        if not any(key in self._tail.scores or key in self._tail.retractions for key in ids):
            return rows
        values = {name: rows[name].to_list() for name in LATE}
        add_late(ids, values, self._tail.scores, self._tail.retractions)
        return rows.with_columns(pl.Series(name, values[name], rows.schema[name]) for name in LATE)

    def steps_of(self, rows: pl.DataFrame, *, keep: bool = False) -> list[Any]:
        """See Source."""
        here = [self._landed.get(episode_id) for episode_id in rows["episode_id"]]
        stored = rows.filter(pl.Series([each is None for each in here], dtype=pl.Boolean))
        tables = iter(self.snapshot.steps_of(stored, keep=keep) if len(stored) else [])
        return [next(tables) if each is None else each.steps for each in here]


class LiveSampler:
    """Draws from what is there now. Strategies are those of `Snapshot.sampler` but for epochs and curriculum, which
    need a population that stays; fifo, lifo and group give each episode once unless `max_times_sampled` is given.

    `limiter` holds draws back: see trajlake.read.flow. `poll_seconds` is how often landing is listed, `table_seconds`
    how often the tables are opened anew (to let go of what was compacted).
    """

    def __init__(
        self,
        lake: Lake,
        recipe: Recipe,
        *,
        limiter: RateLimiter | None = None,
        poll_seconds: float = 1.0,
        table_seconds: float = 30.0,
    ) -> None:
        name = recipe.strategy.name
        if name in _REFUSED:
            raise UsageError(f"{name} needs a population that stays: use uniform or fifo, or a snapshot")
        if name in _ONCE and recipe.max_times_sampled is None:
            recipe = replace(recipe, max_times_sampled=1)
        if recipe.window is not None and (recipe.max_times_sampled is not None or name == "prioritized"):
            raise UsageError("live windows have no counts and no priorities of their own: draw whole episodes")
        self.recipe = recipe
        self.limiter: RateLimiter = MinSize(1) if limiter is None else limiter
        self._poll_seconds = poll_seconds
        self._view = LiveView(lake, table_seconds)
        self._polled = float("-inf")
        self._times: dict[str, int] = {}
        self._priorities: dict[str, float] = {}
        self._generation = 0
        self._samples = 0
        self._ahead: list[Sampler] = []  # the generation that is drawn from, and those that were made to come after it
        self._no_more = False  # whether a further one would have nothing
        self._left_out: dict[str, int] = {}
        self._stale = True
        self._counted: tuple[pl.DataFrame | None, int] = (None, 0)

    @property
    def inserts(self) -> int:
        """Episodes that fit `where`, as the limiter counts them; those that did when they were drawn, too."""
        fitting = self._view.rows(self.recipe)
        if self._counted[0] is not fitting:  # what is drawn from the same frame was counted in it
            ids = fitting["episode_id"]
            self._counted = fitting, len(ids) + len(self._times) - int(ids.is_in(list(self._times)).sum())
        return self._counted[1]

    @property
    def left_out(self) -> dict[str, int]:
        """How many episodes that fit the filter could not be drawn when a draw was last tried, by reason."""
        return self._left_out

    @property
    def samples(self) -> int:
        """Samples that were drawn."""
        return self._samples

    def take(self, count: int, timeout: float | None = None) -> list[Sample]:
        """The next `count` draws, as soon as limiter and strategy allow them. Raises TimeoutError after `timeout`
        seconds, UsageError for less than one draw, and where the limiter could never allow so many at once."""
        samples, _, _ = self._draw(count, timeout)
        return samples

    def batch(self, size: int, timeout: float | None = None) -> Batch:
        """The next `size` draws with their steps; see `take`."""
        samples, rows, pieces = self._draw(size, timeout)
        batch = Batch(self._view, lambda: samples, rows, pieces)
        _ = batch.tables  # now: what is in memory may have moved into the tables at the next draw
        return batch

    def _draw(self, count: int, timeout: float | None) -> tuple[list[Sample], pl.DataFrame, Pieces]:
        if count < 1:
            raise UsageError(f"live draws are 1, 2, 3, … at once, not {count}")
        if count > self.limiter.largest_batch:
            raise UsageError(
                f"{count} samples at once could wait for ever: the limiter allows {self.limiter.largest_batch:g}"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._refresh()
            if self.limiter.can_sample(self.inserts, self._samples, count):
                left = self._look_ahead(count)
                if left >= count:
                    return self._drawn(count)
                reasons = ", ".join(f"{number} {reason}" for reason, number in self._left_out.items())
                waits = f"{left:g} can be drawn" + (f"; left out: {reasons}" if reasons else "")
            else:
                waits = "the limiter allows no more"
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{count} samples could not be drawn within {timeout:g} s: there are {self.inserts} episodes, "
                    f"{self._samples} samples were drawn, {waits}"
                )
            time.sleep(min(0.05, self._poll_seconds))

    def _refresh(self) -> None:
        if time.monotonic() - self._polled < self._poll_seconds:
            return
        self._stale |= self._view.refresh()
        self._polled = time.monotonic()

    def _look_ahead(self, count: int) -> float:
        """Make generations until `count` draws are certain; how many are, which is less where there is nothing more."""
        if self._stale:
            self._stale, self._ahead, self._no_more = False, [], False
        left = sum(sampler.left for sampler in self._ahead)
        while left < count and not self._no_more:
            sampler = self._next_generation()
            if sampler is None or not sampler.left:
                self._no_more = True
            else:
                self._ahead.append(sampler)
                left += sampler.left
        return left

    def _next_generation(self) -> Sampler | None:
        """A sampler over what may be drawn after all that is ahead was; None where that is nothing."""
        most = self.recipe.max_times_sampled
        if most is None and self._ahead:
            return None
        times = Counter(self._times)
        for sampler in self._ahead:
            times.update(sampler.may_come())
        spent = [] if most is None else [episode_id for episode_id, drawn in times.items() if drawn >= most]
        left_out = {}
        try:
            seed = int(words(self.recipe.seed, self._generation, 1, stream=2)[0] >> np.uint64(1))
            # One generation draws each at most once more; the count over all of them is kept here.
            once = None if most is None else 1
            recipe = replace(self.recipe, seed=seed, max_times_sampled=once)
            drawable = population(self._view.rows(self.recipe), recipe, spent)
            left_out = drawable.left_out
            sampler = Sampler(self._view, drawable, recipe)
        except NothingFits as error:
            left_out = error.left_out or left_out
            return None
        finally:
            if not self._ahead:
                self._left_out = left_out or self._left_out
        self._generation += 1
        self._set_priorities(sampler, self._priorities)
        return sampler

    def _drawn(self, count: int) -> tuple[list[Sample], pl.DataFrame, Pieces]:
        samples: list[Sample] = []
        rows, pieces = [], []
        missing = count
        while missing:
            sampler = self._ahead[0]
            draws = sampler.draw(missing)
            first = self._samples - int(draws.position[0])
            for sample in sampler.samples(draws):
                times = self._times[sample.episode_id] = self._times.get(sample.episode_id, 0) + 1
                samples.append(replace(sample, position=first + sample.position, times_sampled=times))
            rows.append(sampler.population.rows[draws.pieces.row])
            pieces.append(replace(draws.pieces, draw=draws.pieces.draw + (count - missing)))
            self._samples += len(draws)
            missing -= len(draws)
            if not sampler.left:
                del self._ahead[0]
                self._no_more = False
        names = Pieces.__dataclass_fields__
        together = Pieces(*(np.concatenate([getattr(each, name) for each in pieces]) for name in names))
        return samples, pl.concat(rows), together

    def update_priorities(self, drawn: Iterable[Sample], priorities: Sequence[float] | np.ndarray[Any, Any]) -> None:
        """Set the priorities of episodes that were drawn. Raises UsageError, and then nothing is changed."""
        if self.recipe.strategy.name != "prioritized":
            raise UsageError("this strategy has no priorities to update: use prioritized")
        ids = [sample.episode_id for sample in drawn]
        values = dict(zip(ids, checked(priorities, len(ids)).tolist(), strict=True))
        self._priorities.update(values)
        for sampler in self._ahead[:1]:
            self._set_priorities(sampler, values)
        # What comes after it depends on what can be drawn from it.
        self._ahead, self._no_more = self._ahead[:1], False

    def _set_priorities(self, sampler: Sampler, values: dict[str, float]) -> None:
        if values:
            ids = sampler.population.rows["episode_id"]
            rows = ids.is_in(list(values)).arg_true().to_numpy().astype(np.int64)
            sampler.set_priorities(rows, np.array([values[ids[int(row)]] for row in rows]))

    def state_dict(self) -> dict[str, Any]:
        """What was drawn so far, as JSON-compatible values."""
        return {
            "lake_id": self._view.lake_id,
            **self.recipe.to_json(),
            "samples": self._samples,
            "generation": self._generation,
            "times_sampled": dict(self._times),
            "priorities": dict(self._priorities),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after what `state` says was drawn. Raises UsageError where it is of another lake or recipe, or damaged,
        and then nothing is changed."""
        with refusing_damaged():
            ensure_same({"lake_id": self._view.lake_id, **self.recipe.to_json()}, state)
            samples, generation = int(state["samples"]), int(state["generation"])
            times, priorities = dict(state["times_sampled"]), dict(state["priorities"])
        self._samples, self._generation, self._times, self._priorities = samples, generation, times, priorities
        self._stale = True
        self._counted = (None, 0)


def live_sampler(
    lake: Lake,
    strategy: str | Strategy,
    *,
    limiter: RateLimiter | None = None,
    poll_seconds: float = 1.0,
    table_seconds: float = 30.0,
    **choices: Any,
) -> LiveSampler:
    """See Lake.sampler; `choices` are those of Snapshot.sampler but for rank and world_size."""
    common = Recipe.__dataclass_fields__.keys() - {"strategy", "normalize_reward"}
    options = {name: value for name, value in choices.items() if name not in common and name != "normalize_reward"}
    if "rank" in options or "world_size" in options:
        raise UsageError("a live sequence differs from reader to reader: let one process draw, or filter by where")
    rest = {name: value for name, value in choices.items() if name in common}
    recipe = Recipe.of(strategy, options, choices.get("normalize_reward"), **rest)
    return LiveSampler(lake, recipe, limiter=limiter, poll_seconds=poll_seconds, table_seconds=table_seconds)
