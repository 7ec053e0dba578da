"""Lineage: which samples and exports used an episode. Each is registered in the lake as one immutable object.

    lineage/<kind>/<digest>.parquet     kind: sample, export; the digest is of what was drawn or written

Its rows are (episode_id, part, position), sorted by id; its key-value metadata say what it was. Nothing removes these
objects: they answer for a model years later, and take a few bytes an episode.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trajlake.errors import StoreUnavailable
from trajlake.storage import Unknown

if TYPE_CHECKING:
    from trajlake.lake import Lake

LINEAGE = "lineage"
META = b"trajlake.lineage"
_SCHEMA = pa.schema([("episode_id", pa.string()), ("part", pa.string()), ("position", pa.int64())])
_THREADS = 8


@dataclass(frozen=True)
class Use:
    """One use of an episode: by a `sample` or an `export` of that name (a path where it was written), made at that time
    from `snapshot`; in which part (a shard's name) and at which position of it."""

    kind: str
    name: str
    made_at: str
    snapshot: str
    part: str | None
    position: int
    digest: str


def is_registered(lake: Lake, kind: str, name: str, what: dict[str, Any]) -> bool:
    """Whether `register` has put this down before. Raises StoreError."""
    return lake.store.stat(_key(kind, _digest(kind, name, what))) is not None


def episodes_of(lake: Lake, kind: str, name: str, what: dict[str, Any]) -> list[str]:
    """The ids of the episodes that a registered use has, each once. Raises StoreError."""
    key = _key(kind, _digest(kind, name, what))
    found = pq.read_table(pa.BufferReader(lake.store.get(key)), columns=["episode_id"])
    ids: list[str] = found["episode_id"].unique().to_pylist()
    return ids


def _digest(kind: str, name: str, what: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([kind, name, what], sort_keys=True).encode()).hexdigest()[:24]


def _key(kind: str, digest: str) -> str:
    return f"{LINEAGE}/{kind}/{digest}.parquet"


def register(lake: Lake, kind: str, name: str, what: dict[str, Any], rows: pl.DataFrame) -> str:
    """Put down that `what` (JSON) used `rows` (episode_id, part, position); the digest. The same again changes nothing.
    Raises StoreError."""
    body = {
        "kind": kind,
        "name": name,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "snapshot": what["snapshot"],
        "what": what,
    }
    table = rows.sort("episode_id", "position").to_arrow().select(_SCHEMA.names).cast(_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({META: json.dumps(body).encode()}), sink, compression="zstd")
    digest = _digest(kind, name, what)
    outcome = lake.store.put_if_absent(_key(kind, digest), bytes(sink.getvalue()))
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    return digest


def uses_of(lake: Lake, episode_id: str) -> list[Use]:
    """Every registered use of an episode, the oldest first. Reads each registered object. Raises StoreError."""
    keys = [info.key for info in lake.store.list(f"{LINEAGE}/") if info.key.endswith(".parquet")]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda key: _uses(lake, key, episode_id), keys)
        return sorted((use for uses in found for use in uses), key=lambda use: (use.made_at, use.digest, use.position))


def _uses(lake: Lake, key: str, episode_id: str) -> list[Use]:
    file = pq.ParquetFile(pa.BufferReader(lake.store.get(key)))
    about = json.loads(file.schema_arrow.metadata[META])
    table = file.read()
    mine = table.filter(pc.equal(table["episode_id"], episode_id))
    digest = key.rsplit("/", 1)[1].removesuffix(".parquet")
    return [
        Use(about["kind"], about["name"], about["made_at"], about["snapshot"], row["part"], row["position"], digest)
        for row in mine.to_pylist()
    ]
