"""The schemas: fixed, documented, and evolving only in ways that keep every stored row readable."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajlake_schemas import EPISODES, EVENTS, SCHEMAS, STEPS, SchemaError, check_evolution, diff
from trajlake_schemas.events import BEGIN_EVENT, END_EVENT
from trajlake_schemas.reference import describe, markdown

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("table", SCHEMAS.values(), ids=SCHEMAS)
def test_every_column_says_what_it_means_and_what_null_means(table):
    for column in table:
        assert column.meaning.endswith("."), column.name
        assert column.null, column.name
        if column.required:
            assert column.null == "never", column.name


@pytest.mark.parametrize("table", SCHEMAS.values(), ids=SCHEMAS)
def test_column_names_are_unique_and_the_page_names_each_of_them(table):
    assert len(set(table.names())) == len(table.names())
    page = markdown([table])
    for row in describe(table):
        assert f"`{row['column']}`" in page


def test_whatever_an_event_says_has_a_column_in_a_table():
    for column in (*BEGIN_EVENT, *END_EVENT):
        assert column.name == "occurred_at" or column.name in EPISODES
    for field in EVENTS.arrow.field("step").type:
        assert STEPS.arrow.field(field.name).type == field.type


def test_no_column_is_an_empty_struct_which_parquet_cannot_hold():
    def walk(kind):
        if pa.types.is_struct(kind):
            assert kind.num_fields > 0
        for index in range(kind.num_fields):
            walk(kind.field(index).type)

    for table in SCHEMAS.values():
        for field in table.arrow:
            walk(field.type)


BASE = pa.schema([pa.field("a", pa.int32()), pa.field("b", pa.string(), nullable=False)])


@pytest.mark.parametrize(
    ("new", "change"),
    [
        (BASE.append(pa.field("c", pa.list_(pa.float32()))), "added as list<float>"),
        (BASE.set(0, pa.field("a", pa.int64())), "widened from int32 to int64"),
    ],
)
def test_nullable_columns_may_be_added_and_types_may_widen(new, change):
    assert [found.change for found in check_evolution(BASE, new, "t")] == [change]


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (BASE.remove(0), "column a removed"),
        (BASE.append(pa.field("c", pa.int8(), nullable=False)), "column c added as int8: .*make it nullable"),
        (BASE.set(0, pa.field("a", pa.int16())), "column a changed from int32 to int16"),
        (BASE.set(0, pa.field("a", pa.int32(), nullable=False)), "column a made required"),
        (BASE.set(1, pa.field("b", pa.string())), "column b made nullable"),
        (BASE.set(0, pa.field("a", pa.string())), "column a changed from int32 to string"),
    ],
)
def test_any_other_change_is_refused_with_column_and_reason(new, reason):
    with pytest.raises(SchemaError, match=reason):
        check_evolution(BASE, new, "t")


def test_changes_inside_structs_and_lists_are_seen_with_their_path():
    old = pa.schema([("calls", pa.list_(pa.struct([("id", pa.string()), ("n", pa.int32())])))])
    new = pa.schema([("calls", pa.list_(pa.struct([("id", pa.string()), ("n", pa.int64()), ("x", pa.bool_())])))])
    found = [(change.column, change.refusal) for change in diff(old, new)]
    assert found == [("calls[].n", None), ("calls[].x", None)]
    assert any(change.refusal for change in diff(new, old))


@given(st.sampled_from(sorted(SCHEMAS)))
def test_a_schema_does_not_differ_from_itself(name):
    assert diff(SCHEMAS[name].arrow, SCHEMAS[name].arrow) == []
