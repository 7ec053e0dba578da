"""Whatever a file holds, reading it takes little time and memory and gives records and clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.platform.formats.fuzzing import check_figures, run

from trajlake.formats import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_two_hundred_inputs_give_records_and_clear_refusals(name: str, tmp_path: Path) -> None:
    check_figures(run(name, 200, tmp_path, timeout=250))
