"""`python -m tests.benchmarks [NAME…] [--small] [--json FILE]`: run benchmarks beside their peers.

To add one: a module here with TITLE and `run(options) -> list[Result]`, and its name in BENCHMARKS.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.corpus import Corpus
from tests.benchmarks.harness import Options, Result
from trajlake import devserver

BENCHMARKS = ("ingest", "compact", "episode_by_id", "random_batch", "planner", "sample", "formats")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure beside peers, in one run.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all without one")
    parser.add_argument("--small", action="store_true", help="see in seconds that it runs; the numbers mean little")
    parser.add_argument("--episodes", type=int, help="size of the lake (default 2000)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="Arrow in the large case of compact (default 1)")
    parser.add_argument("--no-s3", action="store_true", help="local folder only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/benchmarks.md as it is; so does --small")
    given = parser.parse_args()
    names = given.names or list(BENCHMARKS)
    if unknown := set(names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    command = "python -m tests.benchmarks" + "".join(
        [f" {name}" for name in given.names]
        + [" --small"] * given.small
        + ([f" --episodes {given.episodes}"] if given.episodes else [])
        + ([f" --gigabytes {given.gigabytes:g}"] if given.gigabytes != 1 else [])
    )
    logging.disable(logging.WARNING)  # of Beam, about libraries of Google's
    with tempfile.TemporaryDirectory(prefix="trajlake-bench-") as folder, _server(Path(folder), given.no_s3) as s3:
        options = _options(Path(folder), given, s3)
        found: dict[str, list[Result]] = {}
        for name in names:
            module = importlib.import_module(f"tests.benchmarks.{name}")
            began = time.perf_counter()
            found[name] = module.run(options)
            report.show(module.TITLE, found[name])
            print(f"{name} took {time.perf_counter() - began:.0f} s\n", flush=True)
            if not given.small and not given.no_docs:
                report.write_document(name, module.TITLE, found[name], command)
        if given.json:
            report.write_json(given.json, found, command)


def _options(folder: Path, given: argparse.Namespace, s3: str | None) -> Options:
    small = given.small
    corpus = Corpus(folder / "corpus", "made-up", given.episodes or (320 if small else 2_000))
    corpus.folder.mkdir()
    return Options(
        folder,
        corpus,
        repeats=1 if small else 3,
        steps_from=40 if small else 300,
        lookups=6 if small else 45,
        batches=2 if small else 8,
        gigabytes=0.03 if small else given.gigabytes,
        s3=s3,
    )


@contextlib.contextmanager
def _server(folder: Path, without: bool) -> Iterator[str | None]:
    """A real S3 server in the environment of this process and its children; the address of an empty place on it."""
    if without:
        yield None
        return
    with devserver.running(folder / "server", bucket="bench") as server:
        os.environ |= {name: value for name, value in server.environment().items() if name.startswith("AWS_")}
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        yield f"s3://{server.bucket}"


if __name__ == "__main__":
    main()
