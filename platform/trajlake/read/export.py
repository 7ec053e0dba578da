"""Export: training shards that look finished only when they are, and that a second reader has verified.

Everything is written into `<destination>.incomplete/`; each shard is read back and compared, then noted; the manifest
is last, and one rename makes the folder appear under its name. An export that was interrupted goes on with the shards
that were noted, if it is asked for the same thing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from trajlake.errors import ExportError, StoreError, UsageError
from trajlake.formats.exporting import export_format, parts_of, write_part
from trajlake.read.lineage import episodes_of, is_registered, register
from trajlake.read.shards import SHARD_WRITERS, Batch, ShardFile
from trajlake.read.snapshot import USABLE, is_repeat
from trajlake.read.steps_reader import BATCH

if TYPE_CHECKING:
    from trajlake.formats import Format
    from trajlake.read.snapshot import Snapshot

MANIFEST = "manifest.json"
_PLAN = "plan.json"
_NOT_REGISTERED = "%s is finished, but could not be put into the lake's lineage: %s"
_log = logging.getLogger("trajlake")


@dataclass(frozen=True)
class ExportReport:
    """A finished export: where it is, what its manifest says, and how many of its shards an earlier try had made. Where
    all were there, `retracted_since` are the ids of its episodes that must not be used any more."""

    destination: Path
    manifest: dict[str, Any]
    resumed_shards: int
    retracted_since: Sequence[str] = ()

    @property
    def episodes(self) -> int:
        return int(self.manifest["episodes"])


def export(
    snapshot: Snapshot,
    destination: str | Path,
    *,
    format: str,
    shards: int,
    seed: int,
    where: str | None,
    unique: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write the episodes that fit `where`, one row each, shuffled by `seed`, into `shards` files of nearly equal rows.

    Retracted episodes are left out, and with `unique` those that repeat the content of another.
    `format` is `parquet` (the portable profile: flat columns, nested values as JSON text), `jsonl`, or the name of a
    foreign format that has a way back: see trajlake.formats.exporting. Files of these are not shuffled, and take no
    `seed`. The same snapshot, filter, seed and number of shards give the same bytes. `on_progress` gets episodes done
    and episodes in all. Raises UsageError, QueryError, ExportError.
    """
    if "://" in str(destination):
        raise UsageError(f"an export is written to a folder, not to {destination}; copy the folder there afterwards")
    foreign = None if format in SHARD_WRITERS else export_format(format, SHARD_WRITERS)
    if shards < 1:
        raise UsageError(f"shards must be at least 1, not {shards}")
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to 2**63 - 1, not {seed}")
    if foreign is not None and seed:
        raise UsageError(f"files of {format} keep the order of their sources: leave the seed out")
    target = Path(destination)
    plan = {
        "lake": snapshot.lake.uri,
        "lake_id": snapshot.lake_id,
        "snapshot": snapshot.token,
        "where": where,
        "seed": seed,
        "format": format,
        "shards": shards,
        "unique": unique,
    }
    done = _finished(target, plan)
    if done is None and target.exists() and target.samefile("."):
        raise UsageError(
            f"an export cannot take the place of the folder that it runs in, {target.absolute()}: name one"
        )
    if done is not None and _is_registered(snapshot, target, plan, done.manifest):
        return replace(done, retracted_since=_retracted_since(snapshot, target, plan, done.manifest))
    rows, retracted, repeated = _chosen(snapshot, where, None if foreign else seed, unique)
    parts, how = _parts(snapshot, rows, format, foreign, shards)
    if done is not None:  # it was killed, or the store was away, when it had just appeared
        _register(snapshot, target, plan, done.manifest, rows, parts)
        return replace(done, retracted_since=_retracted_since(snapshot, target, plan, done.manifest))
    work = target.with_name(target.name + ".incomplete")
    with _working_folder(work, plan):
        files, resumed = _write_parts(snapshot, parts, rows, work, on_progress)
        manifest = {
            **plan,
            "episodes": len(rows),
            "steps": sum(file.steps for file in files),
            "left_out_retracted": retracted,
            "left_out_repeated": repeated,
            **how,
            "files": [asdict(file) for file in files],
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "trajlake": version("trajlake"),
        }
        _write_durably(work / MANIFEST, json.dumps(manifest, indent=2))
        for leftover in [work / _PLAN, *work.rglob("*.done")]:
            leftover.unlink()
    _appear(work, target)
    _register(snapshot, target, plan, manifest, rows, parts)
    return ExportReport(target, manifest, resumed)


