"""A random batch of 256 episodes with all their steps, as Arrow tables; and as Python objects. Nobody keeps what was
decoded for an earlier batch: what that is worth is measured in `sample`.

Episodes with random log-probabilities and token ids show how much of it what was made up of the others does.
"""

from __future__ import annotations

import random

from tests.benchmarks.corpus import Corpus
from tests.benchmarks.harness import OURS, Options, Result, latencies, median, percentile
from tests.benchmarks.readers import READERS, Place, Sizes, counted, local_place, s3_place, same_table, warmed

TITLE = "A random batch of 256 episodes"
BATCH = 256


def run(options: Options) -> list[Result]:
    results = _at(local_place(options.corpus), options.corpus, options.batches)
    if options.s3:
        results += _at(s3_place(options.corpus, options), options.corpus, max(2, options.batches // 2))
    full = Corpus(options.scratch("full"), "hardest", options.corpus.episodes, hardest=True)
    return results + _at(local_place(full), full, options.batches, what="hardest, ")


def _at(place: Place, corpus: Corpus, batches: int, what: str = "") -> list[Result]:
    draw = random.Random(2)
    drawn = [draw.sample(corpus.episode_ids, BATCH) for _ in range(batches + 1)]
    readers = {name: make(place) for name, make in READERS.items()}
    warmed(readers, drawn[0])
    tables = {name: reader.batch for name, reader in readers.items()}
    objects = {name: readers[name].batch_of_objects for name in (OURS, "Lance, take by row")}
    requests = counted(place, lambda reader: reader.batch(drawn[0]))
    found = latencies(tables, drawn[1:], drawn[:1], same_table)
    as_objects = latencies(objects, drawn[1:], drawn[:1], _same_objects)
    return [
        *_results(f"{what}{place.name}, Arrow", corpus, found, requests),
        *_results(f"{what}{place.name}, Python objects", corpus, as_objects, ""),
    ]


def _same_objects(episodes: list[list[dict[str, object]]]) -> list[list[dict[str, object]]]:
    return [[{name: value for name, value in row.items() if name != "restore"} for row in rows] for rows in episodes]


def _results(case: str, corpus: Corpus, found: dict[str, list[float]], requests: str) -> list[Result]:
    sizes = Sizes(corpus)
    return [
        Result(
            f"{case} (median of {len(seconds)} batches out of {corpus.episodes} episodes)",
            name,
            median(seconds),
            p95=percentile(seconds, 95),
            size=sizes.of(name),
            time_goal=1.0 if name.startswith("Lance") else None,
            size_goal=1 / 0.65 if name.startswith("Lance") else None,
            note=requests if name == OURS else "",
        )
        for name, seconds in found.items()
    ]
