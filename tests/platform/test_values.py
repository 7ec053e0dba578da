"""What a rollout gives to `step()` comes back equal from a segment, whatever it is."""

import enum
import json
import uuid
from datetime import datetime

import hypothesis
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trajlake.errors import SegmentUnreadable, UsageError
from trajlake.ingest.scalars import microseconds
from trajlake.ingest.segment import (
    Event,
    SegmentName,
    decode_segment,
    decode_spool,
    encode_batch,
    encode_segment,
    read_descriptor,
)
from trajlake.ingest.values import begin_row, end_row, step_row
from trajlake.read.trajectory import restored, to_array

pytestmark = pytest.mark.unit

TEXT = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(
    ["", "\0", "a\0b", "\ud800", "\udfff\ud800", "\ud83d\ude00", "😀", "\x1b[31mred", "‮", "\ufffd"]
)
REAL = st.floats(allow_nan=True, allow_infinity=True)
JSON = st.recursive(
    # JSON cannot tell two surrogates that stand beside each other from the character that they are a pair for.
    st.none() | st.booleans() | st.integers() | REAL | TEXT.filter(lambda text: json.loads(json.dumps(text)) == text),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def through_a_segment(kind, row):
    batch = encode_batch([Event(kind, "e", 0, 0, 0, row)])
    import pyarrow as pa

    table = decode_segment(encode_segment(pa.Table.from_batches([batch])), "k")
    return restored(table[kind][0].as_py())


@st.composite
def steps(draw):
    given = {
        "source": draw(st.sampled_from(["system", "user", "agent", "tool", "environment"])),
        "message": draw(st.none() | TEXT),
        "reasoning": draw(st.none() | TEXT),
        "reward": draw(st.none() | REAL),
        "terminated": draw(st.none() | st.booleans()),
        "token_ids": draw(st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)),
        "logprobs": draw(st.none() | st.lists(st.floats(width=32), max_size=5)),
        "loss_mask": draw(st.none() | st.lists(st.integers(0, 1), max_size=5)),
        "tool_calls": draw(
            st.none()
            | st.lists(
                st.fixed_dictionaries(
                    {"id": TEXT, "name": TEXT, "arguments": TEXT | st.dictionaries(st.text(max_size=5), JSON)}
                ),
                max_size=2,
            )
        ),
        "tool_results": draw(
            st.none()
            | st.lists(
                st.fixed_dictionaries({"call_id": TEXT, "content": TEXT, "is_error": st.none() | st.booleans()}),
                max_size=2,
            )
        ),
    }
    return {name: value for name, value in given.items() if value is not None}


def same(one, other):
    if isinstance(one, float):
        return (one != one and other != other) or (one == other and np.signbit(one) == np.signbit(other))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and one == other


@settings(max_examples=100)
@given(steps())
def test_any_step_comes_back_equal(given_step):
    found = through_a_segment("step", step_row(given_step))
    for name, value in given_step.items():
        if name == "tool_calls":
            for call, stored in zip(value, found[name], strict=True):
                assert (stored["id"], stored["name"]) == (call["id"], call["name"])
                if isinstance(call["arguments"], str):
                    assert (stored["arguments"], stored["arguments_kind"]) == (call["arguments"], "string")
                else:
                    assert same(json.loads(stored["arguments"]), call["arguments"])
                    assert stored["arguments_kind"] == "object"
        else:
            assert same(value, found[name]), name
    for name in set(found) - set(given_step):
        assert found[name] is None, name


DTYPES = [
    np.dtype(kind)
    for kind in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32",
                 "float64", "complex64", "complex128", ">i4", ">f8", "datetime64[ns]", "timedelta64[s]", "S5", "U3")
]  # fmt: skip


@settings(max_examples=100)
@given(st.data(), st.sampled_from(DTYPES))
def test_any_plain_array_comes_back_with_its_dtype_and_shape(data, dtype):
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    array = data.draw(hnp.arrays(dtype, shape))
    found = to_array(through_a_segment("step", step_row({"tensors": {"x": array}}))["tensors"][0])
    assert found.shape == array.shape
    assert found.dtype == array.dtype.newbyteorder("<")
    assert found.tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


