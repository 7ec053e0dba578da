"""Thousands of inputs to one format, in a process of its own that may take 5 s and 1 GiB for each.

    python -m tests.platform.formats.fuzzing FORMAT INPUTS FOLDER

Inputs are rows with things changed in them (`mutation.mutations`), files with bytes changed in them, and archives whose
members were changed so that their checksums are right. They are made of small rows and of cut real ones. What fails
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
        "tau-bench": [[test_rebuild.TAU_ROW, test_rebuild.TAU_ROW]],
        "tau2-bench": [test_tau2_bench.results(test_tau2_bench.simulation(), test_tau2_bench.simulation(trial=3))],
        "intercode": [{"0": test_intercode.log(), "1": test_intercode.log()}, {"809": test_intercode.HUMAN}],
        "verifiers": [test_verifiers.row(), test_verifiers.row(completion="x", metrics={"a": 1})],
        "swe-agent": [test_swe_agent.trajectory(), {"history": test_swe_agent.HISTORY}],
        "mini-swe-agent": [test_mini_swe_agent.trajectory()],
        "openhands": [test_openhands.V1, test_openhands.EVENTS, test_openhands.output(history=test_openhands.FLAT)],
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


def inputs(name: str, folder: Path, realdata: Path | None) -> st.SearchStrategy[Input]:
    """Inputs of a format: changed rows in every layout, files with changed bytes, archives with changed members."""
    rows = made_rows(name) + (real_rows(name, realdata) if realdata else [])
    files = made_files(name, folder) + (real_files(name, realdata) if realdata else [])
    archives = [data for data in files if data.startswith(b"PK")]
    kinds = []
    if rows:
        value = mutation.mutations(rows)
        kinds += [st.builds(_as_file, value, st.sampled_from(["one", "lines", "array", "utf-16"]))] * 3
        files += [data for row in rows for data in (json.dumps(row).encode(), json.dumps([row] * 2, indent=1).encode())]
        files += [b"\n".join([json.dumps(row).encode()] * 3) for row in rows]
    kinds += [_damaged(files)] * (1 if rows else 2)
    if archives:
        kinds += [_repacked(archives)]
    return st.one_of(kinds).map(Input)


def _as_file(value: Any, layout: str) -> bytes:
    text = json.dumps(value)
    if layout == "lines":
        return f"{text}\n{text}\n".encode()
    if layout == "array":
        return f"[{text}]".encode()
    return text.encode("utf-16") if layout == "utf-16" else text.encode()


_PIECES = st.one_of(
    st.sampled_from(
        [b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\0", b"\n", b"\xff", b"null", b"NaN", b"-1", b"1e999"]
        + [b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\xff\xfe", b"../"]
    ),
    st.binary(max_size=4),
)


def _damaged(files: list[bytes]) -> st.SearchStrategy[bytes]:
    @st.composite
    def damaged(draw: st.DrawFn) -> bytes:
        data = files[draw(st.integers(0, len(files) - 1))]
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, len(data)))
            stop = min(len(data), start + draw(st.sampled_from([0, 0, 1, 1, 4, 40, 400])))
            piece = data[start:stop] * 2 if draw(st.booleans()) else draw(_PIECES)
            data = data[:start] + piece + data[stop:]
        return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 3)) == 0 else data

    return damaged()


def _repacked(archives: list[bytes]) -> st.SearchStrategy[bytes]:
    """An archive with damaged members, or with another name for one: what a checksum does not find."""
    contents = []
    for data in archives:
        with zipfile.ZipFile(io.BytesIO(data)) as zipped, suppress(NotImplementedError):
            contents.append([(member.filename, zipped.read(member)) for member in zipped.infolist()])

    @st.composite
    def repacked(draw: st.DrawFn) -> bytes:
        members = list(contents[draw(st.integers(0, len(contents) - 1))])
        for _ in range(draw(st.integers(1, 2))):
            place = draw(st.integers(0, len(members) - 1))
            name, data = members[place]
            if draw(st.integers(0, 5)) == 0:
                members[place] = (draw(st.sampled_from(["../x", "samples/", "obs.npy", "header.json", "a"])), data)
            else:
                # The first bytes of a member say what it is.
                head = data[: draw(st.sampled_from([128, 200, len(data)]))]
                members[place] = (name, draw(_damaged([head])) + data[len(head) :])
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
            for name, data in members:
                with suppress(UserWarning):
                    zipped.writestr(name, data)
        return file.getvalue()

    return repacked()


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

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(given_input=inputs(name, folder, realdata))
    def all_(given_input: Input) -> None:
        one(given_input.data)

    all_()
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