def _as_registered(target: Path, plan: dict[str, Any], manifest: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Under what the export stands in the lineage; those of earlier versions without the `lake_id`."""
    what = {name: manifest[name] for name in (*plan, "files") if name in manifest}
    return "export", str(target.absolute()), what


def _is_registered(snapshot: Snapshot, target: Path, plan: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Whether the lineage has the export, or cannot be asked."""
    try:
        return is_registered(snapshot.lake, *_as_registered(target, plan, manifest))
    except StoreError as error:
        _log.warning(_NOT_REGISTERED, target, error)
        return True


def _retracted_since(snapshot: Snapshot, target: Path, plan: dict[str, Any], manifest: dict[str, Any]) -> Sequence[str]:
    """The ids of the export's episodes that the newest snapshot has as retracted, or not at all."""
    try:
        ids = episodes_of(snapshot.lake, *_as_registered(target, plan, manifest))
    except StoreError as error:
        _log.warning(_NOT_REGISTERED, target, error)
        return ()
    newest = snapshot.lake.snapshot()
    usable = newest.episodes.filter(USABLE & pl.col("episode_id").is_in(ids)).select("episode_id")
    return sorted(set(ids) - set(newest.collect(usable)["episode_id"]))


def _register(
    snapshot: Snapshot,
    target: Path,
    plan: dict[str, Any],
    manifest: dict[str, Any],
    rows: pl.DataFrame,
    parts: list[_Part],
) -> None:
    """Put the export into the lake's lineage. A lake that may only be read is no reason to lose the export."""
    places = [(part.name, position) for part in parts for position in range(len(part.rows))]
    used = rows.select(pl.col("episode_id").gather([*chain(*(part.rows for part in parts))])).with_columns(
        part=pl.Series([name for name, _ in places], dtype=pl.String),
        position=pl.Series([position for _, position in places], dtype=pl.Int64),
    )
    try:
        register(snapshot.lake, *_as_registered(target, plan, manifest), used)
    except StoreError as error:
        _log.warning(_NOT_REGISTERED, target, error)


def _chosen(snapshot: Snapshot, where: str | None, seed: int | None, unique: bool) -> tuple[pl.DataFrame, int, int]:
    """The episode rows, shuffled where there is a seed, and how many were left out: retracted, repeating another."""
    rows = snapshot.collect(snapshot.where(where).sort("episode_id"))
    usable = rows.filter(pl.col("retracted").is_null())
    chosen = usable.filter(~is_repeat(snapshot)) if unique else usable
    if chosen.is_empty():
        raise UsageError("no episode fits" + (f" {where!r}" if where else ": the snapshot is empty"))
    if seed is None:
        return chosen, len(rows) - len(usable), len(usable) - len(chosen)
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(chosen))
    return chosen[order], len(rows) - len(usable), len(usable) - len(chosen)


@dataclass(frozen=True)
class _Part:
    """One file to write, which rows are its episodes, and what writes it: `write(batches, path)`."""

    name: str
    rows: Sequence[int]
    write: Callable[[Iterator[Batch], Path], ShardFile]


def _parts(
    snapshot: Snapshot, rows: pl.DataFrame, format: str, foreign: Format | None, shards: int
) -> tuple[list[_Part], dict[str, int]]:
    """The files, and what the manifest says of how they were made."""
    if foreign is None:
        write = SHARD_WRITERS[format]
        split = np.array_split(np.arange(len(rows)), shards)
        return [
            _Part(f"shard-{number:05d}-of-{shards:05d}.{format}", part.tolist(), write)
            for number, part in enumerate(split)
        ], {}
    found, exact = parts_of(snapshot, rows, foreign, shards)
    how = {"as_imported": exact, "of_columns": len(rows) - exact}
    return [_Part(part.name, part.rows, partial(write_part, foreign, part)) for part in found], how


