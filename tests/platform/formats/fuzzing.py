"""Thousands of inputs to one format, in a process of its own that may take 5 s and 1 GiB for each.

    python -m tests.platform.formats.fuzzing FORMAT INPUTS FOLDER

Inputs are rows with things changed in them (`mutation.mutated`), files with bytes changed in them, and archives whose
members were changed so that their checksums are right. They are made of small rows and of cut real ones; Hypothesis
makes one of twenty, and dice the others. What fails
goes on with the next input, and is kept in the folder; the last line that is printed holds the figures as JSON.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.platform.formats import mutation

from trajlake.errors import FormatError
from trajlake.formats import Refused, detect_source, format_named, open_source
from trajlake.formats.json_rows import Row

REPOSITORY = Path(__file__).resolve().parents[3]
SECONDS = 5  # of processor time, an input: others use the machine too
BYTES = 1 << 30
REAL = {
    "tau-bench": ["tau-bench/historical_trajectories"],
    "tau2-bench": ["tau2-bench"],
    "intercode": ["intercode"],
    "verifiers": ["verifiers"],
    "swe-agent": ["swe-agent"],
    "mini-swe-agent": ["mini-swe-agent-pr816"],
    "openhands": ["openhands/evaluation", "openhands/tests"],
    "inspect": ["inspect_ai"],
    "kaggle": ["kaggle-environments"],
    "monitor-csv": ["rl-baselines3-zoo", "rl-trained-agents"],
    "minari": ["rl-baselines3-zoo", "rl-trained-agents", "imitation"],
}
_LARGEST = 64 << 10  # of a file whose bytes are changed
_ROWS = 40

NOT_FOR_PEOPLE = re.compile(
    r"Traceback|NoneType|object has no|unhashable|not subscriptable|out of range|unpack|unexpected keyword|<class"
)
"""What Python says to programmers, and no refusal may say."""


@dataclass(frozen=True)
class Input:
    """A file's bytes; Hypothesis would print them."""

    data: bytes

    def __repr__(self) -> str:
        return f"Input({len(self.data)} bytes)"


class Hang(Exception):
    """An input took longer than it may."""


def real_data() -> Path | None:
    """The folder of real data, where there is one."""
    folder = Path(os.environ.get("TRAJLAKE_REALDATA", REPOSITORY.parent / "shared" / "realdata"))
    return folder if folder.is_dir() else None


def shortened(value: Any) -> Any:
    """A row of which long lists and texts are cut, so that an input takes milliseconds; what was equal stays equal."""
    if isinstance(value, str):
        return value[:300]
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in list(value.items())[:20]}
    return [shortened(item) for item in value[:5]] if isinstance(value, list) else value


def made_rows(name: str) -> list[Any]:
    """Values of a file of this format, from its tests."""
    from tests.platform.formats import (
        test_atif,
        test_inspect,
        test_intercode,
        test_kaggle,
        test_mini_swe_agent,
        test_nemo_gym,
        test_openhands,
        test_rebuild,
        test_swe_agent,
        test_tau2_bench,
        test_verifiers,
        test_verl,
    )

    rows: dict[str, list[Any]] = {
        "tau-bench": [[test_rebuild.TAU_ROW, {**test_rebuild.TAU_ROW, "success": None}]],
        "tau2-bench": [test_tau2_bench.results(test_tau2_bench.simulation(), test_tau2_bench.simulation(trial=3))],
        "intercode": [{"0": test_intercode.log(), "1": test_intercode.log()}, {"809": test_intercode.HUMAN}],
        "verifiers": [test_verifiers.row(), test_verifiers.row(completion="x", metrics={"a": 1})],
        "swe-agent": [test_swe_agent.trajectory(), {"history": test_swe_agent.HISTORY}],
        "mini-swe-agent": [
            test_mini_swe_agent.trajectory(),
            test_mini_swe_agent.trajectory(messages=test_mini_swe_agent.RESPONSES),
        ],
        "openhands": [
            test_openhands.V1,
            test_openhands.PARTS,
            test_openhands.EVENTS,
            test_openhands.output(history=test_openhands.FLAT),
        ],
        "inspect": [test_inspect.LOG],
        "atif": [test_atif.TRAJECTORY],
        "nemo-gym": [test_nemo_gym.ROW],
        "verl": [test_verl.ROW],
        "kaggle": [test_kaggle.REPLAY],
        "openai-chat": [[test_rebuild.ROW], test_rebuild.ROW, test_rebuild.MESSAGES],
    }
    return rows.get(name, [])


