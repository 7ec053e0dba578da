"""What is computed from the steps of an episode: the hash of its content, and the audit of its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# What was done and what was seen. Ids, times, costs and rewards may differ between two equal rollouts.
CONTENT_COLUMNS = ("source", "message", "content_parts", "reasoning", "tool_calls", "tool_results", "tensors")
_NOT_CONTENT = {"id", "call_id"}


def content_hashes(steps: pa.Table, lengths: Sequence[int]) -> list[str]:
    """One hash (32 hex digits of BLAKE2b) an episode over CONTENT_COLUMNS of its consecutive rows.

    Values and nulls decide, not buffers: equal rows give equal hashes wherever they stand.
    """
    columns = [pa.concat_arrays(steps[name].chunks or [steps[name].combine_chunks()]) for name in CONTENT_COLUMNS]
    hashes = []
    start = 0
    for length in lengths:
        digest = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=16)
        for column in columns:
            _update(digest, column.slice(start, length))
        hashes.append(digest.hexdigest())
        start += length
    return hashes


def _update(digest: Any, array: pa.Array) -> None:
    """Feed an array's values in a form that does not depend on its offset or on what lies under its nulls."""
    kind = array.type
    if array.null_count == len(array):
        digest.update(b"n" + len(array).to_bytes(8, "little"))
        return
    if array.null_count:
        digest.update(b"v" + np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
        array = array.drop_null()
    digest.update(b"a" + len(array).to_bytes(8, "little"))
    if pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            if field.name not in _NOT_CONTENT:
                _update(digest, child)
    elif pa.types.is_list(kind):
        digest.update(array.value_lengths().to_numpy(zero_copy_only=False).tobytes())
        _update(digest, array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + len(array) + 1]
        digest.update(np.diff(offsets).tobytes())
        if data := array.buffers()[2]:
            digest.update(memoryview(data)[offsets[0] : offsets[-1]])
    else:
        digest.update(array.to_numpy(zero_copy_only=False).tobytes())


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
