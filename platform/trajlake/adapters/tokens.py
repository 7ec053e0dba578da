"""Token batches for training language models: drawn episodes padded to a rectangle, or packed to a budget of tokens.

Everything is numpy; `trajlake.adapters.torch` gives the same as tensors. An episode's tokens are those of its steps,
one step after another. A token is trained on where its step's `loss_mask` says so; without a mask, where the agent
produced the step; never where `is_copied_context` is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajlake.errors import UsageError
from trajlake.read.batch import Batch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tokens:
    """One episode's tokens: arrays of shape (tokens,). `logprobs` is NaN where the source gave none."""

    episode_id: str
    token_ids: Array  # int64
    loss_mask: Array  # int8
    logprobs: Array  # float32, nats
    advantage: float
    weight: float = 1.0  # the importance weight of the draw

    def __len__(self) -> int:
        return len(self.token_ids)


def tokens_of(batch: Batch) -> list[Tokens]:
    """The tokens of each sample. The advantage is the sample's normalised reward, else its reward; 0 where that is null
    or NaN.

    Raises UsageError for an episode whose ids, mask and logprobs differ in length: filter by `token_audit IS NULL`.
    """
    found = []
    for sample, table in zip(batch.samples, batch.tables, strict=True):
        reward = sample.reward if sample.normalized_reward is None else sample.normalized_reward
        advantage = 0.0 if reward is None or math.isnan(reward) else float(reward)
        found.append(_tokens(sample.episode_id, table, advantage, sample.weight))
    return found


def _tokens(episode_id: str, table: pa.Table, advantage: float, weight: float) -> Tokens:
    said = table.filter(pc.is_valid(table["token_ids"]))
    counts = np.array(pc.list_value_length(said["token_ids"]).to_pylist(), np.int64)
    by_agent = _flags(pc.equal(said["source"], "agent"))
    copied = np.repeat(_flags(said["is_copied_context"]), counts)
    mask = _beside(episode_id, said, "loss_mask", counts, np.repeat(by_agent, counts).astype(np.int8))
    mask = np.where(copied, np.int8(0), mask)
    unknown = np.full(int(counts.sum()), np.nan, np.float32)
    logprobs = _beside(episode_id, said, "logprobs", counts, unknown)
    ids = _flat(said["token_ids"], np.int64)
    return Tokens(episode_id, ids, mask, logprobs, advantage, weight)


def _flags(column: pa.ChunkedArray) -> Array:
    """Booleans by row, null as False."""
    return np.array(pc.fill_null(column, False).to_pylist(), bool)


def _flat(column: pa.ChunkedArray, dtype: Any) -> Array:
    return np.asarray(pc.list_flatten(column).to_numpy(), dtype)


def _beside(episode_id: str, table: pa.Table, name: str, counts: Array, default: Array) -> Array:
    """A list column beside the token ids, with the default for the steps that have none."""
    column = table[name]
    there = _flags(pc.is_valid(column))
    lengths = np.array(pc.fill_null(pc.list_value_length(column), 0).to_pylist(), np.int64)
    if (lengths[there] != counts[there]).any():
        step = int(np.flatnonzero(there & (lengths != counts))[0])
        raise UsageError(
            f"episode {episode_id}: {counts[step]} token_ids beside {lengths[step]} {name}; "
            'leave such episodes out with where="token_audit IS NULL"'
        )
    values = default.copy()
    values[np.repeat(there, counts)] = _flat(column, default.dtype)
    return values


