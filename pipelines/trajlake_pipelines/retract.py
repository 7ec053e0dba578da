"""`retract`: episodes that must not be used, because of names, licences or contamination, are marked or, on request,
removed for good; and it says which exports and samples have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trajlake.errors import EpisodeMissing, UsageError
from trajlake.lake import Lake
from trajlake.read.lineage import LINEAGE, META
from trajlake_pipelines import retract_job
from trajlake_pipelines.compact import compact
from trajlake_pipelines.job import carry_out_own
from trajlake_pipelines.kinds import Make
from trajlake_pipelines.runners import Runner
from trajlake_pipelines.tombstones import tombstones_among


@dataclass(frozen=True)
class UsedBy:
    """An export or a sample that holds retracted episodes: where it was written, in which part, and how many."""

    kind: str
    name: str
    part: str | None
    episodes: int


@dataclass(frozen=True)
class RetractReport:
    """`episodes` were marked or, where `for_good`, removed (or would be, in a dry run). `objects` held them and were
    removed; `waiting` segments hold other episodes that have not ended, so repeat it later; `used_by` are exports
    and samples that hold some of the episodes."""

    episodes: list[str]
    for_good: bool
    objects: list[retract_job.Holder]
    waiting: list[str]
    used_by: list[UsedBy]
    dry_run: bool

    @property
    def bytes(self) -> int:
        return sum(held.bytes for held in self.objects)


def retract(
    lake: Lake,
    episodes: Iterable[str] = (),
    *,
    where: str | None = None,
    reason: str,
    for_good: bool = False,
    exports: Sequence[str | Path] = (),
    dry_run: bool = False,
) -> RetractReport:
    """Say of episodes, either by id or by a condition on `episodes`, that they must not be used, and find the
    registered samples and exports that used them; `exports` are folders of exports that are looked through beside
    those. None of them is changed. What landed is compacted first.

    By default they are marked, as by `Lake.retract`: they stay in the tables with the reason, and no sample and no
    export has them any more. `for_good` removes them from the tables, from every older version of them and from what
    landed, and they stay away when they are sent again. That cannot be undone; older snapshots that held one of them
    can no longer be read where it was.

    Raises EpisodeMissing for an id that the lake does not have, UsageError, QueryError.
    """
    named = set(episodes)
    if bool(named) == bool(where):
        raise UsageError("which episodes? Give their ids, or a condition" + (", not both" if named else ""))
    if not reason.strip():
        raise UsageError("say why the episodes are retracted: the reason stays where they were")
    if not dry_run:
        compact(lake)
    chosen = named or _chosen(lake, where)
    missing = named - set(_existing(lake, sorted(named)))
    # One that was retracted for good before may be named again, to finish what a crash has left.
    gone = set(tombstones_among(lake.store, sorted(missing))) if for_good else set()
    if unknown := missing - gone:
        raise EpisodeMissing(f"no episode {min(unknown)} in {lake.uri}; nothing was retracted")
    found = [*_registered(lake, chosen), *(hit for folder in exports for hit in _hits(Path(folder), chosen))]
    used_by = list({(hit.kind, hit.name, hit.part): hit for hit in found}.values())
    doomed: list[retract_job.Holder] = []
    waiting: list[str] = []
    if for_good:
        if chosen and not dry_run:
            carry_out_own(lake.store, _once(chosen, reason), Runner())
        doomed, waiting = retract_job.objects_that_hold(lake.store, chosen, also_active=dry_run)
        if not dry_run:
            for held in doomed:
                lake.store.delete(held.key)
    elif chosen and not dry_run:
        lake.retract(sorted(chosen), reason)
        compact(lake)
    return RetractReport(sorted(chosen), for_good, doomed, waiting, used_by, dry_run)


def _once(chosen: set[str], reason: str) -> Make:
    return lambda store, number: retract_job.make_plan(store, number, chosen, reason)


def _chosen(lake: Lake, where: str | None) -> set[str]:
    snapshot = lake.snapshot()
    return set(snapshot.collect(snapshot.where(where).select("episode_id"))["episode_id"])


def _existing(lake: Lake, ids: list[str]) -> list[str]:
    snapshot = lake.snapshot()
    found = snapshot.collect(snapshot.episodes.filter(pl.col("episode_id").is_in(ids)).select("episode_id"))
    return found["episode_id"].to_list()


def _registered(lake: Lake, episodes: set[str]) -> Iterable[UsedBy]:
    """Parts of registered samples and exports that used one of `episodes`."""
    for info in lake.store.list(f"{LINEAGE}/"):
        if not info.key.endswith(".parquet"):
            continue
        rows = pq.read_table(pa.BufferReader(lake.store.get(info.key)))
        about = json.loads(rows.schema.metadata[META])
        held: dict[str | None, set[str]] = {}
        for row in rows.filter(pc.is_in(rows["episode_id"], pa.array(sorted(episodes), pa.string()))).to_pylist():
            held.setdefault(row["part"], set()).add(row["episode_id"])
        for part, ids in held.items():
            yield UsedBy(about["kind"], about["name"], part, len(ids))


def _hits(folder: Path, episodes: set[str]) -> Iterable[UsedBy]:
    """Shards of an export that hold one of `episodes`. Raises UsageError where the folder is no export."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        names = [file["name"] for file in manifest["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} is not an export: it has no readable manifest.json") from error
    for name in names:
        held = episodes.intersection(_ids_in(folder / name))
        if held:
            yield UsedBy("export", str(folder.absolute()), name, len(held))


def _ids_in(shard: Path) -> Iterable[str]:
    if shard.suffix == ".parquet":
        return pl.read_parquet(shard, columns=["episode_id"])["episode_id"].to_list()
    with shard.open() as lines:
        return [json.loads(line)["episode_id"] for line in lines]