def test_arrays_are_copied_when_they_are_given():
    buffer = np.zeros(3)
    ids = np.arange(3)
    row = step_row({"tensors": {"observation": buffer}, "token_ids": ids})
    buffer[:] = 9
    ids[:] = 9
    assert to_array(row["tensors"][0]).tolist() == [0, 0, 0]
    assert row["token_ids"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mesage": "x"}, "step has no field 'mesage'"),
        ({"message": 3}, "message: must be text, not int"),
        ({"tool_results": [None]}, "tool_results: must be a list of objects; it holds null"),
        ({"source": "robot"}, "source: must be one of"),
        ({"reward": "high"}, "reward: must be a number"),
        *(({"reward": value}, "reward: must be a number") for value in (True, np.True_, np.array(False))),
        ({"token_ids": [2**31]}, "token_ids: must hold numbers from"),
        ({"token_ids": [0.5]}, "token_ids: must hold whole numbers"),
        ({"token_ids": [[1], [2]]}, "token_ids: must be a flat list"),
        ({"tensors": {"x": np.array([(1, 2.0)], dtype=[("a", int), ("b", float)])}}, "only plain numbers"),
        ({"tensors": {"x": np.array([object()])}}, "only plain numbers"),
        ({"tensors": {"x": np.ma.array([1, 2], mask=[0, 1])}}, "tensors: has masked values"),
        ({"logprobs": np.ma.array([0.1, 2], mask=[0, 1])}, "logprobs: has masked values"),
        ({"source": ["agent"]}, "source: must be one of"),
        ({"terminated": 1}, "terminated: must be True or False"),
        ({"tool_calls": "call"}, "tool_calls: must be a list of objects"),
        ({"tool_calls": ["call"]}, "tool_calls: must be a list of objects; it holds str"),
        ({"tool_results": [{"call_id": "1", "content": "x", "is_error": "no"}]}, "tool_results: must be True or False"),
        ({"extra": {"x": object()}}, "cannot be written as JSON"),
        ({"timestamp": "yesterday"}, "timestamp: not an ISO 8601 time"),
        *(
            ({"timestamp": time}, "timestamp: not a time of the years 1 to 9999")
            for time in (-9e10, -90_000_000_000, "9999-12-31T23:00:00-05:00", np.float64(-9e10))
        ),
        ({"extra": {"d": object()}}, "step field extra: cannot be written as JSON"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_field_and_reason(fields, reason):
    with pytest.raises(UsageError, match=reason):
        step_row(fields)


@pytest.mark.parametrize(
    "fields", [{"tensors": {"a": np.zeros(9_000), "b": np.zeros(9_000)}}, {"extra": {"a": "x" * 99_999}}]
)
def test_a_step_that_arrow_cannot_hold_is_refused_at_the_call(monkeypatch, fields):
    step_row(fields)
    monkeypatch.setattr("trajlake.ingest.values._LARGEST_STEP", 99_999)
    with pytest.raises(UsageError, match="a step of 1[0-9]{2},[0-9]{3} bytes is more than Arrow holds in a row"):
        step_row(fields)


def test_lone_surrogates_in_tags_come_back():
    tags = {"\ud83d": "a", "M": "\ud83d\ude00", "plain": ""}
    assert through_a_segment("begin", begin_row({"tags": tags}))["tags"] == tags


def test_what_the_caller_changes_after_the_call_changes_nothing():
    function = {"name": "f", "arguments": "{}"}
    given = {
        "tool_calls": [
            {"id": "1", "type": "function", "function": function},
            {"id": "2", "name": "g", "arguments": "x"},
        ],
        "tool_results": [{"call_id": "1", "content": "ok"}, {"call_id": "2", "content": "no", "is_error": True}],
        "token_ids": [1, 2],
        "extra": {"a": [1]},
    }
    row = step_row(given)
    function["name"] = given["tool_calls"][1]["name"] = given["tool_results"][0]["content"] = "changed"
    given["tool_calls"].clear()
    given["token_ids"].clear()
    given["extra"]["a"].append(2)
    found = through_a_segment("step", row)
    assert [call["name"] for call in found["tool_calls"]] == ["f", "g"]
    assert [(one["content"], one["is_error"]) for one in found["tool_results"]] == [("ok", None), ("no", True)]
    assert (found["token_ids"], found["extra"], found["source"]) == ([1, 2], '{"a":[1]}', "agent")


@pytest.mark.parametrize("value", [np.array(["completed"] * 2), ["completed"], np.bool_(True)])
def test_a_status_of_any_type_is_refused_by_field(value):
    with pytest.raises(UsageError, match="status: must be one of"):
        end_row({"status": value})


@pytest.mark.parametrize("version", [120, np.int64(120)])
def test_the_policy_version_of_a_step_may_be_a_whole_number_as_that_of_an_episode(version):
    row = step_row({"policy_version": version, "message": "a"})
    assert row["policy_version"] == "120"
    assert through_a_segment("step", row)["policy_version"] == 120
    with pytest.raises(UsageError, match="policy_version: must be text, not bool"):
        step_row({"policy_version": True})


def test_identifiers_that_were_integers_come_back_as_integers():
    found = through_a_segment("begin", begin_row({"task_id": 17, "policy_version": "17", "seed": 3}))
    assert (found["task_id"], found["policy_version"], found["seed"]) == (17, "17", 3)


def test_keys_of_tool_calls_that_no_column_holds_are_kept():
    row = step_row(
        {"tool_calls": [{"id": "1", "type": "custom", "function": {"name": "f", "arguments": "x", "strict": 1}}]}
    )
    assert row["extra"] == '{"tool_calls":{"0":{"type":"custom","function":{"strict":1}}}}'


class Level(enum.IntEnum):
    HIGH = 3


class Word(str, enum.Enum):  # noqa: UP042  (str() of a StrEnum is its value already)
    DONE = "completed"
    TOOL = "tool"


def test_of_an_enum_that_is_a_text_its_value_is_stored():
    step = step_row({"source": "tool", "message": Word.DONE, "tool_calls": [{"id": Word.DONE, "name": Word.TOOL}]})
    assert ascii([step["message"], step["tool_calls"][0]["id"], step["tool_calls"][0]["name"]]) == (
        "['completed', 'completed', 'tool']"
    )
    begin = begin_row({"domain": Word.TOOL, "task_id": Word.TOOL, "tags": {Word.TOOL: Word.DONE}})
    assert ascii(begin) == "{'domain': 'tool', 'task_id': 'tool', 'tags': [('tool', 'completed')]}"
    assert ascii(end_row({"status": Word.DONE})) == "{'status': 'completed'}"


@pytest.mark.parametrize("make", [begin_row, step_row, end_row])
@pytest.mark.parametrize("extra", ["a note", ["a"], 3])
def test_extra_that_is_no_object_is_refused(make, extra):
    with pytest.raises(UsageError, match="field extra: must map names to values"):
        make({"extra": extra})


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize("beside", ["", None, float("nan"), "\ud800"], ids=ascii)
@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ([np.float32(1.5), np.int64(7), np.array([1, 2]), np.bool_(True)], [1.5, 7, [1, 2], True]),
        (np.str_("x"), "x"),
        ((1, None), [1, None]),
        ({"b", "a"}, ["a", "b"]),
        (datetime(2024, 5, 15, 15), "2024-05-15T15:00:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ([Level.HIGH, Colour.RED], [3, "red"]),
        ([2**70, 1e22, -0.0], [2**70, 1e22, -0.0]),
        (b"\0", {"base64": "AA=="}),
        ({7: "a key that is no text"}, {"7": "a key that is no text"}),
    ],
)
def test_extra_takes_what_programs_hold_whatever_stands_beside_it(value, stored, beside):
    found = json.loads(step_row({"extra": {"value": value, "beside": beside}})["extra"])
    assert same(found, {"value": stored, "beside": beside})


def test_json_text_is_readable_unicode():
    assert step_row({"extra": {"größe": "😀", "n": None}})["extra"] == '{"größe":"😀","n":null}'


def test_what_no_field_of_a_call_holds_does_not_take_the_place_of_what_the_caller_calls_so():
    row = step_row({"tool_calls": [{"name": "f", "more": 1}], "extra": {"tool_calls": "mine", "k": 2}})
    assert json.loads(row["extra"]) == {"tool_calls": "mine", "k": 2, "tool_calls_rest": {"0": {"more": 1}}}


def test_times_are_microseconds_whatever_form_they_have():
    assert microseconds("2024-05-15T15:00:00+00:00") == 1715785200000000
    assert microseconds(1715785200) == microseconds("2024-05-15T15:00:00")
    assert microseconds(np.int64(1715785200)) == microseconds(np.float64(1715785200)) == 1715785200000000


def events(count):
    return [Event("step", f"e{number % 3}", 0, number, number, {"message": "x" * number}) for number in range(count)]


def table_of(count):
    import pyarrow as pa

    return pa.Table.from_batches([encode_batch(events(count))])


def test_the_tail_of_a_segment_says_which_episodes_it_holds():
    data = encode_segment(table_of(7))
    descriptor = read_descriptor(data[-400:], "k")
    assert descriptor.events == 7
    assert sorted((part.episode_id, part.events) for part in descriptor.episodes) == [("e0", 3), ("e1", 2), ("e2", 2)]
    assert read_descriptor(data[-30:], "k") is None


@settings(max_examples=300)
@given(st.data())
def test_of_a_segment_with_a_flipped_bit_nothing_is_read_that_was_not_written(data):
    table = table_of(50)
    segment = bytearray(encode_segment(table))
    place = data.draw(st.integers(0, len(segment) * 8 - 1), label="bit")
    segment[place // 8] ^= 1 << place % 8
    try:
        found = decode_segment(bytes(segment), "k")
    except SegmentUnreadable:
        return
    assert found.equals(table)


@pytest.mark.parametrize("cut", [1, 9, 40, 200, 600])
def test_a_segment_that_is_cut_off_or_damaged_is_never_taken_for_whole(cut):
    import pyarrow as pa

    whole = encode_segment(table_of(50))
    stream = whole[: -(len(whole) - whole.rindex(b'{"events"'))]
    assert decode_segment(stream, "k").num_rows == 50
    with pytest.raises(SegmentUnreadable, match=r"^k: "):
        decode_segment(stream[:-cut], "k")
    damaged = bytearray(stream)
    damaged[len(stream) // 2 : len(stream) // 2 + 64] = b"\xff" * 64
    try:
        found = decode_segment(bytes(damaged), "k")
    except SegmentUnreadable:
        return
    assert isinstance(found, pa.Table)  # the damage hit bytes that mean nothing


@pytest.mark.parametrize("junk", [b"", b"x", b"PAR1" * 20, bytes(1000), b"\xff" * 100])
def test_what_is_no_stream_is_refused(junk):
    with pytest.raises(SegmentUnreadable):
        decode_segment(junk, "k")


def test_a_torn_spool_file_gives_its_whole_batches(tmp_path):
    import pyarrow as pa

    from trajlake.ingest.segment import EVENT_SCHEMA, stream_options

    sink = pa.BufferOutputStream()
    stream = pa.ipc.new_stream(sink, EVENT_SCHEMA, options=stream_options())
    ends = []
    for start in range(3):
        stream.write_batch(encode_batch(events(10)[start * 3 : start * 3 + 3]))
        ends.append(sink.tell())
    data = bytes(sink.getvalue())
    assert decode_spool(data, "k").num_rows == 9
    assert decode_spool(data[: ends[1] + 5], "k").num_rows == 6
    assert decode_spool(data[: ends[1]], "k").num_rows == 6
    assert decode_spool(b"", "k").num_rows == 0


@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True), st.integers(0, 10**6 - 1), st.integers(0, 10**8 - 1))
def test_the_name_of_a_segment_can_be_taken_apart(name, epoch, number):
    parsed = SegmentName.parse(SegmentName(name, name, epoch, number).key)
    assert parsed == SegmentName(name, name, epoch, number)


@pytest.mark.parametrize("key", ["landing/x", "landing/r/w/0/1.arrow", "landing/r/w/000000/x.arrow"])
def test_a_key_that_no_writer_made_is_refused(key):
    with pytest.raises(SegmentUnreadable, match="not the name of a segment"):
        SegmentName.parse(key)


@st.composite
def episodes(draw):
    """What may be said of an episode at its begin, in its steps, and at its end."""
    names = st.text(st.characters(codec=None), min_size=1, max_size=8)
    begin = {
        "task_id": draw(st.none() | st.integers(0, 2**63 - 1) | TEXT),
        "policy_version": draw(st.none() | st.integers(-5, 5) | TEXT),
        "seed": draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        "task_family": draw(st.none() | TEXT),
        "tags": draw(st.none() | st.dictionaries(names, TEXT, max_size=2)),
    }
    array = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=2))
    each = draw(st.lists(st.tuples(steps(), st.none() | st.dictionaries(names, array, max_size=2)), max_size=4))
    end = {
        "reward": draw(st.none() | REAL),
        "success": draw(st.none() | st.booleans()),
        "terminated": draw(st.none() | st.booleans()),
        "stop_reason": draw(st.none() | TEXT),
        "rewards": draw(st.none() | st.just([]) | st.lists(st.fixed_dictionaries({"name": names, "value": REAL}))),
    }
    said = [{**step, **({} if tensors is None else {"tensors": tensors})} for step, tensors in each]
    return tuple({key: value for key, value in part.items() if value is not None} for part in (begin, end)), said


