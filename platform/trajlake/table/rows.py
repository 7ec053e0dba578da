"""What is computed from the steps of an episode: the hash of its content, and the audit of its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajlake.table.sizes import cut, row_bytes, whole

# What was done and what was seen. Ids, times, costs and rewards may differ between two equal rollouts.
CONTENT_COLUMNS = ("source", "message", "content_parts", "reasoning", "tool_calls", "tool_results", "tensors")
_NOT_CONTENT = {"id", "call_id"}
_HASHED_AT_ONCE = 512 << 20  # bytes of content. It decides the hash of a larger episode, so it must not change


def merged_objects(first: str | None, second: str | None) -> str | None:
    """The JSON object of both, the second's keys winning. What is no object, or nested deeper than Python reads, is
    kept as text under the name `extra`: one writer's mistake must not stop the others."""
    if not (first and second):
        return first or second
    try:
        return json.dumps({**_object(first), **_object(second)}, separators=(",", ":"))
    except RecursionError:
        return json.dumps({"extra": [first, second]})


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"extra": text}


def content_hashes(steps: pa.Table, lengths: Sequence[int]) -> list[str]:
    """One hash (32 hex digits of BLAKE2b) an episode over CONTENT_COLUMNS of its consecutive rows.

    Values and nulls decide, not buffers: equal rows give equal hashes wherever they stand. An episode with more
    than _HASHED_AT_ONCE has the hash of the hashes of its parts.
    """
    content = steps.select(list(CONTENT_COLUMNS))
    sizes = row_bytes(content)
    if sizes[-1] <= _HASHED_AT_ONCE:
        return _hashes(content, lengths)
    hashes: list[str] = []
    start = 0
    for length in lengths:
        episode = content.slice(start, length)
        runs = list(cut(sizes[start : start + length + 1], _HASHED_AT_ONCE)) or [(0, 0)]
        parts = [_hashes(episode.slice(first, end - first), [end - first])[0] for first, end in runs]
        whole_hash = hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()
        hashes.append(parts[0] if len(parts) == 1 else whole_hash)
        start += length
    return hashes


def _hashes(content: pa.Table, lengths: Sequence[int]) -> list[str]:
    bounds = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    feeds: list[_Feed] = []
    for column in content.columns:
        _collect(whole(column), bounds, feeds)
    hashes = []
    for episode, length in enumerate(lengths):
        digest = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=16)
        for data, ends in feeds:
            digest.update(data[ends[episode] : ends[episode + 1]])
        hashes.append(digest.hexdigest())
    return hashes


_Feed = tuple[memoryview, list[int]]  # bytes of all episodes, and where each episode's begin


def _collect(array: pa.Array, bounds: np.ndarray[Any, Any], feeds: list[_Feed]) -> None:
    """What is to be hashed of `array`, in a form that does not depend on offsets or on what lies under nulls.

    Lengths and validity go first, so that the bytes of an episode can be taken apart in one way only.
    """

    def feed(values: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
        if values.nbytes:
            feeds.append((np.ascontiguousarray(values).data.cast("B"), (ends * values.itemsize).tolist()))

    kind = array.type
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    feed(valid.astype(np.uint8), bounds)
    if array.null_count:
        bounds = np.concatenate([[0], np.cumsum(valid)])[bounds]
        array = array.drop_null()
    if not len(array):
        return
    if pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            if field.name not in _NOT_CONTENT:
                _collect(child, bounds, feeds)
    elif pa.types.is_list(kind):
        counts = array.value_lengths().to_numpy(zero_copy_only=False)
        feed(counts, bounds)
        _collect(array.flatten(), np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])[bounds], feeds)
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
        feed(np.diff(offsets), bounds)
        if data := array.buffers()[2]:
            feeds.append((memoryview(data), offsets[bounds].tolist()))
    else:
        feed(array.to_numpy(zero_copy_only=False), bounds)


def token_audits(steps: pa.Table, lengths: Sequence[int]) -> list[str | None]:
    """For each episode what is wrong with its token ids, mask and logprobs, or None."""
    ids = pc.list_value_length(steps["token_ids"])
    problems: dict[int, list[str]] = {}
    episode = np.repeat(np.arange(len(lengths)), lengths)
    firsts = np.cumsum([0, *lengths])
    for name in ("loss_mask", "logprobs"):
        others = pc.list_value_length(steps[name])
        if others.null_count == len(others):
            continue
        wrong = pc.fill_null(pc.not_equal(ids, others), pc.and_(pc.is_null(ids), pc.is_valid(others)))
        for row in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)):
            step = row - firsts[episode[row]]
            problems.setdefault(int(episode[row]), []).append(
                f"step {step}: {ids[int(row)].as_py() or 0} token_ids, {others[int(row)].as_py()} {name}"
            )
    return ["; ".join(problems[index][:5]) if index in problems else None for index in range(len(lengths))]