def made_files(name: str, folder: Path) -> list[bytes]:
    """Files of this format that are no JSON, or more than their rows."""
    if name == "monitor-csv":
        from tests.platform.formats.test_monitor_csv import HEAD

        return [f"{HEAD}500.0,500,2.5\n-1,72,3.75\n".encode()]
    if name == "inspect":
        from tests.platform.formats.test_inspect import HEADER, REDUCTIONS, SAMPLE

        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
            for member, value in (("header.json", HEADER), ("samples/a.json", SAMPLE), ("reductions.json", REDUCTIONS)):
                zipped.writestr(member, json.dumps(value))
        return [file.getvalue()]
    if name == "minari":
        from tests.platform.formats.test_minari import arrow, rollouts, write_hdf5

        path = folder / "made.hdf5"
        with suppress(ImportError):
            write_hdf5(path)
        return [rollouts(), arrow(), *([path.read_bytes()] if path.exists() else [])]
    return []


def real_rows(name: str, realdata: Path) -> list[Any]:
    rows = []
    for path in _real_files(name, realdata):
        source = open_source(path)
        if not source.kind and source.head[:1] in {b"{", b"["}:
            rows += [shortened(row.value) for row in source.rows() if isinstance(row, Row)][:_ROWS]
    return [row for row in rows if len(json.dumps(row)) < _LARGEST][: 2 * _ROWS]


def real_files(name: str, realdata: Path) -> list[bytes]:
    files = []
    for path in _real_files(name, realdata):
        data = path.read_bytes()
        if name == "monitor-csv":
            data = b"\n".join(data.split(b"\n")[:40])
        if len(data) <= _LARGEST:
            files.append(data)
    return files[:_ROWS]


def _real_files(name: str, realdata: Path) -> Iterator[Path]:
    for folder in REAL.get(name, []):
        for path in sorted((realdata / folder).rglob("*")):
            if path.is_file():
                with suppress(FormatError):
                    if detect_source(open_source(path)).name == name:
                        yield path


class Inputs:
    """Inputs of a format: changed rows in every layout, files with changed bytes, archives with changed members."""

    def __init__(self, name: str, folder: Path, realdata: Path | None) -> None:
        rows = made_rows(name) + (real_rows(name, realdata) if realdata else [])
        self._rows = [json.dumps(row) for row in rows]
        self._files = made_files(name, folder) + (real_files(name, realdata) if realdata else [])
        self._archives = [_members(data) for data in self._files if data.startswith(b"PK")]
        for row in self._rows:
            self._files += [row.encode(), f"[\n{row},\n {row}]".encode(), f"{row}\n{row}\n{row}".encode()]
        self._kinds = [self._changed] * 3 * bool(rows) + [self._damaged] + [self._repacked] * bool(self._archives)

    def make(self, choices: mutation.Choices) -> bytes:
        return choices.one_of(self._kinds)(choices)

    def _changed(self, choices: mutation.Choices) -> bytes:
        text = json.dumps(mutation.mutated(choices, self._rows))
        layout = choices.one_of(["one", "lines", "array", "utf-16"])
        if layout == "lines":
            return f"{text}\n{text}\n".encode()
        if layout == "array":
            return f"[{text}]".encode()
        return text.encode("utf-16") if layout == "utf-16" else text.encode()

    def _damaged(self, choices: mutation.Choices) -> bytes:
        return damaged(choices, choices.one_of(self._files))

    def _repacked(self, choices: mutation.Choices) -> bytes:
        """An archive with damaged members, or with another name for one: what a checksum does not find."""
        members = list(choices.one_of(self._archives))
        for _ in range(choices.number(1, 2)):
            place = choices.number(0, len(members) - 1)
            name, data = members[place]
            if choices.number(0, 5) == 0:
                members[place] = (choices.one_of(["../x", "samples/", "obs.npy", "header.json", "a"]), data)
            else:
                # The first bytes of a member say what it is.
                head = data[: choices.one_of([128, 200, len(data)])]
                members[place] = (name, damaged(choices, head) + data[len(head) :])
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped, warnings.catch_warnings(action="ignore"):
            for name, data in members:
                zipped.writestr(name, data)
        return file.getvalue()


