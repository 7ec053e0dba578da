"""Random numbers by position: the number at one position needs none of those before it.

Position p of stream s under a seed is one 64-bit word of Philox (Salmon et al. 2011, Parallel Random Numbers: As Easy
as 1, 2, 3), a counter-based generator: any piece of a sequence can be had alone, in any order, on any machine.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
Indexes = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_TABLE_SIZE = 1 << 22  # up to here a permutation is a table (32 MiB); beyond, it is computed by position
_ROUNDS = 6


def words(seed: int, first: int, count: int, stream: int = 0) -> Words:
    """The words of positions first, …, first + count - 1. `seed` and `stream` are below 2**64."""
    block, skip = divmod(first, 4)  # a step of the counter gives four words
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=[block, 0, 0, 0])
    return np.asarray(generator.random_raw(skip + count)[skip:], np.uint64)


def below(numbers: Words, size: Any) -> Indexes:
    """Words scaled to 0, …, size - 1 by multiply and shift (Lemire 2019); the bias is below size / 2**64.

    `size` is a number or an array of them, each from 1 to 2**32.
    """
    wide = np.asarray(size, np.uint64)
    high, low = numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)
    # (word * size) >> 64 in two halves
    return ((high * wide + ((low * wide) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)


def fractions(numbers: Words) -> Floats:
    """Words as floats in [0, 1), with the 53 bits that a float64 holds."""
    return (numbers >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(seed: int, first: int, count: int, size: int) -> Indexes:
    """What positions first, … draw where every `size` positions are an epoch: each index once an epoch, in an order
    that is new in each epoch."""
    positions = np.arange(first, first + count, dtype=np.int64)
    epochs, places = np.divmod(positions, size)
    if size > _TABLE_SIZE:
        return _permuted(seed, epochs, places, size)
    drawn = np.empty(count, np.int64)
    for epoch in range(first // size, (first + count - 1) // size + 1) if count else ():
        mine = epochs == epoch
        drawn[mine] = _table(seed, epoch, size)[places[mine]]
    return drawn


@lru_cache(maxsize=4)
def _table(seed: int, epoch: int, size: int) -> Indexes:
    return np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64))).permutation(size)


def _permuted(seed: int, epochs: Indexes, places: Indexes, size: int) -> Indexes:
    """A keyed permutation by position: a Feistel network on the next even power of two, walked along its cycle until
    it is below `size` (Black & Rogaway 2002, Ciphers with Arbitrary Finite Domains). No memory, however many items."""
    half = np.uint64(((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mixed(np.uint64(seed) + _mixed(epochs.astype(np.uint64) + np.uint64(1)))
    values = places.astype(np.uint64)
    todo = np.arange(len(values))
    while len(todo):
        left, right = values[todo] >> half, values[todo] & mask
        for turn in range(_ROUNDS):
            scramble = _mixed(right ^ keys[todo] ^ np.uint64((turn + 1) << 58))
            left, right = right, left ^ (scramble & mask)
        values[todo] = (left << half) | right
        todo = todo[values[todo] >= size]
    return values.astype(np.int64)


def _mixed(values: Any) -> Any:
    """The finaliser of SplitMix64 (Steele et al. 2014): every bit of the result depends on every bit of the value."""
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def occurrences(items: Indexes) -> Indexes:
    """For each entry how often its value stands before it."""
    order = np.argsort(items, kind="stable")
    ordered = items[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(items) else np.array([], int)
    runs = np.diff(np.append(starts, len(items)))
    counted = np.empty(len(items), np.int64)
    counted[order] = np.arange(len(items)) - np.repeat(starts, runs)
    return counted
