"""Whatever a file holds, reading it takes little time and memory and gives records and clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.platform.formats.fuzzing import check_figures, run

from trajlake.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_two_hundred_inputs_give_records_and_clear_refusals(name: str, tmp_path: Path) -> None:
    check_figures(run(name, 200, tmp_path, timeout=250))


_IMPORT = """
import resource, sys
import trajlake
from trajlake.formats.importing import import_files
with trajlake.create(sys.argv[1]).writer(run="r", worker="w") as writer:
    report = import_files(writer, [sys.argv[2]])
print(report.episodes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def test_a_text_of_a_hundred_megabytes_comes_in_with_less_than_a_gib(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("w") as file:
        file.write('[{"messages": [{"role": "user", "content": "')
        for _ in range(100):
            file.write("x" * 1_000_000)
        file.write('"}]}]')
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, str(tmp_path / "lake"), str(path)], capture_output=True, text=True, check=True
    )
    episodes, mebibytes = map(int, done.stdout.split())
    assert episodes == 1
    assert mebibytes < 1024
