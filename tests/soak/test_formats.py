"""Ten thousand mutations a format: records and refusals, no other failure, and what comes in goes out as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.platform.formats import test_atif, test_inspect, test_kaggle, test_nemo_gym, test_verl
from tests.platform.formats.mutation import withstand
from trajlake.formats import format_named

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

EXAMPLES = 10_000
ROWS: dict[str, Any] = {
    "inspect": test_inspect.LOG,
    "atif": test_atif.TRAJECTORY,
    "nemo-gym": test_nemo_gym.ROW,
    "verl": test_verl.ROW,
    "kaggle": test_kaggle.REPLAY,
}


@pytest.mark.parametrize("name", ROWS)
def test_mutations(name: str, tmp_path: Path) -> None:
    withstand(format_named(name), [ROWS[name]], tmp_path, EXAMPLES)
