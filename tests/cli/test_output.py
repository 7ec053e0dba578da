"""Rows as tables, JSON, JSON lines and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest

from trajlake_cli.output import Output, frame_rows
from trajlake_cli.values import number

pytestmark = pytest.mark.unit

ROWS = [
    {"episode_id": "a" * 32, "reward": 1.0, "message": "first\nline", "tags": {"k": "v"}, "ok": True},
    {"episode_id": "b" * 32, "reward": None, "message": "", "tags": None, "ok": None},
    {"episode_id": "c" * 32, "reward": math.nan, "message": "\x1b[31mred [bold]x[/bold]", "tags": {}, "ok": False},
]
COLUMNS = ["episode_id", "reward", "message", "tags", "ok"]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Any:
    def shown(format: str, rows: Any = ROWS, columns: Any = COLUMNS, **options: Any) -> str:
        Output(format).rows(rows, columns, **options)
        return capsys.readouterr().out

    return shown


def test_json_is_a_list_of_objects(show: Any) -> None:
    rows = json.loads(show("json"))
    assert [list(row) for row in rows] == [COLUMNS] * 3
    assert [row["reward"] for row in rows] == [1.0, None, "NaN"]
    assert rows[2]["message"] == "\x1b[31mred [bold]x[/bold]"
    assert "\x1b" not in show("json")


def test_json_of_nothing(show: Any) -> None:
    assert json.loads(show("json", [])) == []
    assert show("jsonl", []) == ""
    assert show("csv", []) == ",".join(COLUMNS) + "\n"
    assert show("table", []) == ""


def test_jsonl_is_an_object_a_line(show: Any) -> None:
    lines = show("jsonl").splitlines()
    assert [json.loads(line)["ok"] for line in lines] == [True, None, False]


def test_csv(show: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(show("csv"))))
    assert [row["reward"] for row in rows] == ["1.0", "", "NaN"]
    assert [row["ok"] for row in rows] == ["true", "", "false"]
    assert rows[0]["message"] == "first\nline"
    assert rows[0]["tags"] == '{"k": "v"}'
    assert rows[2]["message"] == "\x1b[31mred [bold]x[/bold]", "as it is, in a file"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (math.inf, '"Infinity"'),
        (-math.inf, '"-Infinity"'),
        (0.1, "0.1"),
        (2**70, str(2**70)),
        (datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=UTC), '"2024-05-06T07:08:09.000010Z"'),
        (date(2024, 5, 6), '"2024-05-06"'),
        (timedelta(milliseconds=1500), "1.5"),
        (b"\x00\xff", '"AP8="'),
        (Decimal("1.10"), '"1.10"'),
        ([1, math.nan, None], '[1, "NaN", null]'),
        (np.float32(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        ("日本 \u202e", '"日本 \\u202e"'),
    ],
)
def test_json_values(show: Any, value: object, encoded: str) -> None:
    assert show("jsonl", [{"v": value}], ["v"]) == f'{{"v": {encoded}}}\n'


def test_table_in_a_pipe_keeps_ids_whole_and_is_harmless(show: Any) -> None:
    text = show("table")
    assert "a" * 32 in text
    assert "first↵line" in text
    assert "␛[31mred [bold]x[/bold]" in text
    assert "NaN" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_table_fits_the_terminal(show: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [{**row, "message": "long text " * 30} for row in ROWS]
    lines = show("table", rows).splitlines()
    assert max(map(len, lines)) <= width
    assert any("…" in line for line in lines)


def test_narrow_table_drops_expendable_columns_first(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{f"number_{at}": at for at in range(10)}]
    monkeypatch.setenv("COLUMNS", "50")
    assert show("table", rows, list(rows[0]), expendable=[f"number_{at}" for at in range(2, 8)]).count("\n") == 3
    beside = show("table", rows, list(rows[0]))
    assert beside.count("\n") == 10, "one column below the other where nothing may be left out"
    assert "number_9  9" in beside


def test_paths_are_cut_at_their_beginning(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert show("table", [{"file": "/a/very/long/folder/of/files/results.json"}], ["file"]).endswith("/results.json\n")


@pytest.mark.parametrize(
    ("width", "shown"), [(40, "2024-05-06 07:08:09Z"), (26, "2024-05-06 07:08"), (20, "2024-05-06")]
)
def test_moments_are_cut_to_the_minute_or_the_day(
    show: Any, monkeypatch: pytest.MonkeyPatch, width: int, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    row = {"n": 12345678, "last": datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)}
    assert show("table", [row], ["n", "last"]).splitlines()[-1] == f"12345678  {shown}"


def test_wide_characters_are_measured(show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.cells import cell_len

    monkeypatch.setenv("COLUMNS", "40")
    text = show("table", [{"message": "日本語" * 20, "n": 1}], ["message", "n"])
    assert {cell_len(line) for line in text.splitlines()} == {40}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.42, "0.42"),
        (1.0, "1"),
        (0.273333, "0.2733"),
        (1e-9, "1e-09"),
        (-0.0, "-0"),
        (1e20, "1e+20"),
        (1234.5, "1234.5"),
    ],
)
def test_numbers_for_people(value: float, shown: str) -> None:
    assert number(value) == shown


def test_map_columns_become_objects() -> None:
    frame = pl.DataFrame({"tags": [[{"key": "a", "value": "b"}], None]})
    assert [row["tags"] for row in frame_rows(frame)] == [{"a": "b"}, None]


def test_ascii_terminals_get_ascii_json(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer, encoding="ascii", write_through=True))
    Output("jsonl").rows([{"v": "日本"}], ["v"])
    assert json.loads(buffer.getvalue()) == {"v": "日本"}
