"""Ten thousand inputs to every format: no crash, no hang, no memory without end, only clear refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.platform.formats.fuzzing import check_figures, run
from trajlake.formats import FORMATS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_inputs(name: str, tmp_path: Path) -> None:
    figures = run(name, 10_000, tmp_path, timeout=7000)
    print(figures)
    check_figures(figures)
