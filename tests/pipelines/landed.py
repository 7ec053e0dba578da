"""Segments made without a Writer: many of them in a second, for tests of what a pass costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from trajlake.ingest.segment import Event, SegmentName, encode_batch, encode_segment

BASE = 1_700_000_000_000_000


def episode_id(number: int) -> str:
    """An id that begins with the time, as a Writer makes them; later numbers are later."""
    return f"{number:012x}-7000-8000-000000000000"


def events_of(episode: str, *, steps: int = 2, first: int = 0, message: str = "step") -> list[Event]:
    """A whole episode as events whose sequences begin at `first`."""
    kinds = [("begin", {"task_id": "t", "task_family": "toy"})]
    kinds += [("step", {"source": "agent", "message": f"{message} {number}"}) for number in range(steps)]
    kinds += [("end", {"status": "completed", "reward": 1.0})]
    return [Event(kind, episode, 0, first + at, BASE + at, row) for at, (kind, row) in enumerate(kinds)]


def segment_bytes(events: Sequence[Event]) -> bytes:
    """One segment of these events."""
    return encode_segment(pa.Table.from_batches([encode_batch(events)]))


def land(store, numbers: Iterable[int], *, run="run", worker="w", epoch=0, ids=episode_id) -> None:
    """Segment `number` of the epoch holds one episode, for each of `numbers`. The store is a folder; files are
    written there directly, since making each of them durable takes longer than the test."""
    for number in numbers:
        path = Path(store.uri) / SegmentName(run, worker, epoch, number).key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(segment_bytes(events_of(ids(number), first=4 * number)))
