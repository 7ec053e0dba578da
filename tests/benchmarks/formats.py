"""Importing files of other projects: until durable, beside `json.loads` of the same bytes; and the bytes stored."""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

import trajlake
from tests.benchmarks.data import realdata
from tests.benchmarks.harness import OURS, Options, Result, folder_bytes, in_turns, median
from trajlake.errors import FormatError
from trajlake.formats import FORMATS, Record, detect, format_named, open_source
from trajlake.formats.parallel import import_tree
from trajlake.formats.rebuild import stored
from trajlake_pipelines.compact import compact

TITLE = "Formats"
JSON_SHARE = 0.3  # of the speed of json.loads
SHRINKING = 10.0  # times
_LARGE_BYTES = 16 << 20  # of source an import: fixed costs (a writer, a lake's claim) are then a few per cent
_ARRAY_BYTES = 2 << 20
_TREE_BYTES = 128 << 20  # a process takes a second to start
_PEER = "json.loads"
_RETURNS = {"monitor-csv"}  # holds no steps
_ARRAYS = {"minari"}
_MADE_FROM = "tau-bench"
_MADE = ("atif", "nemo-gym", "verl", "openai-chat")
"""Formats of which no file of some size is public: their files are made of the episodes of tau-bench."""


@dataclass(frozen=True)
class Inputs:
    """Files of one format; `work` is what they hold, unpacked, in bytes."""

    name: str
    files: Sequence[Path]
    work: int


def run(options: Options) -> list[Result]:
    folder = realdata()
    if folder is None:
        print("formats: left out, for want of the files of other projects (set TRAJLAKE_REALDATA)")
        return []
    found = [*_found(folder), *_made(folder, options.scratch("made"))]
    results = []
    small = options.repeats == 1
    every = []
    for inputs in found:
        least = 0 if small else _ARRAY_BYTES if inputs.name in _ARRAYS else _LARGE_BYTES
        large = _repeated(inputs, options.scratch("large"), least)
        results += _speed(options, f"{inputs.name}: {len(large.files)} files", large)
        every += [large] if inputs.name not in _ARRAYS else []
    together = Inputs("all", [path for inputs in every for path in inputs.files], sum(each.work for each in every))
    case = f"all of these but minari's at once, {len(together.files)} files, in as many processes as by default"
    results += _speed(options, case, together, processes=None)
    for inputs in found:
        if inputs.name in {"tau-bench", "swe-agent", "verifiers"}:
            results += _speed(options, f"{inputs.name}: one file", _one(inputs))
    tree = next(inputs for inputs in found if inputs.name == _MADE_FROM)
    results += _processes(options, _repeated(tree, options.scratch("tree"), _LARGE_BYTES if small else _TREE_BYTES))
    return results + _sizes(options, [inputs for inputs in found if inputs.name not in _ARRAYS])


# -- the files -----------------------------------------------------------------------------------------------------


