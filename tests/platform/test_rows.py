"""Content hashes see what was done and seen and nothing else; audits see lengths that differ; places lead to rows."""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajlake.ingest.values import step_row
from trajlake.read import steps_reader, stitch
from trajlake.read.steps_reader import StepsReader
from trajlake.storage import LocalStore
from trajlake.table import layout
from trajlake.table import rows as rows_module
from trajlake.table.layout import encode_steps, schema_of
from trajlake.table.rewrite import places_in
from trajlake.table.rows import content_hashes, token_audits
from trajlake_schemas import STEPS

pytestmark = pytest.mark.unit


def table(*episodes):
    """Steps of episodes, each a list of what is given to `step()`."""
    rows = []
    for number, steps in enumerate(episodes):
        for index, given_step in enumerate(steps):
            row = {"source": "agent", **step_row(given_step)}
            row = {name: list(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
            rows.append({"episode_id": f"e{number}", "step_index": index, **row})
    return pa.Table.from_pylist(rows, schema=STEPS.arrow), [len(steps) for steps in episodes]


CALL = {"id": "1", "name": "f", "arguments": "{}"}
DIFFERENT = [
    [{"message": "a"}],
    [{"message": "b"}],
    [{"message": ""}],
    [{}],
    [{"message": "a"}, {}],
    [{}, {"message": "a"}],
    [{"reasoning": "a"}],
    [{"source": "user", "message": "a"}],
    [{"tool_calls": []}],
    [{"tool_calls": [CALL]}],
    [{"tool_calls": [CALL, CALL]}],
    [{"tool_calls": [{**CALL, "name": "g"}]}],
    [{"tool_results": [{"call_id": "1", "content": "a"}]}],
    [{"tool_results": [{"call_id": "1", "content": "a", "is_error": True}]}],
    [{"message": "ab"}, {"message": "c"}],
    [{"message": "a"}, {"message": "bc"}],
    [{"tensors": {"x": np.zeros(3)}}],
    [{"tensors": {"x": np.zeros((3, 1))}}],
    [{"tensors": {"x": np.zeros(3, np.float32)}}],
    [{"tensors": {"y": np.zeros(3)}}],
    [],
]


def test_different_content_has_different_hashes_and_the_same_the_same_wherever_it_stands():
    steps, lengths = table(*DIFFERENT, *reversed(DIFFERENT))
    hashes = content_hashes(steps, lengths)
    assert len(set(hashes)) == len(DIFFERENT)
    assert hashes == hashes[::-1]
    alone = [content_hashes(*table(steps))[0] for steps in DIFFERENT]
    assert alone == hashes[: len(DIFFERENT)]


def test_an_episode_too_large_to_be_hashed_at_once_has_one_hash_however_it_is_cut(monkeypatch):
    words = [{"message": f"{number} " * 50} for number in range(30)]
    steps, lengths = table(words[:1], words, words, words[::-1])
    at_once = content_hashes(steps, lengths)
    monkeypatch.setattr(rows_module, "_HASHED_AT_ONCE", 1_000)
    first, *large = content_hashes(steps, lengths)
    assert first == at_once[0]  # one that fits keeps its hash
    assert large[0] == large[1] != large[2]
    in_chunks = pa.concat_tables([steps.slice(start, 7) for start in range(0, len(steps), 7)])
    assert content_hashes(in_chunks, lengths) == [first, *large]


def test_ids_times_rewards_and_costs_are_no_content():
    one, lengths = table([{"message": "a", "tool_calls": [CALL], "reward": 1.0, "cost_usd": 1.0, "timestamp": 5}])
    other, _ = table([{"message": "a", "tool_calls": [{**CALL, "id": "2"}], "latency_ms": 3.0}])
    assert content_hashes(one, lengths) == content_hashes(other, lengths)


def test_token_lists_that_differ_in_length_are_named_by_step():
    steps, lengths = table(
        [{"token_ids": [1, 2], "logprobs": [0.0, 0.0], "loss_mask": [1, 0]}],
        [{}, {"token_ids": [1, 2], "logprobs": [0.0]}],
        [{"logprobs": [0.0]}],
        [{"token_ids": [1]}],
    )
    assert token_audits(steps, lengths) == [
        None, "step 1: 2 token_ids, 1 logprobs", "step 0: 0 token_ids, 1 logprobs", None
    ]  # fmt: skip


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(0, 20_000), st.booleans())
def test_every_episode_is_read_back_from_its_place(tmp_path_factory, lengths, size, with_tokens):
    rng = np.random.default_rng(size)
    episodes = [
        [
            {
                "message": rng.bytes(size // 20).hex(),
                "token_ids": rng.integers(0, 9, 5) if with_tokens else None,
                "tool_calls": [CALL] if step % 3 == 0 else None,
            }
            for step in range(length)
        ]
        for length in lengths
    ]
    steps, lengths = table(*episodes)
    data, places = encode_steps([(steps, lengths)], schema_of([(steps, lengths)]))
    found = read_back(tmp_path_factory.mktemp("store"), data, places)
    assert pa.concat_tables(found).equals(steps)
    assert [len(each) for each in found] == lengths


def read_back(folder, data, places):
    """The steps at these places of a file."""
    (folder / "steps").mkdir()
    (folder / "steps" / "x.parquet").write_bytes(data)
    where = pl.DataFrame(
        [{"steps_path": "x.parquet", **vars(place)} for place in places],
        schema={"steps_path": pl.String, "row_group": pl.Int32, "row_offset": pl.Int32, "row_count": pl.Int32},
    )
    reader = StepsReader(LocalStore(folder))
    assert pl.concat(reader.batches(where, 2)).equals(where)
    return reader.read(where)


def test_an_episode_too_large_for_a_row_group_has_several_and_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ROW_GROUP_ARROW_BYTES", 5_000)
    monkeypatch.setattr(layout, "LARGEST_GROUP", 10_000)
    monkeypatch.setattr(stitch, "_MOST_DECODED", 15_000)
    monkeypatch.setattr(steps_reader, "_BATCH_BYTES", 20_000)
    rng = np.random.default_rng(0)
    sizes = [[20], [3_000] * 9, [], [25_000, 10], [5] * 40]
    steps, lengths = table(
        *([{"tensors": {"x": rng.integers(0, 256, size, np.uint8)}} for size in episode] for episode in sizes)
    )
    data, places = encode_steps([(steps, lengths)], schema_of([(steps, lengths)]))
    assert len({place.row_group for place in places}) == 4
    found = read_back(tmp_path, data, places)
    assert pa.concat_tables(found).equals(steps)
    assert [len(each) for each in found] == [length for length in lengths if length]
    there = places_in(LocalStore(tmp_path), ["x.parquet"])
    assert [place for _, place in there.values()] == places
