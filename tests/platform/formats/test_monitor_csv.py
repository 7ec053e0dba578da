"""Monitor CSV: returns only; lengths and times as far as the file tells them."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajlake.errors import FormatError
from trajlake.formats import Record, Refused, detect, format_named, open_source
from trajlake.formats.rebuild import stored

pytestmark = pytest.mark.unit

HEAD = '#{"t_start": 1614621211.25, "env_id": "CartPole-v1"}\nr,l,t\n'


def test_a_row_is_an_episode_without_steps(put: Any, run_import: Any) -> None:
    imported = run_import(put(HEAD + "500.0,500,2.5\n-1,72,3.75\n"))
    [file] = imported.report.files
    assert (file.format, file.episodes, file.steps) == ("monitor-csv", 2, 0)
    assert [end["reward"] for end in imported.ends] == [500.0, -1.0]
    assert {begin["env_name"] for begin in imported.begins} == {"CartPole-v1"}
    extra = [json.loads(begin["extra"]) for begin in imported.begins]
    assert [(each["l"], each["t"]) for each in extra] == [(500, 2.5), (72, 3.75)]
    start = 1614621211.25
    [first, second] = list(format_named("monitor-csv").read(open_source(file.path)))
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert (first.started_at, first.ended_at) == (start, start + 2.5)
    assert (second.started_at, second.ended_at) == (start + 2.5, start + 3.75)


def test_times_end_where_another_run_goes_on_in_the_file(put: Any) -> None:
    path = put(HEAD + "1,1,1.5\n1,1,3.0\n1,1,0.4\n1,1,0.9\n1,1,9.0\n")
    times = [(each.started_at, each.ended_at) for each in format_named("monitor-csv").read(open_source(path))]  # type: ignore[union-attr]
    start = 1614621211.25
    assert times == [(start, start + 1.5), (start + 1.5, start + 3.0), *[(None, None)] * 3]


def test_an_environment_without_a_name_has_none(put: Any, run_import: Any) -> None:
    [begin] = run_import(put('#{"t_start": 1.5, "env_id": "None"}\nr,l,t\n1,2,3\n')).begins
    assert (begin["env_name"], json.loads(begin["extra"])["start"]) == (None, {"env_id": "None"})


def test_further_columns_and_keys_stay_in_extra(put: Any, run_import: Any) -> None:
    text = '#{"t_start": 1.5, "env_id": null, "gym": "0.26"}\r\nr,l,t,is_success,note\r\n1,2,3,True,"a, b"\r\n'
    [begin] = run_import(put(text)).begins
    extra = json.loads(begin["extra"])
    assert (extra["columns"], extra["start"]) == ({"is_success": "True", "note": "a, b"}, {"gym": "0.26"})
    assert begin["env_name"] is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1,2", "has 2 values where the header names 3"),
        ("r,l,t", "its r is no number: 'r'"),
        ("1,2.5,3", "its l is no whole number: '2.5'"),
        ("1,-2,3", "its l is no length: '-2'"),
        ("1,99999999999999999999,3", "its l is no length: '99999999999999999999'"),
        ('1,2,"3', "not CSV: unexpected end of data"),
    ],
)
def test_a_broken_row_is_refused_by_its_line(put: Any, run_import: Any, row: str, reason: str) -> None:
    [file] = run_import(put(HEAD + f"1,2,3\n{row}\n\n4,5,6\n")).report.files
    assert (file.episodes, [(refused.row, refused.reason) for refused in file.refusals]) == (2, [("line 4", reason)])


def test_what_is_not_finite_is_a_return_all_the_same(put: Any, run_import: Any) -> None:
    rewards = [end["reward"] for end in run_import(put(HEAD + "nan,1,1\ninf,1,2\n-inf,1,3\n")).ends]
    assert math.isnan(rewards[0])
    assert rewards[1:] == [math.inf, -math.inf]


@pytest.mark.parametrize("text", ["#{\nr,l,t\n1,2,3\n", "#[1]\nr,l,t\n1,2,3\n"])
def test_a_first_line_that_is_no_json_refuses_the_file(put: Any, run_import: Any, text: str) -> None:
    [file] = run_import(put(text)).report.files
    assert "its first line is not `#` and a JSON object" in str(file.error)


def test_other_csv_is_none(put: Any) -> None:
    with pytest.raises(FormatError, match="a table in CSV, separated by commas"):
        detect(put("r,l,t\n1,2,3\n"))


def test_what_of_the_first_line_fits_no_column_is_kept_beside_the_rewards(put: Any) -> None:
    path = put('#{"t_start": 100614621211.25, "env_id": [7]}\nr,l,t\n1,2,3\n')
    (record,) = format_named("monitor-csv").read(open_source(path))
    assert isinstance(record, Record)
    found = stored(record)
    assert found.episode["reward"] == 1.0
    assert found.episode["started_at"] is None
    assert record.begin["extra"] == {"l": 2, "t": 3.0, "start": {"t_start": 100614621211.25, "env_id": [7]}}


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 90), length=st.integers(0, 6), middle=st.binary(max_size=6), cut=st.integers(0, 100))
def test_damaged_files_give_rows_and_refusals(start: int, length: int, middle: bytes, cut: int, tmp_path: Path) -> None:
    content = (HEAD + "500.0,500,2.5\n-1,72,3.75\n").encode()
    path = tmp_path / "monitor.csv"
    path.write_bytes((content[:start] + middle + content[start + length :])[: 100 - cut // 4] or b"x")
    with suppress(FormatError):
        for item in format_named("monitor-csv").read(open_source(path)):
            assert isinstance(item, (Record, Refused))
            if isinstance(item, Record):
                stored(item)
