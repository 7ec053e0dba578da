"""Hugging Face `datasets`: a sampler as an IterableDataset of plain records, one an episode.

    dataset = to_iterable(snapshot.sampler("epochs", seed=7, epochs=1))
    dataset.map(tokenize).shuffle(…)

Needs datasets (`pip install 'trajlake[datasets]'`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trajlake.adapters.opening import Opening
from trajlake.errors import UsageError
from trajlake.read.record import json_line, messages
from trajlake.read.sampler import Sampler

if TYPE_CHECKING:
    import datasets

COLUMNS = ("episode_id", "task_id", "group_id", "policy_version", "reward", "success", "probability", "weight")


def records(opening: Opening, shards: list[tuple[int, int]], batch_size: int) -> Iterator[dict[str, Any]]:
    """One record a sample: COLUMNS, and `messages` as JSON text (chat messages have no fixed columns)."""
    for rank, world_size in shards:
        with opening.open(rank, world_size).batches(batch_size) as batches:
            for batch in batches:
                for sample, trajectory in zip(batch.samples, batch, strict=True):
                    known = {**trajectory.episode, "probability": sample.probability, "weight": sample.weight}
                    record = {name: known[name] for name in COLUMNS}
                    # An id that was an integer in the source is one again; a column has one type.
                    record |= {name: None if known[name] is None else str(known[name]) for name in COLUMNS[:4]}
                    yield {**record, "messages": json_line(messages(trajectory))}


def to_iterable(sampler: Sampler, *, shards: int = 1, batch_size: int = 64) -> datasets.IterableDataset:
    """The sampler as a `datasets.IterableDataset` of `shards` disjoint parts, which its workers share.

    Only for strategies that end, or with `.take(n)`. Raises UsageError where datasets is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise UsageError("this needs Hugging Face datasets: pip install 'trajlake[datasets]'") from error
    features = datasets.Features(
        {name: datasets.Value("string") for name in (*COLUMNS[:4], "messages")}
        | {name: datasets.Value("float64") for name in ("reward", "probability", "weight")}
        | {"success": datasets.Value("bool")}
    )
    arguments = {
        "opening": Opening.of(sampler),
        "shards": [(rank, shards) for rank in range(shards)],
        "batch_size": batch_size,
    }
    return datasets.IterableDataset.from_generator(records, features=features, gen_kwargs=arguments)
