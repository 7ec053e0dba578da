"""Near duplicates: MinHash signatures (rensa) of what was said and done, compared in bands.

An episode is the set of its 5-word shingles: messages and reasoning of agent and user, and tool calls. System prompts
and tool results are left out, since all rollouts of a task share them. Two episodes with Jaccard similarity s agree in
each of the signature's values with probability s (Broder 1997), and share at least one of b bands of r values with
probability 1 - (1 - s^r)^b (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from trajlake.errors import UsageError

PERMUTATIONS = 128
SHINGLE_WORDS = 5
_SEED = 42
_WORD = re.compile(r"\w+")

Signature = np.ndarray[tuple[int], np.dtype[np.uint32]]
Signatures = np.ndarray[tuple[int, int], np.dtype[np.uint32]]


def signature_version() -> str:
    """Names all that a signature depends on; signatures of different versions are not comparable."""
    return f"rensa{_library().ALGORITHM_VERSION}-p{PERMUTATIONS}-w{SHINGLE_WORDS}-1"


def _library() -> Any:
    try:
        from rensa import RMinHash
    except ImportError as error:
        raise UsageError("depth near needs the library rensa: pip install 'trajlake[near]'") from error
    return RMinHash


def signatures(documents: Iterable[list[str]]) -> Signatures:
    """One row of PERMUTATIONS values a document, which is a list of texts."""
    sets = [shingles(texts) for texts in documents]
    if not sets:
        return np.empty((0, PERMUTATIONS), dtype=np.uint32)
    matrix = _library().digest_matrix_from_token_sets(sets, PERMUTATIONS, _SEED)
    rows = np.asarray(matrix.to_rows() if hasattr(matrix, "to_rows") else matrix, dtype=np.uint32)
    return rows.reshape(len(sets), PERMUTATIONS)


def shingles(texts: Sequence[str]) -> list[str]:
    """The distinct runs of SHINGLE_WORDS words; a text that is shorter is one shingle."""
    found: set[str] = set()
    for text in texts:
        words = _WORD.findall(text.lower())
        if words:
            last = max(1, len(words) - SHINGLE_WORDS + 1)
            found.update(" ".join(words[start : start + SHINGLE_WORDS]) for start in range(last))
    return sorted(found)


def documents(steps: pa.Table) -> tuple[list[str], list[list[str]]]:
    """Episode ids, and what of their steps is compared; episodes without any such text are left out."""
    columns = ["episode_id", "source", "message", "reasoning", "tool_calls", "content_parts"]
    by_episode: dict[str, list[str]] = {}
    for step in steps.select(columns).to_pylist():
        texts = by_episode.setdefault(step["episode_id"], [])
        if step["source"] in {"agent", "user"}:
            texts += [text for text in (step["message"], step["reasoning"]) if text]
            texts += [part["text"] for part in step["content_parts"] or () if part["text"]]
        texts += [f"{call['name'] or ''} {call['arguments'] or ''}" for call in step["tool_calls"] or ()]
    kept = {episode: texts for episode, texts in by_episode.items() if shingles(texts)}
    return list(kept), list(kept.values())


def bands_for(threshold: float) -> int:
    """The number of bands (a divisor of PERMUTATIONS) that misses pairs at the threshold least often while rows stay
    as long as that allows: the probability to share a band at `threshold` is at least 0.98."""
    for bands in (1, 2, 4, 8, 16, 32, 64, 128):
        if 1 - (1 - threshold ** (PERMUTATIONS // bands)) ** bands >= 0.98:
            return bands
    return PERMUTATIONS


def similar_groups(matrix: Signatures, threshold: float) -> list[int]:
    """For each row the first row of its group; rows are in one group where a chain of pairs with an estimated Jaccard
    similarity of at least `threshold` joins them."""
    parent = np.arange(len(matrix))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    bands = bands_for(threshold)
    width = PERMUTATIONS // bands
    for band in range(bands):
        part = np.ascontiguousarray(matrix[:, band * width : (band + 1) * width])
        keys = pl.Series(part.view(np.dtype((np.void, part.dtype.itemsize * width))).ravel().tolist(), dtype=pl.Binary)
        buckets = pl.DataFrame({"key": keys}).with_row_index("row").group_by("key").agg("row", size=pl.len())
        for rows in buckets.filter(pl.col("size") > 1)["row"].to_list():
            waiting = sorted(rows)
            while len(waiting) > 1:  # those that are not like the first are compared with each other
                first, others = waiting[0], np.asarray(waiting[1:])
                alike = (matrix[others] == matrix[first]).mean(axis=1) >= threshold
                for other in others[alike]:
                    low, high = sorted((root(first), root(int(other))))
                    parent[high] = low
                waiting = others[~alike].tolist()
    return [root(row) for row in range(len(matrix))]