def padded(
    sequences: Sequence[Tokens], *, max_tokens: int | None = None, pad_id: int = 0, multiple_of: int = 1
) -> dict[str, Array]:
    """One row an episode, cut after `max_tokens` and padded to the longest (rounded up to `multiple_of`).

    Arrays of shape (episodes, length): `input_ids`, `attention_mask`, `loss_mask` (int64), `logprobs`, `advantages` and
    `weights` (float32, 0 outside the loss mask; unknown logprobs are NaN inside it). All that stands at a place is of
    the token there: `logprobs[:, 1:]` goes with a model's `logits[:, :-1]`. Raises UsageError where an episode has no
    token.
    """
    _check(sequences)
    if (max_tokens is not None and max_tokens < 1) or multiple_of < 1:
        raise UsageError(f"max_tokens and multiple_of must be at least 1, not {max_tokens} and {multiple_of}")
    sizes = [len(each) if max_tokens is None else min(len(each), max_tokens) for each in sequences]
    length = -(-max(sizes) // multiple_of) * multiple_of
    batch = _empty((len(sequences), length), pad_id)
    for row, (each, size) in enumerate(zip(sequences, sizes, strict=True)):
        _fill({name: array[row] for name, array in batch.items()}, each, slice(0, size))
    return batch


def packed(
    sequences: Sequence[Tokens], *, token_budget: int, pad_id: int = 0, pad: bool = True
) -> Iterator[dict[str, Array]]:
    """Episodes one behind another in rows of at most `token_budget` tokens, in their order, as few rows as first fit
    needs; each row is a batch. An episode longer than the budget is cut to it.

    Arrays of shape (token_budget,), or shorter where not `pad`: those of `padded`, and `position_ids` (from 0 in each
    episode), `sequence_ids` (0, 1, … and -1 in the padding). Of the row's episodes: `cu_seqlens` (int32), where they
    begin and end, as attention over variable lengths takes it (which reads no padding: give it rows without), and
    `samples` (int64), their numbers in `sequences`.
    """
    _check(sequences)
    if token_budget < 1:
        raise UsageError(f"token_budget must be at least 1, not {token_budget}")
    rows: list[list[int]] = []
    room: list[int] = []
    for number, each in enumerate(sequences):
        size = min(len(each), token_budget)
        fitting = next((index for index, left in enumerate(room) if left >= size), None)
        if fitting is None:
            rows.append([])
            room.append(token_budget)
            fitting = len(rows) - 1
        rows[fitting].append(number)
        room[fitting] -= size
    for numbers in rows:
        row = _packed_row([sequences[number] for number in numbers], token_budget, pad_id, pad)
        yield {**row, "samples": np.array(numbers, np.int64)}


def _packed_row(row: list[Tokens], token_budget: int, pad_id: int, pad: bool) -> dict[str, Array]:
    sizes = [min(len(each), token_budget) for each in row]
    length = token_budget if pad else sum(sizes)
    batch = _empty((length,), pad_id)
    positions, numbers = np.zeros(length, np.int64), np.full(length, -1, np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    for number, (each, start, end) in enumerate(zip(row, ends[:-1], ends[1:], strict=True)):
        _fill(batch, each, slice(int(start), int(end)))
        positions[start:end] = np.arange(end - start)
        numbers[start:end] = number
    return {**batch, "position_ids": positions, "sequence_ids": numbers, "cu_seqlens": ends.astype(np.int32)}


def _check(sequences: Sequence[Tokens]) -> None:
    if not sequences:
        raise UsageError("no episode to make a batch of")
    if empty := [each.episode_id for each in sequences if not len(each)]:
        raise UsageError(f"episode {empty[0]} has no token_ids")


def _empty(shape: tuple[int, ...], pad_id: int) -> dict[str, Array]:
    return {
        "input_ids": np.full(shape, pad_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "loss_mask": np.zeros(shape, np.int64),
        "logprobs": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "weights": np.zeros(shape, np.float32),
    }


def _fill(batch: dict[str, Array], tokens: Tokens, where: slice) -> None:
    size = where.stop - where.start
    trained = tokens.loss_mask[:size] > 0
    batch["input_ids"][where] = tokens.token_ids[:size]
    batch["attention_mask"][where] = 1
    batch["loss_mask"][where] = tokens.loss_mask[:size]
    batch["logprobs"][where] = np.where(trained, tokens.logprobs[:size], 0.0)
    batch["advantages"][where] = np.where(trained, tokens.advantage, 0.0)
    batch["weights"][where] = np.where(trained, tokens.weight, 0.0)
