"""A snapshot: the tables at pinned versions. Everything that reads, reads one of these."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from trajlake.errors import (
    EpisodeAmbiguous,
    EpisodeMissing,
    EpisodeRemoved,
    LakeMissing,
    ObjectMissing,
    QueryError,
    SnapshotExpired,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from trajlake.read.index import MOST_BYTES, EpisodeIndex
from trajlake.read.steps_reader import StepsReader
from trajlake.read.tags import filtered, with_tags
from trajlake.read.trajectory import Trajectory, restored
from trajlake.table.commit import active_files, missing_files
from trajlake.table.tables import open_table
from trajlake.table.tombstones import why_removed
from trajlake_schemas import EPISODES, STEPS

if TYPE_CHECKING:
    from trajlake.lake import Lake
    from trajlake.read.export import ExportReport
    from trajlake.read.items import Window
    from trajlake.read.sampler import Sampler
    from trajlake.read.strategies import Strategy

_TOKEN = re.compile(r"e(\d+)\.s(\d+)")
_FIRST_WORD = re.compile(r"(?:[\s(;]|--[^\n]*\n|/\*.*?\*/)*+(\w*)", re.DOTALL)  # behind spaces, brackets and comments
_FILES = re.compile(r"\bread_\w+\s*\(", re.IGNORECASE)  # functions of Polars that open files
_LITERAL = re.compile(r"'(?:[^']|'')*'")
_READS = ("SELECT", "WITH", "FROM", "VALUES", "SHOW", "EXPLAIN")  # Polars' SQL answers others too, as if it had obeyed
_CANDIDATES = 5  # episodes that are named where the beginning of an id fits several
_PLACE = ["episode_id", "steps_path", "row_group", "row_offset", "row_count"]
CACHE_BYTES = 128 << 20  # decoded steps that a snapshot keeps
FAILED = "coalesce(success = false, false) OR coalesce(status = 'failed', false)"
USABLE = pl.col("retracted").is_null()


class Snapshot:
    """The episodes and steps of one moment. `token` names it: `lake.snapshot(token)` opens the same one again, and
    `lake_id` tells lakes apart that were at the same address one after another."""

    def __init__(self, lake: Lake, lake_id: str, episodes_table: DeltaTable, steps_table: DeltaTable) -> None:
        self.lake = lake
        self.lake_id = lake_id
        self._episodes_table = episodes_table
        self._steps_table = steps_table
        self._lookups = 0

    def __repr__(self) -> str:
        return f"Snapshot({self.lake.uri!r}, {self.token!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return open_snapshot, (self.lake, self.token, self.lake_id)

    @property
    def token(self) -> str:
        """E.g. `e12.s13`: the versions of `episodes` and of the `steps` that its rows point into."""
        return f"e{self._episodes_table.version()}.s{self._steps_table.version()}"

    @property
    def episodes(self) -> pl.LazyFrame:
        """One row an episode; columns as in docs/schema.md."""
        return pl.scan_delta(self._episodes_table)

    @property
    def steps(self) -> pl.LazyFrame:
        """One row a step; columns as in docs/schema.md."""
        return pl.scan_delta(self._steps_table)

    def where(self, condition: str | None) -> pl.LazyFrame:
        """`episodes`, filtered by a SQL condition such as `reward > 0.5 AND success` or `tags['team'] = 'a'`.

        Raises QueryError with what is wrong in it.
        """
        if condition is None or not condition.strip():
            return self.episodes
        with _reading(self):
            frame = filtered(self.episodes, condition)
            frame.collect_schema()
        return frame

    def query(self, sql: str) -> pl.DataFrame:
        """The result of a SELECT over `episodes` and `steps` (Polars SQL; only the columns and files that it needs
        are read). `tags['team']` is a tag of an episode. Raises QueryError with what is wrong in it, and for what
        would write."""
        _must_read(sql)
        _must_be_of_tables(sql)
        episodes, sql, _ = with_tags(self.episodes, sql)
        context = pl.SQLContext({"episodes": episodes, "steps": self.steps})
        with _reading(self):
            return context.execute(sql).collect(engine="streaming")

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        """Collect a frame of this snapshot, with the errors of reading made clear."""
        with _reading(self):
            return frame.collect(engine="streaming")

    def episode(self, episode_id: str) -> Trajectory:
        """One episode by its id, or by the beginning of its id where only one has it. Raises EpisodeMissing."""
        return next(self._with_steps(self.row_of(episode_id)))

    def row_of(self, episode_id: str) -> pl.DataFrame:
        """The row of one episode by its id, or by the beginning of its id. Raises EpisodeMissing."""
        if not episode_id:  # every id begins so
            raise EpisodeMissing("no id was given: `trajlake episodes` lists them")
        index = self._index_if_it_pays()
        found = self._some([episode_id], index)
        if found.is_empty():
            beginning = self.episodes.filter(pl.col("episode_id").str.starts_with(episode_id)).limit(_CANDIDATES + 1)
            found = self.collect(beginning) if index is None else index.beginning_with(episode_id, _CANDIDATES + 1)
            if found.is_empty():
                raise self._missing(episode_id)
            if len(found) > 1:
                raise _ambiguous(episode_id, found)
        return found

    def _missing(self, episode_id: str) -> EpisodeMissing:
        reason = why_removed(self.lake.store, episode_id)
        if reason is not None:
            return EpisodeRemoved(f"episode {episode_id} was retracted for good, because: {reason}")
        return EpisodeMissing(f"no episode {episode_id} in snapshot {self.token}: `trajlake episodes` lists them")

    def trajectories(self, episode_ids: Iterable[str]) -> Iterator[Trajectory]:
        """These episodes, in this order, a repeated id repeatedly. Raises EpisodeMissing before the first."""
        return self._with_steps(self.rows_of(list(episode_ids)))

    def rows_of(self, episode_ids: Sequence[str]) -> pl.DataFrame:
        """The rows of these episodes, in this order, a repeated id repeatedly. Raises EpisodeMissing."""
        unique = list(dict.fromkeys(episode_ids))
        rows = self._some(unique, self._index_if_it_pays())
        if len(rows) < len(unique):
            missing = set(unique) - set(rows["episode_id"])
            raise self._missing(min(missing))
        wanted = pl.DataFrame({"episode_id": episode_ids}, schema={"episode_id": pl.String})
        return wanted.join(rows, on="episode_id", how="left", maintain_order="left").select(rows.columns)

    def _some(self, episode_ids: list[str], index: EpisodeIndex | None) -> pl.DataFrame:
        if index is not None:
            return index.rows_of(episode_ids)
        return self.collect(self.episodes.filter(pl.col("episode_id").is_in(episode_ids)))

    def _index_if_it_pays(self) -> EpisodeIndex | None:
        """The index from the second lookup on, where the table is not too large to keep; else None: a scan."""
        self._lookups += 1
        return None if self._lookups == 1 else self._index

    @cached_property
    def _index(self) -> EpisodeIndex | None:
        if sum(_sizes(self._episodes_table).values()) > MOST_BYTES:
            return None
        return EpisodeIndex(self.collect(self.episodes))

    def _with_steps(self, rows: pl.DataFrame) -> Iterator[Trajectory]:
        """The trajectories of these rows, in bounded batches."""
        with _reading(self):
            for batch in self._reader.batches(rows):
                for row, steps in zip(batch.iter_rows(named=True), self._reader.read(batch), strict=True):
                    yield Trajectory(restored(row), [restored(step) for step in steps.to_pylist()])

    def steps_of(self, rows: pl.DataFrame, *, keep: bool = False) -> list[Any]:
        """For each episode row an Arrow table of its steps, by its place: one small read an episode. With `keep` what
        was decoded beside them is kept for later calls, up to CACHE_BYTES: for who draws at random, again and again."""
        with _reading(self):
            return self._reader.read(rows.select(_PLACE), keep=keep)

    def batches(self, rows: pl.DataFrame) -> Iterator[tuple[pl.DataFrame, list[pa.Table]]]:
        """These episode rows in batches of which the steps fit into memory, and their steps as `steps_of` gives them:
        for who needs them all, in whatever order."""
        with _reading(self):
            yield from self._reader.batches_with_steps(rows)

    @cached_property
    def _reader(self) -> StepsReader:
        return StepsReader(self.lake.store, _sizes(self._steps_table), CACHE_BYTES)

    def sampler(
        self,
        strategy: str | Strategy = "uniform",
        *,
        where: str | None = None,
        seed: int = 0,
        unique: bool = False,
        empty: bool = False,
        window: Window | None = None,
        policy_version: float | None = None,
        normalize_reward: str | Sequence[str] | None = None,
        max_times_sampled: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> Sampler:
        """Draws episodes that fit `where`: see trajlake.read.strategies for the strategies and their `options`, and
        trajlake.read.population.Recipe for the rest. `rank` is this reader's of `world_size` readers that share one
        sequence. Raises UsageError and QueryError."""
        from trajlake.read.population import Recipe, read_population
        from trajlake.read.sampler import Sampler

        recipe = Recipe.of(
            strategy,
            options,
            normalize_reward,
            seed=seed,
            where=where,
            unique=unique,
            empty=empty,
            window=window,
            policy_version=policy_version,
            max_times_sampled=max_times_sampled,
        )
        return Sampler(self, read_population(self, recipe), recipe, rank=rank, world_size=world_size)

    def export(
        self,
        destination: str | Path,
        *,
        format: str = "parquet",
        shards: int = 1,
        seed: int = 0,
        where: str | None = None,
        unique: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ExportReport:
        """Write the episodes as training shards: see trajlake.read.export."""
        from trajlake.read.export import export

        return export(
            self,
            destination,
            format=format,
            shards=shards,
            seed=seed,
            where=where,
            unique=unique,
            on_progress=on_progress,
        )


def _must_read(sql: str) -> None:
    found = _FIRST_WORD.match(sql)
    first = found[1] if found else ""
    if first.upper() not in _READS:
        begins = f"{first[:40]!r} is not how it may begin" if first else "there is no SQL"
        raise QueryError(
            f"a query only reads, and {begins}: write {', '.join(_READS[:-1])} or {_READS[-1]}; "
            "`trajlake retract` removes episodes"
        )


def _must_be_of_tables(sql: str) -> None:
    if found := _FILES.search(_LITERAL.sub("''", sql)):
        raise QueryError(f"a query is over the tables episodes and steps, and opens no files: {found[0]}…) does")


def _ambiguous(beginning: str, found: pl.DataFrame) -> EpisodeAmbiguous:
    count = "more than 5" if len(found) > _CANDIDATES else str(len(found))
    lines = [f"{count} episodes begin with {beginning}: give more of the id"]
    for row in found.sort("episode_id").head(_CANDIDATES).iter_rows(named=True):
        names = filter(None, (row["task_family"] or row["env_name"], row["task_id"]))
        task = " ".join("/".join(names).split()) or "no task named"
        judged = {True: "solved", False: "failed", None: "not judged"}[row["success"]]
        lines.append(f"{row['episode_id']}  {task}  {row['status']}, {judged}")
    return EpisodeAmbiguous("\n".join(lines))


def _sizes(table: DeltaTable) -> dict[str, int]:
    """The size in bytes of each file of a table, from its log."""
    files = active_files(table)
    return dict(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True)) if len(files) else {}


_first_reader: int | None = None


def _refuse_after_fork() -> None:
    """The threads of Polars and of delta-rs are not in a forked child: there, the one waits for ever, the other panics.
    Raises UsageError instead."""
    global _first_reader
    if _first_reader is None:
        _first_reader = os.getpid()
    elif _first_reader != os.getpid():
        raise UsageError(
            "this process was forked from one that had read a lake, and what reads does not survive a fork: start "
            "workers by spawn or forkserver (of a PyTorch DataLoader: multiprocessing_context='forkserver')"
        )


@contextmanager
def _reading(snapshot: Snapshot) -> Iterator[None]:
    """The errors of a query and of its files, made clear. A file that is gone: the snapshot has expired."""
    _refuse_after_fork()
    try:
        yield
    except (ObjectMissing, FileNotFoundError) as error:
        raise _gone(snapshot, error) from error
    except (OSError, pl.exceptions.ComputeError) as error:
        if any(words in str(error) for words in ("404", "NoSuchKey", "No such file")):
            raise _gone(snapshot, error) from error
        if isinstance(error, OSError):
            raise
        raise QueryError(_one_line(error)) from error
    except pl.exceptions.ColumnNotFoundError as error:
        raise QueryError(_unknown_column(str(error))) from error
    except pl.exceptions.StructFieldNotFoundError as error:
        name = str(error).splitlines()[0]
        raise QueryError(f"no column has a field {name!r}: the tag of that name is tags[{name!r}]") from error
    except pl.exceptions.PolarsError as error:
        raise QueryError(_one_line(error)) from error
    except pl.exceptions.PanicException as error:  # which is no Exception
        raise QueryError(
            f"Polars cannot do this, and does not say why ({_one_line(error)}): write it otherwise"
        ) from error


def _gone(snapshot: Snapshot, error: Exception) -> SnapshotExpired | StoreError:
    """What it means that a file is not there."""
    token = snapshot.token
    if open_snapshot(snapshot.lake, None, snapshot.lake_id).token != token:
        text = f"files of snapshot {token} were removed after the retention period: take a newer snapshot"
        return SnapshotExpired(text)
    lost = missing_files(snapshot.lake.store)
    what = ", ".join(lost[:_CANDIDATES]) or _one_line(error)
    return StoreError(
        f"{snapshot.lake.uri} is damaged: {what} {'is' if len(lost) < 2 else 'are'} not there, though the newest "
        "snapshot needs it; restore it from a backup or from the bucket's older versions"
    )


def _unknown_column(text: str) -> str:
    """Polars lists every column there is; the nearest few say more."""
    match = re.search(r'unable to find column "(.*?)"', text)
    if match is None:
        return text.splitlines()[0]
    near = get_close_matches(match[1], [*EPISODES.names(), *STEPS.names()], n=3)
    hint = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    return f"unknown column {match[1]!r}: {hint}`trajlake schema show` lists them all; a text is written '{match[1]}'"


def _one_line(error: BaseException) -> str:
    """Polars' words without the plan that it prints below them, and without its own names for things."""
    words = " ".join(str(error).split("\n\n")[0].split())
    if match := re.fullmatch(r"relation '(.*)' was not found", words):
        return f"there is no table {match[1]!r}: the tables are episodes and steps"
    words = re.sub(r"^(statement type is not supported: \w+).*", r"\1", words)
    return re.sub(r"^unable to parse (.*) as Expr$", r"\1 is no condition in SQL", words)


