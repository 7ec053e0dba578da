"""A landing segment: an Arrow IPC stream of events (lz4), followed by its descriptor.

Readers of Arrow streams stop at the end-of-stream mark, so the descriptor behind it disturbs nobody, and a planner
learns which episodes a segment holds from one small read of its tail. A segment without a descriptor (written
by another tool) is fine: it is read whole instead.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from trajlake.errors import SegmentUnreadable
from trajlake.ingest.arrays import Row
from trajlake.ingest.surrogates import without_surrogates
from trajlake_schemas import EVENTS

MAGIC = b"TRAJLAKE"
_TAIL = struct.Struct("<I8s")
TAIL_BYTES = 64 * 1024  # enough for the descriptor of a thousand episodes
LANDING = "landing"
END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"

EVENT_SCHEMA: pa.Schema = EVENTS.arrow.with_metadata({b"trajlake.events": str(EVENTS.version).encode()})
STREAM_HEAD = EVENT_SCHEMA.serialize().size
_NO_ID = "an event in it names no episode"
_KEY_TYPES = [EVENTS[name].type for name in ("kind", "episode_id", "attempt", "sequence", "recorded_at")]


class Event(NamedTuple):
    """One event before it is Arrow: `row` is the struct that `kind` names."""

    kind: str
    episode_id: str
    attempt: int
    sequence: int
    recorded_at: int
    row: Row


@dataclass(frozen=True)
class SegmentName:
    """The key of a segment, taken apart: `landing/<run>/<worker>/<epoch>/<number>.arrow`."""

    run_id: str
    worker_id: str
    epoch: int
    number: int

    @property
    def key(self) -> str:
        return f"{LANDING}/{self.run_id}/{self.worker_id}/{self.epoch:06d}/{self.number:08d}.arrow"

    @classmethod
    def parse(cls, key: str) -> SegmentName:
        """Raises SegmentUnreadable for a key that no writer made."""
        parts = key.split("/")
        try:
            _, run_id, worker_id, epoch, file = parts
            name = cls(run_id, worker_id, int(epoch), int(file.removesuffix(".arrow")))
        except ValueError as error:
            raise SegmentUnreadable(f"{key}: not the name of a segment") from error
        if name.key != key:
            raise SegmentUnreadable(f"{key}: not the name of a segment")
        return name


class EpisodePart(NamedTuple):
    """What one segment holds of one attempt at an episode."""

    episode_id: str
    attempt: int
    events: int
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Descriptor:
    """What a segment holds: its events and the episodes that they belong to. `arrow_bytes` are its bytes without
    compression, 0 where its writer did not say."""

    events: int
    first_sequence: int
    episodes: tuple[EpisodePart, ...]
    arrow_bytes: int = 0


def encode_batch(events: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """The events (each an Event, or one with more behind it) as one batch of the event schema. Never fails for text:
    lone surrogates are set aside."""
    try:
        return _encode(events)
    except UnicodeEncodeError:
        return _encode([(*event[:5], without_surrogates(event[5])) for event in events])


def _encode(events: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    *keys, rows = list(zip(*events, strict=True))[:6] or [()] * 6
    arrays = [pa.array(values, type=kind) for values, kind in zip(keys, _KEY_TYPES, strict=True)]
    kinds = set(keys[0])
    for field in list(EVENT_SCHEMA)[len(keys) :]:
        if field.name not in kinds:
            arrays.append(pa.nulls(len(rows), field.type))
            continue
        values = [row if kind == field.name else None for kind, row in zip(keys[0], rows, strict=True)]
        arrays.append(_structs(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=EVENT_SCHEMA)


def _structs(rows: list[Row | None], kind: pa.StructType) -> pa.StructArray:
    """`pa.array(rows, kind)` in half of its time: most fields are in no row, and are not looked for in each."""
    given = [row for row in rows if row is not None]
    names = set().union(*given)
    fields = list(kind)
    known = pa.array(rows, pa.struct([field for field in fields if field.name in names]))
    columns = [known.field(field.name) if field.name in names else pa.nulls(len(rows), field.type) for field in fields]
    absent = known.is_null() if len(given) < len(rows) else None
    return pa.StructArray.from_arrays(columns, fields=fields, mask=absent)


def stream_options() -> pa.ipc.IpcWriteOptions:
    """How event streams are written, in the spool and in landing."""
    return pa.ipc.IpcWriteOptions(compression="lz4")


def encode_stream(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """A stream of these batches without its end mark: STREAM_HEAD bytes of schema, and the batches behind it, which
    could stand behind others as well."""
    sink = pa.BufferOutputStream()
    stream = pa.ipc.new_stream(sink, EVENT_SCHEMA, options=stream_options())
    for batch in batches:
        stream.write_batch(batch)
    return sink.getvalue()


def describe(events: pa.Table) -> Descriptor:
    """The descriptor of a table of events."""
    keys = events.select(["episode_id", "attempt", "kind"])
    keys = keys.append_column("begins", pc.equal(keys["kind"], "begin"))
    keys = keys.append_column("ends", pc.equal(keys["kind"], "end"))
    groups = keys.group_by(["episode_id", "attempt"], use_threads=False).aggregate(
        [("kind", "count"), ("begins", "any"), ("ends", "any")]
    )
    parts = tuple(
        EpisodePart(row["episode_id"], row["attempt"], row["kind_count"], row["begins_any"], row["ends_any"])
        for row in groups.to_pylist()
    )
    first = pc.min(events["sequence"]).as_py() if len(events) else 0
    return Descriptor(len(events), first, parts)


def encode_segment(events: pa.Table) -> bytes:
    """The object that is uploaded: one stream of one batch, and the descriptor."""
    stream = encode_stream(events.combine_chunks().to_batches())
    marks = [(len(stream), zlib.crc32(stream))]
    return b"".join([stream, END_MARK, encode_descriptor(describe(events), marks=marks, arrow_bytes=events.nbytes)])


def encode_descriptor(descriptor: Descriptor, **more: Any) -> bytes:
    """What follows the stream. `more` are its `marks` (where each batch ends, and the CRC-32 of all up to there) and
    `arrow_bytes`."""
    parts = [[part.episode_id, part.attempt, part.events, part.begins, part.ends] for part in descriptor.episodes]
    body = {"events": descriptor.events, "first_sequence": descriptor.first_sequence, "episodes": parts} | more
    text = json.dumps(body, separators=(",", ":")).encode()
    return text + _TAIL.pack(len(text), MAGIC)


def read_descriptor(tail: bytes, key: str) -> Descriptor | None:
    """The descriptor at the end of `tail`, or None where there is none or `tail` is too short to hold it whole."""
    try:
        body = read_tail(tail)
        if body is None:
            return None
        parts = tuple(EpisodePart._make(part) for part in body["episodes"])
        if not all(isinstance(part.episode_id, str) for part in parts):
            raise SegmentUnreadable(f"{key}: {_NO_ID}")
        return Descriptor(body["events"], body["first_sequence"], parts, int(body.get("arrow_bytes", 0)))
    except (ValueError, KeyError, TypeError) as error:
        raise SegmentUnreadable(f"{key}: its descriptor is damaged: {error}") from error


def read_tail(tail: bytes) -> dict[str, Any] | None:
    """The JSON of a descriptor at the end of `tail`, and under `stream_bytes` how long what is before it is. Raises
    ValueError."""
    if len(tail) < _TAIL.size:
        return None
    length, magic = _TAIL.unpack(tail[-_TAIL.size :])
    if magic != MAGIC or length + _TAIL.size > len(tail):
        return None
    start = len(tail) - _TAIL.size - length
    body: dict[str, Any] = json.loads(tail[start : -_TAIL.size])
    return body | {"stream_bytes": start}


def decode_segment(data: bytes, key: str) -> pa.Table:
    """All events of a complete segment, in the event schema. Raises SegmentUnreadable with the reason."""
    _check_sum(data, key)
    batches, schema, whole, damage = _read_stream(data, key)
    count = sum(batch.num_rows for batch in batches)
    if damage:
        raise SegmentUnreadable(f"{key}: damaged after {count} events: {damage}")
    if not whole:
        raise SegmentUnreadable(f"{key}: cut off after {count} events")
    events = _to_current(pa.Table.from_batches(batches, schema=schema), key)
    if events["episode_id"].null_count:
        raise SegmentUnreadable(f"{key}: {_NO_ID}")
    return events


def _check_sum(data: bytes, key: str) -> None:
    """lz4 has no checksum of its own, so that a reader may take damaged text for good."""
    try:
        marks = (read_tail(data) or {}).get("marks") or [(0, 0)]
        end, wanted = marks[-1]
        found = zlib.crc32(memoryview(data)[:end])
    except (ValueError, TypeError, AttributeError):
        return  # another tool's: what is behind a stream is its own business
    if found != wanted:
        raise SegmentUnreadable(f"{key}: damaged: its checksum is not the one that its writer put down")


def decode_spool(data: bytes, key: str) -> pa.Table:
    """Events of a spool file up to its last whole batch: a process that was killed leaves the last one torn."""
    if not data:
        return EVENT_SCHEMA.empty_table()
    batches, schema, _, _ = _read_stream(data, key)
    return _to_current(pa.Table.from_batches(batches, schema=schema), key)


def _read_stream(data: bytes, key: str) -> tuple[list[pa.RecordBatch], pa.Schema, bool, str]:
    """Its whole batches, its schema, whether its end mark is there, and what stopped the reading."""
    source = pa.BufferReader(data)
    try:
        # With threads each buffer is a task, and to hand it on costs more than to decompress it.
        stream = pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False))
    except (pa.ArrowException, OSError) as error:
        raise SegmentUnreadable(f"{key}: not an Arrow stream: {_first_line(error)}") from error
    if {"kind", "episode_id", "attempt", "sequence", "recorded_at"} - set(stream.schema.names):
        raise SegmentUnreadable(f"{key}: an Arrow stream, but not of events")
    batches: list[pa.RecordBatch] = []
    try:
        while True:
            batch = stream.read_next_batch()
            batch.validate(full=True)
            batches.append(batch)
    except StopIteration:
        # The reader also stops quietly where the file just ends; only the mark says that nothing is missing.
        end = source.tell()
        return batches, stream.schema, data[end - len(END_MARK) : end] == END_MARK, ""
    except (pa.ArrowException, OSError) as error:
        return batches, stream.schema, False, _first_line(error)


def _to_current(table: pa.Table, key: str) -> pa.Table:
    """`table` in today's schema: columns and struct fields that an older writer did not know are null."""
    if table.schema == EVENT_SCHEMA:
        return table
    try:
        arrays = [_conform(array, field.type) for array, field in _columns(table)]
        return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)
    except (pa.ArrowException, ValueError) as error:
        raise SegmentUnreadable(f"{key}: its schema does not fit: {_first_line(error)}") from error


def _columns(table: pa.Table) -> Iterator[tuple[pa.Array, pa.Field]]:
    names = set(table.schema.names)
    for field in EVENT_SCHEMA:
        if field.name in names:
            yield pa.concat_arrays(table[field.name].chunks or [pa.array([], field.type)]), field
        else:
            yield pa.nulls(len(table), field.type), field


def _conform(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if array.type == wanted:
        return array
    if not pa.types.is_struct(wanted):
        return array.cast(wanted)
    if not pa.types.is_struct(array.type):
        raise ValueError(f"{array.type} where {wanted} is expected")
    known = {field.name for field in array.type}
    fields = [
        _conform(array.field(field.name), field.type) if field.name in known else pa.nulls(len(array), field.type)
        for field in wanted
    ]
    return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=array.is_null())


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