def _members(archive: bytes) -> list[tuple[str, bytes]]:
    found = []
    with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
        for member in zipped.infolist():
            with suppress(NotImplementedError):  # compressed with zstd
                found.append((member.filename, zipped.read(member)))
    return found or [("header.json", b"{}")]


_PIECES = [
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\0", b"\n", b"\xff", b"null", b"NaN", b"-1", b"1e999", b"../"),
    *(b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xff\xfe"),
]


def damaged(choices: mutation.Choices, data: bytes) -> bytes:
    """The bytes with up to four places replaced, doubled or taken out, and every fourth time cut off."""
    for _ in range(choices.number(1, 4)):
        start = choices.number(0, len(data))
        stop = min(len(data), start + choices.one_of([0, 0, 1, 1, 4, 40, 400]))
        kind = choices.number(0, 3)
        piece = data[start:stop] * 2 if kind == 0 else choices.some_bytes() if kind == 1 else choices.one_of(_PIECES)
        data = data[:start] + piece + data[stop:]
    return data[: choices.number(0, len(data))] if choices.number(0, 3) == 0 else data


def fuzz(name: str, examples: int, folder: Path, realdata: Path | None) -> dict[str, Any]:
    """Give the format this many inputs. Returns figures; `failures` are the places in the code where one failed."""
    chosen = format_named(name)
    path = folder / "input"
    figures = {"format": name, "inputs": 0, "whole": 0, "in part": 0, "refused": 0, "slowest_s": 0.0}
    failures: dict[str, str] = {}
    signal.signal(signal.SIGPROF, _hang)
    resource.setrlimit(resource.RLIMIT_DATA, (4 * BYTES, 4 * BYTES))  # should the machine be in danger

    def one(data: bytes) -> None:
        path.write_bytes(data)
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            came_in, refused = _look(chosen, path)
        except Exception as error:
            _keep(error, path, failures)
        else:
            figures["inputs"] += 1
            figures["whole" if not refused else "in part" if came_in else "refused"] += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        figures["slowest_s"] = max(figures["slowest_s"], round(time.process_time() - started, 3))

    made = Inputs(name, folder, realdata)
    by_hypothesis = examples // 20

    @st.composite
    def inputs(draw: st.DrawFn) -> Input:
        return Input(made.make(mutation.Choices(draw)))

    @settings(
        max_examples=by_hypothesis,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(given_input=inputs())
    def all_(given_input: Input) -> None:
        one(given_input.data)

    all_()
    for number in range(examples - by_hypothesis):
        one(made.make(mutation.Dice(f"{name} {number}")))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {**figures, "peak_mib": peak, "failures": failures}


def _look(chosen: Any, path: Path) -> tuple[int, int]:
    """Read the file as a format and by detection; how many records came in, and how many refusals there are."""
    items = mutation.check_items(chosen, path)
    reasons = [item.reason if isinstance(item, Refused) else str(item) for item in items.refused]
    for reason in reasons:
        assert reason.strip(), "a refusal without a reason"
        assert not NOT_FOR_PEOPLE.search(reason), reason
    return len(items.records), len(items.refused)


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"more than {SECONDS} s")


def _keep(error: Exception, path: Path, failures: dict[str, str]) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/trajlake" in frame.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} {Path(last.filename).name}:{last.lineno}"
    if place not in failures:
        kept = path.with_name(f"failure-{len(failures)}")
        kept.write_bytes(path.read_bytes())
        failures[place] = f"{kept}: {str(error)[:300]}"
        traceback.print_exception(error, file=sys.stderr)


def run(name: str, examples: int, folder: Path, timeout: float) -> dict[str, Any]:
    """`fuzz` in a process of its own, because what is damaged enough may end it. Returns the figures."""
    command = [sys.executable, "-W", "error", "-m", "tests.platform.formats.fuzzing", name, str(examples), str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise AssertionError(f"{name}: exit {done.returncode}; the input is {folder / 'input'}\n{done.stderr[-4000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def check_figures(figures: dict[str, Any]) -> None:
    """Nothing failed, nothing hung, no memory was wasted, and some inputs came in."""
    assert figures["failures"] == {}, figures
    assert figures["slowest_s"] < SECONDS, figures
    assert figures["peak_mib"] < BYTES >> 20, figures
    assert figures["whole"] + figures["in part"], figures


if __name__ == "__main__":
    print(json.dumps(fuzz(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), real_data())))
