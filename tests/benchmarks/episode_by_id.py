"""One episode by its id, as Python objects: with what is known from before (warm), and from nothing (cold)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.benchmarks.corpus import Corpus
from tests.benchmarks.data import tau_bench
from tests.benchmarks.harness import OURS, Options, Result, latencies, median, percentile
from tests.benchmarks.readers import READERS, Place, Sizes, counted, local_place, s3_place, same_rows, warmed

TITLE = "One episode by id"


def run(options: Options) -> list[Result]:
    corpus = options.corpus
    results = _at(local_place(corpus), corpus, options.lookups)
    if options.s3:
        results += _at(s3_place(corpus, options), corpus, max(4, options.lookups // 3))
    if real := tuple(tau_bench()):
        few = Corpus(options.scratch("tau"), "tau", len(real), real)
        results += _at(local_place(few), few, options.lookups, what="tau-bench, ")
    return results


def _at(place: Place, corpus: Corpus, lookups: int, what: str = "") -> list[Result]:
    ids = random.Random(1).sample(corpus.episode_ids, lookups + 3)
    readers = {name: make(place) for name, make in READERS.items()}
    warmed(readers, ids[:8])
    warm = {name: reader.episode for name, reader in readers.items()}
    cold = {name: _cold(make, place) for name, make in READERS.items()}
    requests = counted(place, lambda reader: reader.episode(ids[0]))
    found = latencies(warm, ids[3:], ids[:3], same_rows)
    from_nothing = latencies(cold, ids[3 : 3 + lookups // 3], ids[:1], same_rows)
    return [
        *_results(f"{what}{place.name}, warm", corpus, found, requests),
        *_results(f"{what}{place.name}, cold", corpus, from_nothing, ""),
    ]


def _cold(make: Callable[[Place], Any], place: Place) -> Callable[[str], Any]:
    return lambda episode_id: make(place).episode(episode_id)


def _results(case: str, corpus: Corpus, found: dict[str, list[float]], requests: str) -> list[Result]:
    sizes = Sizes(corpus)
    goal = 1.0 if "warm" in case else None
    return [
        Result(
            f"{case} (p50 of {len(seconds)}, {corpus.episodes} episodes)",
            name,
            median(seconds),
            p95=percentile(seconds, 95),
            size=sizes.of(name),
            time_goal=goal if name.startswith("Lance") else None,
            size_goal=1 / 0.65 if name.startswith("Lance") else None,
            note=requests if name == OURS else "",
        )
        for name, seconds in found.items()
    ]