def open_snapshot(lake: Lake, token: str | None, lake_id: str) -> Snapshot:
    """See Lake.snapshot."""
    _refuse_after_fork()
    if token is None:
        episodes = open_table(lake.store, "episodes")
        pinned = episodes.transaction_version("steps")
        steps = open_table(lake.store, "steps", 0 if pinned is None else pinned)
        return Snapshot(lake, lake_id, episodes, steps)
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise UsageError(f"{token!r} is not a snapshot's token; one looks like e12.s13")
    try:
        return Snapshot(
            lake,
            lake_id,
            open_table(lake.store, "episodes", int(match[1])),
            open_table(lake.store, "steps", int(match[2])),
        )
    except StoreError as error:
        if isinstance(error, StoreUnavailable) and "404" not in str(error) and "No such file" not in str(error):
            raise
        raise SnapshotExpired(f"the lake no longer has snapshot {token}: take a newer one") from error
    except LakeMissing as error:  # whoever asks has seen the lake's marker: it is the version that is gone
        raise SnapshotExpired(f"the lake no longer has snapshot {token}: take a newer one") from error


def is_repeat(snapshot: Snapshot) -> pl.Expr:
    """Whether an episode of the snapshot repeats the content of another that can be used, for any frame of `episodes`.
    Of those whose original was retracted after they were marked, the one with the least id is no repeat."""
    is_marked = pl.col("duplicate_of").is_not_null()
    usable = snapshot.episodes.filter(USABLE)
    marked = snapshot.collect(usable.filter(is_marked).select("episode_id", "duplicate_of"))
    originals = pl.col("episode_id").is_in(marked["duplicate_of"].unique().implode())
    there = snapshot.collect(usable.filter(originals).select("episode_id"))["episode_id"]
    orphans = marked.filter(~pl.col("duplicate_of").is_in(there.implode()))
    heirs = orphans.group_by("duplicate_of").agg(pl.col("episode_id").min())["episode_id"]
    return is_marked & ~pl.col("episode_id").is_in(heirs.implode())