def _found(folder: Path) -> Iterator[Inputs]:
    """The real files of each format, those of two kinds (Inspect's) as two."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        try:
            name = detect(path).name
            next(format_named(name).read(open_source(path)))
        except (FormatError, StopIteration):
            continue
        if name == "inspect":
            name = f"inspect {path.suffix}"
        files.setdefault(name, []).append(path)
    for name in sorted(files.keys() - _RETURNS, key=lambda name: list(FORMATS).index(name.split()[0])):
        if name not in _MADE:
            yield Inputs(name, files[name], sum(map(_unpacked, files[name])))


def _made(folder: Path, into: Path) -> Iterator[Inputs]:
    source = open_source(folder / "tau-bench" / "historical_trajectories" / "gpt-4o-airline.json")
    episodes = [
        stored(replace(item, source={})) for item in format_named(_MADE_FROM).read(source) if isinstance(item, Record)
    ]
    for name in _MADE:
        write = format_named(name).write
        assert write is not None
        path = into / f"{name}.json"
        path.write_bytes(b"".join(write(episodes)))
        yield Inputs(f"{name} (made from {_MADE_FROM})", [path], path.stat().st_size)


def _repeated(inputs: Inputs, into: Path, least: int) -> Inputs:
    """Copies until they hold `least` bytes; each is a file of its own, because it ends differently."""
    files = list(inputs.files)
    beside = {path.parent / "metadata.json" for path in files}
    copies = max(1, -(-least // inputs.work))
    for number in range(1, copies):
        for position, path in enumerate(inputs.files):
            copy = into / f"{number:04d}-{position:04d}" / path.name
            copy.parent.mkdir(parents=True)
            shutil.copyfile(path, copy)
            if path.parent / "metadata.json" in beside and (path.parent / "metadata.json").is_file():
                shutil.copyfile(path.parent / "metadata.json", copy.parent / "metadata.json")
            if zipfile.is_zipfile(copy):
                with zipfile.ZipFile(copy, "a") as archive:
                    archive.comment = str(number).encode()
            else:
                with copy.open("ab") as file:
                    file.write(b"\n" * number)
            files.append(copy)
    return Inputs(inputs.name, files, inputs.work * copies)


def _one(inputs: Inputs) -> Inputs:
    path = inputs.files[0]
    return Inputs(inputs.name, [path], _unpacked(path))


def _unpacked(path: Path) -> int:
    if not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return sum(member.file_size for member in archive.infolist())


# -- speed ---------------------------------------------------------------------------------------------------------

Cost = tuple[float, float]  # seconds, and those of the processor, of all threads and processes together


def _measured(action: Callable[[], object]) -> Cost:
    began, used = time.perf_counter(), os.times()
    action()
    spent = [later - before for later, before in zip(os.times()[:4], used[:4], strict=True)]
    return time.perf_counter() - began, sum(spent)


def _importing(options: Options, inputs: Inputs, processes: int | None) -> Cost:
    folder = options.scratch("import")
    lake = trajlake.create(folder / "lake")
    before = os.environ.get("TRAJLAKE_SPOOL")
    os.environ["TRAJLAKE_SPOOL"] = str(folder / "spool")
    try:
        cost = _measured(partial(_import, lake, inputs.files, processes))
    finally:
        os.environ.pop("TRAJLAKE_SPOOL")
        if before is not None:
            os.environ["TRAJLAKE_SPOOL"] = before
    shutil.rmtree(folder)
    return cost


def _import(lake: trajlake.Lake, files: Sequence[Path], processes: int | None) -> None:
    report = import_tree(lake, "bench", files, processes=processes)
    bad = [file for file in report.files if file.error is not None]
    assert not bad, bad[0]
    assert report.episodes


def _peer(name: str) -> Callable[[Path], None]:
    return _load_arrays if name in _ARRAYS else _load_json


def _load_json(path: Path) -> None:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                json.loads(archive.read(name))
        return
    data = path.read_bytes()
    try:
        json.loads(data)
    except ValueError:  # one value a line, or values after each other
        for line in data.splitlines():
            if line:
                json.loads(line)


def _load_arrays(path: Path) -> None:
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            if name != "infos":  # pickles
                arrays[name]


def _speed(options: Options, case: str, inputs: Inputs, processes: int | None = 1) -> list[Result]:
    load = _peer(inputs.name)
    peer = "numpy.load" if inputs.name in _ARRAYS else _PEER
    costs = in_turns(
        {
            OURS: lambda: _importing(options, inputs, processes),
            peer: lambda: _measured(lambda: [load(path) for path in inputs.files]),
        },
        options.repeats,
    )
    return [
        Result(
            f"import of {case}, {inputs.work / 1e6:.1f} MB",
            contender,
            median(seconds for seconds, _ in found),
            work=inputs.work,
            processor=median(processor for _, processor in found),
            time_goal=JSON_SHARE if contender == _PEER else None,
        )
        for contender, found in costs.items()
    ]


def _processes(options: Options, inputs: Inputs) -> list[Result]:
    costs = in_turns(
        {OURS: lambda: _importing(options, inputs, 2), "one process": lambda: _importing(options, inputs, 1)},
        options.repeats,
        warm_up=False,
    )
    return [
        Result(
            f"a tree of {len(inputs.files)} files of {inputs.name}, {inputs.work / 1e6:.1f} MB, in two processes",
            contender,
            median(seconds for seconds, _ in found),
            work=inputs.work,
            processor=median(processor for _, processor in found),
        )
        for contender, found in costs.items()
    ]


# -- bytes ---------------------------------------------------------------------------------------------------------


def _sizes(options: Options, found: Sequence[Inputs]) -> list[Result]:
    """What the tables hold of the real files, each once; made ones are not counted among them all."""
    real = [inputs for inputs in found if "made" not in inputs.name]
    every = Inputs("all agent formats together", [path for inputs in real for path in inputs.files], 0)
    every = replace(every, work=sum(inputs.work for inputs in real))
    results = []
    for inputs in [every, *found]:
        stored_bytes, log_bytes = _stored(options, inputs)
        case = f"bytes of the tables after compact: {inputs.name}"
        goal = SHRINKING if inputs is every else None
        results += [
            Result(case, OURS, None, size=stored_bytes, note=f"besides, {log_bytes / 1e3:.0f} kB of Delta's logs"),
            Result(case, "source", None, size=inputs.work, size_goal=goal),
        ]
    return results


def _stored(options: Options, inputs: Inputs) -> tuple[int, int]:
    """Bytes of the data files of tables `steps` and `episodes`, and of their logs."""
    folder = options.scratch("size")
    lake = trajlake.create(folder / "lake")
    _import(lake, inputs.files, 1)
    compact(lake)
    whole = logs = 0
    for table in ("steps", "episodes"):
        log = folder_bytes(folder / "lake" / table / "_delta_log")
        whole += folder_bytes(folder / "lake" / table) - log
        logs += log
    return whole, logs