def _write_parts(
    snapshot: Snapshot,
    parts: list[_Part],
    rows: pl.DataFrame,
    work: Path,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[list[ShardFile], int]:
    files: list[ShardFile] = []
    resumed = done = 0

    def said(batches: Iterator[Batch]) -> Iterator[Batch]:
        nonlocal done
        for batch in batches:
            yield batch
            done += len(batch[0])
            if on_progress is not None:
                on_progress(done, len(rows))

    for run in _runs(parts):
        note = work / f"{run[0].name}.done"
        written = _written(note, work)
        if written is not None:
            resumed += len(run)
            done += sum(len(part.rows) for part in run)
        else:
            stream = _Stream(snapshot.batches(rows[[*chain(*(part.rows for part in run))]]))
            written = [part.write(said(stream.take(len(part.rows))), work / part.name) for part in run]
            for part, file in zip(run, written, strict=True):
                if file.rows != len(part.rows):
                    raise ExportError(f"{part.name}: {file.rows} rows were written for {len(part.rows)} episodes")
            _write_durably(note, json.dumps([asdict(file) for file in written]))
        files += written
    if on_progress is not None:
        on_progress(len(rows), len(rows))
    return files, resumed


def _runs(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Files that are read, and noted as written, together: small ones up to a batch of episodes, a large one alone."""
    run: list[_Part] = []
    episodes = 0
    for part in parts:
        if run and episodes + len(part.rows) > BATCH:
            yield run
            run, episodes = [], 0
        run.append(part)
        episodes += len(part.rows)
    if run:
        yield run


class _Stream:
    """Batches, given out in other sizes."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._rest: Batch | None = None

    def take(self, episodes: int) -> Iterator[Batch]:
        """The next so many episodes."""
        while episodes:
            rows, tables = self._rest or next(self._batches)
            self._rest = (rows[episodes:], tables[episodes:]) if len(rows) > episodes else None
            yield rows[:episodes], tables[:episodes]
            episodes -= min(episodes, len(rows))


def _written(note: Path, work: Path) -> list[ShardFile] | None:
    """The files that an earlier export noted, if they are still what they were."""
    noted = _read_json(note)
    if noted is None:
        return None
    files = [ShardFile(**file) for file in noted]
    if any(not (work / file.name).exists() or file.sha256 != _sha256(work / file.name) for file in files):
        return None
    return files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _finished(target: Path, plan: dict[str, Any]) -> ExportReport | None:
    """The export, where it is there already. Raises ExportError where something else is, UsageError where that is an
    export of a lake that was at this address before."""
    if not target.exists():
        return None
    otherwise = "choose another folder or remove it"
    manifest = _read_json(target / MANIFEST)
    if not isinstance(manifest, dict) or "files" not in manifest:
        if not target.is_dir() or any(target.iterdir()):
            raise ExportError(f"{target} exists and is no export: {otherwise}")
        return None
    differing = _differing(plan, manifest)
    if "lake" not in differing and "lake_id" in differing:
        raise UsageError(f"the lake at {plan['lake']} was made anew after the export to {target}: {otherwise}")
    if differing:
        raise ExportError(f"{target} holds another export ({' and '.join(differing)} differ): {otherwise}")
    for file in manifest["files"]:
        if not (target / file["name"]).is_file() or _sha256(target / file["name"]) != file["sha256"]:
            raise ExportError(f"{target / file['name']} is missing or was changed: remove {target} and export again")
    return ExportReport(target, manifest, len(manifest["files"]))


def _read_json(path: Path) -> Any:
    """What is written there; None where that is no JSON, or nothing."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _differing(plan: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What of the plan is another there. Those of earlier versions name no lake_id: they are of the same lake."""
    return [name for name, value in plan.items() if {"lake_id": plan["lake_id"], **other}.get(name) != value]


@contextmanager
def _working_folder(work: Path, plan: dict[str, Any]) -> Iterator[None]:
    """`work`, empty or as an interrupted export of the same plan left it, and ours alone."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = FileIO(work.with_name(work.name + ".lock"), "w")
    except OSError as error:
        raise ExportError(f"{work} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(
                f"another process is exporting to {work}: wait for it, or choose another folder"
            ) from None
        try:
            known = _read_json(work / _PLAN)
            if not isinstance(known, dict) or _differing(plan, known):
                shutil.rmtree(work)
                work.mkdir()
                _write_durably(work / _PLAN, json.dumps(plan))
            yield
        except OSError as error:
            raise ExportError(f"{work} cannot be written: {error}; run the same command to go on") from error
        finally:
            Path(lock.name).unlink(missing_ok=True)


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _appear(work: Path, target: Path) -> None:
    try:
        work.replace(target)  # over an empty folder too
    except OSError as error:
        raise ExportError(f"the finished export is in {work} but cannot be renamed to {target}: {error}") from error
