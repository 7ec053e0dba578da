"""A file is read row by row: what is whole comes in, what is not is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trajlake.errors import FormatError
from trajlake.formats import Refused, open_source, text
from trajlake.formats import source as source_module
from trajlake.formats.json_rows import MAX_DEPTH, Row

pytestmark = pytest.mark.unit

ROWS = [{"n": 1, "text": 'a "quoted" ]}, {'}, {"n": 2, "text": "\n\\é😀"}, {"n": 3, "deep": [[{"x": []}]]}]


def values(path: Path) -> list[Any]:
    return [row.value if isinstance(row, Row) else row for row in open_source(path).rows()]


def refusals(path: Path) -> list[Refused]:
    return [row for row in open_source(path).rows() if isinstance(row, Refused)]


LAYOUTS = {
    "array on one line": json.dumps(ROWS),
    "array, indented": json.dumps(ROWS, indent=2),
    "array, one row a line": "[\n" + ",\n".join(map(json.dumps, ROWS)) + "\n]\n",
    "lines": "\n".join(map(json.dumps, ROWS)),
    "lines with blank ones": "\n\n" + "\r\n \r\n".join(map(json.dumps, ROWS)) + "\n\n",
    "indented values after each other": "\n".join(json.dumps(row, indent=1) for row in ROWS),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ""])
def test_rows_are_the_same_in_every_layout_and_under_any_name(put: Any, name: str, suffix: str) -> None:
    assert values(put(LAYOUTS[name], "rows" + suffix)) == ROWS


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_rows_do_not_depend_on_where_the_file_is_cut_into_chunks(
    put: Any, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(source_module, "_WHOLE_BYTES", 0)
    assert values(put(LAYOUTS[name])) == ROWS


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_byte_order_mark_says_the_encoding(put: Any, name: str, encoding: str) -> None:
    assert values(put(LAYOUTS[name].encode(encoding))) == ROWS


def test_utf16_without_a_byte_order_mark_says_what_to_do(put: Any) -> None:
    source = open_source(put(json.dumps(ROWS).encode("utf-16-le")))
    assert source.first_values == []
    with pytest.raises(FormatError, match="UTF-16 without a byte order mark: save it as UTF-8"):
        list(source.rows())


@pytest.mark.parametrize("name", ["array on one line", "array, indented", "lines"])
def test_every_truncation_keeps_the_whole_rows_and_says_where_the_file_ends(put: Any, name: str) -> None:
    whole = LAYOUTS[name].encode()
    ends = []
    for length in range(1, len(whole)):
        path = put(whole[:length])
        if not whole[:length].strip():
            continue
        rows = values(path)
        complete = [row for row in rows if not isinstance(row, Refused)]
        assert complete == ROWS[: len(complete)]
        broken = rows[len(complete) :]
        if broken:
            assert len(broken) == 1
            assert "truncated" in broken[0].reason or "not UTF-8" in broken[0].reason, (length, broken)
            assert broken[0].row.split()[1] == str(len(complete) + 1)
        else:
            assert name == "lines"  # cut between two lines, which cannot be seen
        ends.append(len(complete))
    assert set(ends) >= {0, 1, 2}


def test_the_row_and_the_byte_of_a_truncation_are_named(put: Any) -> None:
    rows = json.dumps([{"n": n} for n in range(200)])
    cut = rows.index('"n": 186') + 4
    assert refusals(put(rows[:cut])) == [
        Refused("row 187", f"file ends inside a JSON value (byte {cut}): the file is truncated; fetch it again")
    ]


def test_one_bad_row_stops_no_other(put: Any) -> None:
    array = put('[{"n": 1}, {"n": tru}, {"n": 3}, {"n": "\t"}, {"n": \'5\'}, {"n": 6}]')
    assert [row.get("n") for row in values(array) if isinstance(row, dict)] == [1, 3, 6]
    assert [row.row for row in refusals(array)] == ["row 2", "row 4", "row 5"]
    lines = put('{"n": 1}\n{"n": \n{"n": 3}\nnonsense\n{"n": 5}\n')
    assert [row["n"] for row in values(lines) if isinstance(row, dict)] == [1, 3, 5]
    assert [row.row for row in refusals(lines)] == ["line 2", "line 4"]
    assert "(byte 14)" in refusals(lines)[0].reason


def test_a_broken_first_line_does_not_hide_that_the_file_is_lines(put: Any) -> None:
    assert [row for row in values(put('{"n": \n{"n": 2}\n{"n": 3}\n')) if isinstance(row, dict)] == [{"n": 2}, {"n": 3}]


def test_where_brackets_do_not_match_what_follows_is_not_guessed_at(put: Any) -> None:
    for broken in ('[{"n": 1}, {"n": [2}}, {"n": 3}]', '[{"n": 1} {"n": 2}]', '[{"n": 1},, {"n": 3}]'):
        rows = values(put(broken))
        assert rows[0] == {"n": 1}
        assert len(rows) == 2
        assert "cannot be told apart" in rows[1].reason


def test_text_behind_the_array_is_noticed(put: Any) -> None:
    assert refusals(put('[{"n": 1}] {"n": 2}')) == [
        Refused("row 2", "there is more behind the end of the array (byte 11)")
    ]


def test_bytes_that_are_not_utf8_cost_one_row(put: Any) -> None:
    for content in (b'[{"n": 1}, {"n": "\xff"}, {"n": 3}]', b'{"n": 1}\n{"n": "\xff"}\n{"n": 3}\n'):
        rows = values(put(content))
        assert [rows[0], rows[2]] == [{"n": 1}, {"n": 3}]
        assert "not UTF-8" in rows[1].reason
    odd = json.dumps([{"n": 1}]).encode("utf-16") + b"\x00"
    assert values(put(odd))[0] == {"n": 1}


def test_text_of_other_encodings_is_refused_and_not_guessed(put: Any) -> None:
    assert "not UTF-8" in refusals(put('[{"n": "é"}]'.encode("latin-1")))[0].reason


def test_lone_surrogates_in_strings_are_values_not_errors(put: Any) -> None:
    assert values(put('[{"n": "\\ud800"}]')) == [{"n": "\ud800"}]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000, 100_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
def test_nesting_is_bounded_and_costs_one_row(put: Any, depth: int, pair: str) -> None:
    opening, closing = pair[:-1], pair[-1]
    deep = opening * depth + "1" + closing * depth
    for content in (f'[{{"n": {deep}}}, {{"n": 2}}]', f'{{"n": {deep}}}\n{{"n": 2}}'):
        first, second = values(put(content))
        assert "nested deeper than 200 levels" in first.reason
        assert second == {"n": 2}


def test_nesting_within_the_bound_is_read(put: Any) -> None:
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert not refusals(put(f'[{{"n": {deep}}}]'))


def test_a_key_that_is_there_twice_is_refused_because_it_is_ambiguous(put: Any) -> None:
    first, second = values(put('[{"reward": 0, "x": {"reward": 1, "reward": 0}}, {"reward": 1}]'))
    assert "'reward' is there twice" in first.reason
    assert second == {"reward": 1}


def test_nan_and_infinity_are_numbers(put: Any) -> None:
    [row] = values(put('[{"a": NaN, "b": -Infinity}]'))
    assert row["a"] != row["a"]
    assert row["b"] == float("-inf")


def test_numbers_of_five_thousand_digits_are_refused(put: Any) -> None:
    first, second = values(put(f'[{{"n": {"9" * 5000}}}, {{"n": 2}}]'))
    assert "digits" in first.reason
    assert second == {"n": 2}


def test_a_raw_nul_costs_one_row(put: Any) -> None:
    first, second = values(put(b'{"n": "\x00"}\n{"n": "\\u0000"}\n'))
    assert "control character" in first.reason
    assert second == {"n": "\0"}


def test_json_inside_a_string_stays_text(put: Any) -> None:
    inner = json.dumps([{"traj": []}, {"messages": []}])
    assert values(put([{"text": inner}])) == [{"text": inner}]


def test_files_that_cannot_be_read_say_what_to_do(put: Any, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:97\nsize 54411\n"
    for path, words in (
        (tmp_path / "nothing.json", "no such file"),
        (tmp_path, "a folder"),
        (put(b""), "empty"),
        (put(b"\xef\xbb\xbf \n\n", "blank"), "empty"),
        (put(pointer, "lfs"), "run `git lfs pull`"),
        (Path("/dev/null"), "not a regular file"),
        (Path("a\0b"), "a"),
    ):
        with pytest.raises(FormatError, match=words):
            open_source(path)


@pytest.mark.parametrize(
    ("head", "words"),
    [(b"PK\x03\x04\0", "ZIP"), (b"\x1f\x8b\x08", "gzip: unpack it first"), (b"PAR1", "Parquet"), (b"ab\0", "binary")],
)
def test_binary_files_are_called_by_their_name(put: Any, head: bytes, words: str) -> None:
    source = open_source(put(head + bytes(100)))
    assert words in source.appearance
    with pytest.raises(FormatError, match=words):
        list(source.rows())


def test_the_hash_is_of_the_bytes(put: Any) -> None:
    assert open_source(put(b"[]")).sha256 == "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"


def test_position_grows_to_the_size_of_the_file(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_CHUNK_BYTES", 16)
    monkeypatch.setattr(source_module, "_WHOLE_BYTES", 64)
    source = open_source(put([{"n": n} for n in range(20)]))
    positions = [source.position for _ in source.rows()]
    assert positions == sorted(positions)
    assert positions[0] < source.position == source.size
