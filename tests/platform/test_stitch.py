"""Row groups that are decoded together are what each is alone."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as kinds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajlake.errors import StoreError
from trajlake.read.stitch import Footer, decode
from trajlake.table import layout
from trajlake.table.layout import PAGED, encode_steps, schema_of, with_nulls
from trajlake_schemas import STEPS

pytestmark = pytest.mark.unit

COLUMNS = ["episode_id", "step_index", "timestamp", "message", "tool_calls", "reward", "terminated"]
COLUMNS += ["token_ids", "logprobs"]


def steps(seed: int, count: int, columns: list[str]) -> pa.Table:
    rng = np.random.default_rng(seed)

    def row(number: int) -> dict:
        tokens = None if rng.random() < 0.2 else rng.integers(0, 100_000, rng.integers(0, 30)).tolist()
        call = {"id": f"c{number}", "name": "find", "arguments": "{}", "arguments_kind": "object"}
        return {
            "episode_id": f"e{seed}",
            "step_index": number,
            "timestamp": int(rng.integers(0, 2**50)),
            "message": None if rng.random() < 0.3 else "wörter " * int(rng.integers(0, 40)),
            "tool_calls": [call] * int(rng.integers(0, 3)),
            "reward": float(rng.random()),
            "terminated": bool(rng.random() < 0.5),
            "token_ids": tokens,
            "logprobs": None if tokens is None else [None if rng.random() < 0.1 else -0.5 for _ in tokens],
        }

    return pa.Table.from_pylist([row(number) for number in range(count)], schema=STEPS.arrow).select(columns)


def written(table: pa.Table, **options) -> tuple[bytes, Footer]:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=37, store_schema=False, **options)
    data = sink.getvalue().to_pybytes()
    size = int.from_bytes(data[-8:-4], "little")
    return data, Footer(data[-8 - size :])


@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": False, "compression": codec, "data_page_version": version, "data_page_size": page}
        for codec, version, page in product(["zstd", "lz4", "none", "snappy"], ["1.0", "2.0"], [200, 1 << 20])
    ]
    + [{"use_dictionary": ["episode_id", "message"]}, {"dictionary_pagesize_limit": 30}, {"write_page_index": True}],
    ids=str,
)
def test_row_groups_of_several_files_come_back_as_they_are_in_them(options):
    files = [
        written(steps(seed, 400, columns), **options)
        for seed, columns in enumerate([COLUMNS, COLUMNS, COLUMNS[:5], COLUMNS])
    ]
    wanted = [(file, number) for file in range(len(files)) for number in range(11)]
    random.Random(1).shuffle(wanted)
    groups = [files[file][1].row_group(number) for file, number in wanted]
    bytes_of = [
        files[file][0][group.extent.start : group.extent.start + group.extent.length]
        for (file, _), group in zip(wanted, groups, strict=True)
    ]
    inputs = list(zip(groups, bytes_of, strict=True))
    found = decode(inputs)
    assert decode(inputs, [[(0, group.rows)] for group in groups]) == found
    readers = [pq.ParquetFile(pa.BufferReader(data)) for data, _ in files]
    for (file, number), table in zip(wanted, found, strict=True):
        table.validate(full=True)
        assert table.equals(with_nulls(readers[file].read_row_group(number), STEPS.arrow).cast(STEPS.arrow))


@pytest.mark.parametrize("seed", range(8))
def test_of_a_file_of_ours_wanted_rows_come_back_as_they_are_and_pages_of_others_are_not_decoded(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([1, 3, 30, 200]) for _ in range(60)]
    table = pa.concat_tables([steps(number, length, COLUMNS) for number, length in enumerate(lengths)])
    data, places = encode_steps([(table, lengths)], schema_of([(table, lengths)]))
    footer = Footer(bytes(data[-8 - int.from_bytes(data[-8:-4], "little") :]))
    firsts = np.cumsum([0, *lengths])
    chosen = rng.sample(range(60), 6)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for episode in chosen:
        place = places[episode]
        wanted.setdefault(place.row_group, []).append((place.row_offset, place.row_count))
    groups = [footer.row_group(number) for number in wanted]
    inputs = [(group, bytes(data[group.extent.start : group.extent.start + group.extent.length])) for group in groups]
    for _ in range(2):  # pages that were found are kept
        found = dict(zip(wanted, decode(inputs, list(wanted.values())), strict=True))
        for episode in chosen:
            place = places[episode]
            rows = found[place.row_group].slice(place.row_offset, place.row_count)
            rows.validate(full=True)
            assert rows.select(COLUMNS).equals(table.slice(int(firsts[episode]), lengths[episode]))
    whole = dict(zip(wanted, decode(inputs), strict=True))
    for number, rows in found.items():
        assert rows.drop_columns(PAGED).equals(whole[number].drop_columns(PAGED))
    decoded, there = (
        sum(len(rows["token_ids"].combine_chunks().values) for rows in tables.values()) for tables in (found, whole)
    )
    assert decoded < there


def test_booleans_that_are_all_null_inside_of_lists_come_back():
    results = [{"call_id": "a", "content": None, "is_error": None}] * 3
    rows = [
        {"episode_id": "e", "step_index": 0, "tool_results": results, "loss_mask": [None, None], "terminated": None}
    ]
    table = pa.Table.from_pylist(rows, schema=STEPS.arrow)
    data = bytes(encode_steps([(table, [1])], schema_of([(table, [1])]))[0])
    group = Footer(data[-8 - int.from_bytes(data[-8:-4], "little") :]).row_group(0)
    [found] = decode([(group, data[group.extent.start :][: group.extent.length])], [[(0, 1)]])
    assert found.equals(table)
    assert with_nulls(pq.read_table(pa.BufferReader(data)), STEPS.arrow).equals(table)


def test_bytes_that_are_no_row_group_are_refused():
    data, footer = written(steps(0, 100, COLUMNS), use_dictionary=False, compression="zstd")
    group = footer.row_group(1)
    with pytest.raises(StoreError, match="damaged"):
        decode([(group, b"\xa5" * group.extent.length)])
    with pytest.raises(StoreError, match="damaged"):
        decode([(group, data[group.extent.start :][: group.extent.length - 40])])


def values(kind: pa.DataType) -> st.SearchStrategy:
    """Any value of an Arrow type but null."""
    if kinds.is_list(kind):
        return st.lists(values_or_null(kind.value_field), max_size=4)
    if kinds.is_map(kind):
        pairs = st.dictionaries(values(kind.key_type), values_or_null(kind.item_field), max_size=2)
        return pairs.map(lambda found: list(found.items()))
    if kinds.is_struct(kind):
        return st.fixed_dictionaries({field.name: values_or_null(field) for field in kind})
    if kinds.is_string(kind):
        return st.text(st.characters(codec="utf-8"), max_size=6)
    if kinds.is_binary(kind):
        return st.binary(max_size=6)
    if kinds.is_boolean(kind):
        return st.booleans()
    if kinds.is_floating(kind):
        return st.floats(width=kind.bit_width, allow_nan=False)  # NaN is not equal to itself
    bits = (64 if kinds.is_timestamp(kind) else kind.bit_width) - 1
    return st.integers(-(2**bits), 2**bits - 1)


def values_or_null(field: pa.Field) -> st.SearchStrategy:
    return st.none() | values(field.type) if field.nullable else values(field.type)


@st.composite
def episodes(draw: st.DrawFn) -> list[list[dict]]:
    """Rows of steps, an episode's at a time, in a few of the columns: at least one that is nested."""
    fields = list(STEPS.arrow)
    nullable = st.sampled_from([field.name for field in fields if field.nullable])
    nested = st.sampled_from([field.name for field in fields if kinds.is_nested(field.type)])
    some = {draw(nested), *draw(st.lists(nullable, max_size=2))}
    row = {field.name: values_or_null(field) for field in fields if field.name in some or not field.nullable}
    rows = st.lists(st.fixed_dictionaries(row), min_size=1, max_size=3)
    return draw(st.lists(rows, min_size=1, max_size=5))


@settings(max_examples=300)
@given(written=episodes(), data=st.data())
def test_steps_of_any_values_come_back_whole_and_those_that_are_wanted_alone(written, data):
    table = pa.Table.from_pylist([row for episode in written for row in episode], schema=STEPS.arrow)
    lengths = [len(episode) for episode in written]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_PAGE_VALUES", data.draw(st.integers(0, 5), label="least values of a page"))
        file, places = encode_steps([(table, lengths)], schema_of([(table, lengths)]))
    group = Footer(bytes(file[-8 - int.from_bytes(file[-8:-4], "little") :])).row_group(0)
    inputs = [(group, bytes(file[group.extent.start : group.extent.start + group.extent.length]))]
    assert decode(inputs)[0].equals(table)
    place = data.draw(st.sampled_from(places), label="wanted")
    [found] = decode(inputs, [[(place.row_offset, place.row_count)]])
    assert found.slice(place.row_offset, place.row_count).equals(table.slice(place.row_offset, place.row_count))