@settings(max_examples=5, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
@given(st.lists(episodes(), min_size=1, max_size=3))
def test_any_episode_comes_back_equal_through_writer_and_compaction(given_episodes):
    import tempfile

    import trajlake
    from trajlake_pipelines.compact import compact

    with tempfile.TemporaryDirectory() as folder:
        lake = trajlake.create(f"{folder}/lake")
        with lake.writer("run", "w", spool=f"{folder}/spool") as writer:
            for number, ((begin, end), each) in enumerate(given_episodes):
                with writer.episode(episode_id=f"e{number}", **begin) as episode:
                    for step in each:
                        episode.step(**step)
                    episode.end(**end)
        compact(lake)
        snapshot = lake.snapshot()
        for number, ((begin, end), each) in enumerate(given_episodes):
            found = snapshot.episode(f"e{number}")
            for name, value in {**begin, **end}.items():
                if name == "rewards":
                    assert [one["name"] for one in found.episode[name]] == [one["name"] for one in value]
                    assert same([one["value"] for one in found.episode[name]], [one["value"] for one in value])
                else:
                    assert same(value, found.episode[name]), name
            assert len(found.steps) == len(each)
            for index, step in enumerate(each):
                for name, value in step.items():
                    if name == "tensors":
                        for key, array in value.items():
                            stored = found.tensor(index, key)
                            assert (stored.dtype, stored.shape) == (array.dtype.newbyteorder("<"), array.shape)
                            assert stored.tobytes() == array.astype(stored.dtype).tobytes()
                    elif name not in {"tool_calls", "tool_results"}:  # as in the test of steps above
                        assert same(value, found.steps[index][name]), name


def test_a_step_of_the_first_writers_that_begins_anew_follows_no_step():
    row = {"parent_step": None, "extra": '{"begins_anew":true}'}
    assert restored(row)["parent_step"] == -1
    assert restored({"parent_step": None, "extra": None})["parent_step"] is None
