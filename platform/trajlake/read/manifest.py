"""Manifests: what was drawn, written down, so that the same batch can be had again after any rewriting of the lake.

A manifest names the sampler (snapshot, recipe, readers) and lists each sample with the attempt and the hash of the
content that it had. Reading it back takes the pinned snapshot while it is kept, and afterwards the newest one, whose
episodes must still be those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from trajlake.errors import EpisodeMissing, SnapshotExpired, UsageError
from trajlake.read.batch import Batch
from trajlake.read.items import Pieces, Window
from trajlake.read.lineage import register
from trajlake.read.sampler import Sample, Sampler

if TYPE_CHECKING:
    from trajlake.lake import Lake
    from trajlake.read.snapshot import Snapshot

_VERSION = 2  # of 1 the digest is of the samples alone
_KEPT = ("attempt", "content_hash")


def make_manifest(snapshot: Snapshot, sampler: Sampler, samples: Sequence[Sample]) -> dict[str, Any]:
    """The manifest of samples that `sampler` drew from `snapshot`, as JSON-compatible values."""
    known = snapshot.collect(snapshot.episodes.select("episode_id", *_KEPT).filter(_among(samples)))
    content = {episode_id: kept for episode_id, *kept in known.iter_rows()}
    listed = [asdict(sample) | dict(zip(_KEPT, content[sample.episode_id], strict=True)) for sample in samples]
    manifest = {
        "manifest": _VERSION,
        "trajlake": version("trajlake"),
        "lake": snapshot.lake.uri,
        "lake_id": snapshot.lake_id,
        "snapshot": snapshot.token,
        **sampler.recipe.to_json(),
        "rank": sampler.rank,
        "world_size": sampler.world_size,
        "samples": listed,
    }
    return {**manifest, "digest": _digest(manifest)}


def _among(samples: Sequence[Sample]) -> pl.Expr:
    return pl.col("episode_id").is_in(list({sample.episode_id for sample in samples}))


def _digest(content: dict[str, Any] | list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_manifest(path: str | Path, snapshot: Snapshot, sampler: Sampler, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write the manifest to a file and register it in the lake's lineage. Raises UsageError where the file cannot be
    written, StoreError."""
    manifest = make_manifest(snapshot, sampler, samples)
    target = Path(path)
    temporary = target.with_name(target.name + ".new")
    try:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n")
        temporary.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    rows = pl.DataFrame(
        {
            "episode_id": [sample.episode_id for sample in samples],
            "part": None,
            "position": [sample.position for sample in samples],
        },
        schema={"episode_id": pl.String, "part": pl.String, "position": pl.Int64},
    )
    what = {name: value for name, value in manifest.items() if name != "samples"}
    register(snapshot.lake, "sample", str(target.absolute()), what, rows)
    return manifest


def read_manifest(path: str | Path) -> dict[str, Any]:
    """A manifest from its file. Raises UsageError where it is none, or was changed."""
    try:
        manifest = json.loads(Path(path).read_text())
        if manifest["manifest"] > _VERSION:
            raise UsageError(f"{path} was written by a newer version: upgrade trajlake")
        content = {name: value for name, value in manifest.items() if name != "digest"}
        if _digest(content["samples"] if manifest["manifest"] < 2 else content) != manifest["digest"]:
            raise UsageError(f"{path} was changed after it was written: its digest does not fit")
        _ = [manifest[name] for name in ("lake", "snapshot", "strategy", "seed")]
        if manifest["window"] is not None:
            Window(**manifest["window"])
        for sample, listed in zip(samples_of(manifest), manifest["samples"], strict=True):
            _ = sample.episode_id, [listed[name] for name in _KEPT]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a manifest of samples") from error
    return dict(manifest)


def samples_of(manifest: dict[str, Any]) -> list[Sample]:
    """The samples that a manifest lists."""
    names = Sample.__dataclass_fields__
    return [Sample(**{name: value for name, value in row.items() if name in names}) for row in manifest["samples"]]


def open_manifest(lake: Lake, manifest: dict[str, Any]) -> Batch:
    """The batch that a manifest lists, with its steps. Raises UsageError for a manifest of another lake (those of
    earlier versions name none), EpisodeMissing where an episode is no longer there or is no longer what it was,
    StoreError."""
    lake_id = lake.check().lake_id
    if manifest.get("lake_id", lake_id) != lake_id:
        what = f"{lake.uri} was made anew since" if manifest["lake"] == lake.uri else f"it is of {manifest['lake']}"
        raise UsageError(f"the manifest is of another lake: {what}")
    try:
        batch = _batch(lake.snapshot(manifest["snapshot"]), manifest)
        _ = batch.tables
        return batch
    except SnapshotExpired:
        return _batch(lake.snapshot(), manifest)


def _batch(snapshot: Snapshot, manifest: dict[str, Any]) -> Batch:
    samples = samples_of(manifest)
    rows = snapshot.rows_of([sample.episode_id for sample in samples])
    for row, listed in zip(rows.select(_KEPT).iter_rows(), manifest["samples"], strict=True):
        if list(row) != [listed[name] for name in _KEPT]:
            raise EpisodeMissing(
                f"episode {listed['episode_id']} is no longer what was drawn: it was sent again after the manifest "
                f"was written, and snapshot {manifest['snapshot']} has expired"
            )
    count = np.arange(len(samples))
    starts = np.array([sample.start for sample in samples], np.int64)
    stops = np.array([sample.stop for sample in samples], np.int64)
    window = manifest["window"]
    lengths = np.full(len(samples), window["length"]) if window and window["pad"] else stops - starts
    return Batch(snapshot, lambda: samples, rows, Pieces(count, count, starts, stops, lengths))


def retracted_since(lake: Lake, batch: Batch) -> dict[str, str]:
    """Episodes of a batch that the newest snapshot says must not be used any more, each with the reason."""
    snapshot = lake.snapshot()
    marked = snapshot.episodes.filter(pl.col("retracted").is_not_null() & _among(batch.samples))
    return dict(snapshot.collect(marked.select("episode_id", "retracted").sort("episode_id")).iter_rows())


def write_steps(path: str | Path, batch: Batch) -> None:
    """The steps of a batch as one Arrow file (IPC, zstd), each row with the position of its sample. The same batch
    gives the same bytes. Raises UsageError where the file cannot be written."""
    counts = [len(table) for table in batch.tables]
    positions = np.repeat(np.array([sample.position for sample in batch.samples], np.int64), counts)
    table = batch.steps.add_column(0, "position", pa.array(positions)).combine_chunks()
    try:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
