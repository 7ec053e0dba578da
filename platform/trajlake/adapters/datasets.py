"""Hugging Face `datasets`: a sampler as plain records, one an episode, streamed or in a table.

    dataset = to_iterable(snapshot.sampler("epochs", seed=7, epochs=1))   # datasets.IterableDataset
    dataset = to_dataset(snapshot.sampler("epochs", seed=7, epochs=1))    # datasets.Dataset, kept in its cache folder
    dataset.map(tokenize).shuffle(…)

`messages` are chat messages as chat templates take them; what only other columns hold (token ids, rewards of steps,
parts that are not text) is left out: `trajlake export` has it all. Needs datasets (`pip install 'trajlake[datasets]'`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any

from trajlake.adapters.opening import Opening
from trajlake.errors import UsageError
from trajlake.read.record import json_line, messages
from trajlake.read.sampler import Sampler

if TYPE_CHECKING:
    import datasets

COLUMNS = ("episode_id", "task_id", "group_id", "policy_version", "reward", "success", "probability", "weight")
_TEXTS = ("role", "content", "reasoning_content", "tool_call_id")


def records(
    opening: Opening, shards: list[tuple[int, int]], batch_size: int, state: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """One record a sample: COLUMNS and `messages`."""
    for rank, world_size in shards:
        with opening.open(rank, world_size, state).batches(batch_size) as batches:
            for batch in batches:
                for sample, trajectory in zip(batch.samples, batch, strict=True):
                    known = {**trajectory.episode, "probability": sample.probability, "weight": sample.weight}
                    record = {name: known[name] for name in COLUMNS}
                    # An id that was an integer in the source is one again; a column has one type.
                    record |= {name: None if known[name] is None else str(known[name]) for name in COLUMNS[:4]}
                    yield {**record, "messages": [_message(message) for message in messages(trajectory)]}


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """A message with the same keys as any other: a column of structs has no more."""
    message: dict[str, Any] = {name: given.get(name) for name in _TEXTS}
    if isinstance(message["content"], list):
        texts = [part["text"] for part in message["content"] if isinstance(part.get("text"), str)]
        message["content"] = "\n".join(texts) if texts else None
    message = {name: None if text is None else _text(text) for name, text in message.items()}
    calls = given.get("tool_calls")
    return {**message, "tool_calls": None if calls is None else [_call(call) for call in calls]}


def _call(given: dict[str, Any]) -> dict[str, Any]:
    arguments = given["function"]["arguments"]
    if arguments is not None and not isinstance(arguments, str):
        arguments = json_line(arguments)
    values = {"id": given["id"], "name": given["function"]["name"], "arguments": arguments}
    values = {name: None if text is None else _text(text) for name, text in values.items()}
    return {"id": values.pop("id"), "type": "function", "function": values}


def _text(text: str) -> str:
    """Without lone surrogates, which no column of text holds."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_iterable(sampler: Sampler, *, shards: int = 1, batch_size: int = 64) -> datasets.IterableDataset:
    """The sampler as a `datasets.IterableDataset` of `shards` disjoint parts, which its workers share: what this reader
    (`rank` of `world_size`) would draw from where it is now. The sampler itself stays there.

    Only for strategies that end, or with `.take(n)`. Raises UsageError, also where datasets is not installed.
    """
    return _datasets().IterableDataset.from_generator(records, **_arguments(sampler, shards, batch_size))


def to_dataset(sampler: Sampler, *, batch_size: int = 64) -> datasets.Dataset:
    """All that the sampler would draw from where it is now as a `datasets.Dataset`; the same draws of the same snapshot
    are read once and then taken from its cache folder. Only for strategies that end. Raises UsageError, also where
    datasets is not installed."""
    if sampler.left == inf:
        raise UsageError(
            f"{sampler.strategy} never ends, and a table must: use to_iterable(sampler).take(n), max_times_sampled, or "
            "epochs with a number of them"
        )
    arguments = _arguments(sampler, 1, batch_size)
    if sampler.left <= sampler.rank:
        raise UsageError("nothing is left for this reader to draw, and a table without rows cannot be made")
    return _datasets().Dataset.from_generator(records, **arguments)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError("this needs Hugging Face datasets: pip install 'trajlake[datasets]'") from error
    return datasets


def _arguments(sampler: Sampler, shards: int, batch_size: int) -> dict[str, Any]:
    if shards < 1 or batch_size < 1:
        raise UsageError(f"shards and batch_size must be at least 1, not {shards} and {batch_size}")
    value = _datasets().Value
    text = value("string")
    call = {"id": text, "type": text, "function": {"name": text, "arguments": text}}
    features = _datasets().Features(
        dict.fromkeys(COLUMNS[:4], text)
        | dict.fromkeys(("reward", "probability", "weight"), value("float64"))
        | {"success": value("bool"), "messages": [{**dict.fromkeys(_TEXTS, text), "tool_calls": [call]}]}
    )
    arguments = {
        "opening": Opening.of(sampler),
        "shards": [(sampler.rank + part * sampler.world_size, sampler.world_size * shards) for part in range(shards)],
        "batch_size": batch_size,
        "state": sampler.state_dict(),
    }
    return {"features": features, "gen_kwargs": arguments}
