"""Batches as Arrow, numpy, tokens and datasets; reading ahead; readers in processes of their own."""

import json
import pickle
import shutil
import sys
import threading
import types
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import pytest
from tests.rollouts import record

import trajlake
from trajlake.adapters.opening import Opening
from trajlake.adapters.tokens import packed, padded, tokens_of
from trajlake.errors import StoreError, UsageError
from trajlake.read.items import Window
from trajlake.storage.wrappers import CountingStore
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    lake = trajlake.create(folder / "lake")
    with lake.writer(run="run", worker="w", spool=folder / "spool") as writer:
        for number in range(10):
            with writer.episode(episode_id=f"e{number}", group_id=f"g{number // 5}", task_id=number) as episode:
                episode.step(source="user", message="hi", token_ids=[1, 2])
                episode.step(source="agent", token_ids=[10 + number] * (number + 1), logprobs=[-0.5] * (number + 1))
                episode.step(source="tool", token_ids=[7], loss_mask=[0])
                episode.step(source="agent", token_ids=[8, 9], loss_mask=[1, 0], is_copied_context=number == 3)
                episode.end(reward=float(number % 2), success=number % 2 == 1)
        for number in range(3):
            with writer.episode(episode_id=f"r{number}", env_name="toy") as episode:
                for step in range(4 + number):
                    episode.step(
                        observation=np.array([number, step], np.float32),
                        action=np.int64(step),
                        reward=float(step),
                        terminated=step == 3 + number,
                    )
                episode.end(reward=1.0)
        with writer.episode(episode_id="uneven") as episode:
            episode.step(source="agent", token_ids=[1, 2], logprobs=[0.0])
            episode.end()
    compact(lake)
    return lake


def batch_of(lake, where, count=10, **choices):
    return lake.snapshot().sampler("fifo", where=where, order="episode_id", **choices).batch(count)


# -- numpy and Arrow -----------------------------------------------------------------------------------------------


def test_arrays_have_the_shape_of_the_batch_and_say_what_is_padding(lake):
    batch = batch_of(lake, "env_name = 'toy'", 3)
    assert batch.array("observation").shape == (3, 6, 2)
    assert batch.array("observation").dtype == np.float32
    assert batch.array("action").tolist()[0] == [0, 1, 2, 3, 0, 0]
    assert batch.array("reward")[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.valid.sum(axis=1).tolist() == batch.lengths.tolist() == [4, 5, 6]
    assert batch.is_first.nonzero()[1].tolist() == [0, 0, 0]
    assert batch.is_last.nonzero()[1].tolist() == [3, 4, 5]
    assert (batch.is_terminal == batch.is_last).all()
    for wrong in ("nothing", "message"):
        with pytest.raises(UsageError):
            batch.array(wrong)


def test_nulls_are_nan_in_arrays_of_numbers_and_false_in_those_of_booleans(lake):
    batch = batch_of(lake, "env_name = 'toy' OR episode_id = 'e0'", 4)
    ended = batch.array("terminated")
    assert ended.dtype == bool  # e0 does not say whether it ended
    assert (ended == batch.is_terminal).all()
    assert batch.array("truncated").dtype == bool
    rewards = batch.array("reward")
    assert np.isnan(rewards[0, :4]).all()
    assert (rewards[~batch.valid] == 0).all()
    assert batch_of(lake, "env_name = 'toy'", 0).array("terminated").dtype == bool


def test_windows_are_slices_with_the_flags_of_their_episode(lake):
    window = Window(3, 2, drop_remainder=False, pad=True)
    batch = batch_of(lake, "episode_id = 'r0'", 2, window=window)
    assert [(sample.start, sample.stop) for sample in batch.samples] == [(0, 3), (2, 4)]
    assert batch.array("action").tolist() == [[0, 1, 2], [2, 3, 0]]
    assert batch.is_first.tolist() == [[True, False, False], [False] * 3]
    assert batch.is_last.tolist() == [[False] * 3, [False, True, False]]
    assert [len(trajectory.steps) for trajectory in batch] == [3, 2]
    assert batch[1].steps[0]["step_index"] == 2


def test_views_of_a_batch_are_no_copies(lake):
    batch = batch_of(lake, "env_name = 'toy'", 3)
    views = batch.views("reward")
    assert [view.tolist() for view in views] == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    for view, table in zip(views, batch.tables, strict=True):
        buffer = table["reward"].chunk(0).buffers()[1]
        assert buffer.address <= view.__array_interface__["data"][0] < buffer.address + buffer.size
    whole = batch.steps
    assert whole["reward"].num_chunks == 3  # put together without a copy
    with pytest.raises(UsageError, match="without a copy"):
        batch.views("terminated")


# -- tokens --------------------------------------------------------------------------------------------------------


def test_tokens_with_their_masks_logprobs_and_advantages(lake):
    batch = batch_of(lake, "group_id IS NOT NULL", 10, normalize_reward="group_id")
    tokens = tokens_of(batch)
    assert tokens[1].token_ids.tolist() == [1, 2, 11, 11, 7, 8, 9]
    assert tokens[1].loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 0]
    assert tokens[3].loss_mask.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0]  # what was copied is not trained on
    assert np.isnan(tokens[1].logprobs).tolist() == [True, True, False, False, True, True, True]
    assert tokens[1].advantage == pytest.approx(0.6 / (np.std([0, 1, 0, 1, 0], ddof=1) + 1e-6))
    rectangle = padded(tokens, multiple_of=8, pad_id=-1)
    assert rectangle["input_ids"].shape == (10, 16)
    assert rectangle["input_ids"][0].tolist() == [1, 2, 10, 7, 8, 9, *[-1] * 10]
    assert rectangle["attention_mask"].sum(axis=1).tolist() == [len(each) for each in tokens]
    assert (rectangle["advantages"][rectangle["loss_mask"] == 0] == 0).all()
    assert rectangle["advantages"][1, 2] == np.float32(tokens[1].advantage)
    assert padded(tokens, max_tokens=4)["input_ids"].shape == (10, 4)


def test_packing_keeps_to_the_budget_and_loses_no_token(lake):
    tokens = tokens_of(batch_of(lake, "group_id IS NOT NULL", 10))
    rows = list(packed(tokens, token_budget=20))
    assert all(row["input_ids"].shape == (20,) for row in rows)
    assert sum(int(row["attention_mask"].sum()) for row in rows) == sum(map(len, tokens))
    assert len(rows) < len(tokens)
    for row in rows:
        ends = row["cu_seqlens"]
        assert (np.diff(ends) > 0).all()
        for number, (start, end) in enumerate(pairwise(ends)):
            assert row["position_ids"][start:end].tolist() == list(range(end - start))
            assert set(row["sequence_ids"][start:end].tolist()) == {number}
            assert any(row["input_ids"][start:end].tolist() == each.token_ids.tolist() for each in tokens)
        assert (row["sequence_ids"][ends[-1] :] == -1).all()
    assert max(int(row["cu_seqlens"][-1]) for row in packed(tokens, token_budget=3, pad=False)) == 3


def test_episodes_that_cannot_be_batches_of_tokens_are_refused_by_name(lake):
    with pytest.raises(UsageError, match="episode uneven: 2 token_ids beside 1 logprobs.*token_audit IS NULL"):
        tokens_of(batch_of(lake, "episode_id = 'uneven'", 1))
    with pytest.raises(UsageError, match="episode r0 has no token_ids"):
        padded(tokens_of(batch_of(lake, "episode_id = 'r0'", 1)))
    with pytest.raises(UsageError, match="no episode"):
        padded([])


# -- reading ahead -------------------------------------------------------------------------------------------------


def test_batches_are_read_ahead_within_bounds_and_resumed_where_the_caller_was(lake):
    sampler = lake.snapshot().sampler("epochs", epochs=3, seed=1)
    expected = [sample.episode_id for sample in lake.snapshot().sampler("epochs", epochs=3, seed=1)]
    with sampler.batches(4, prefetch=2) as batches:
        seen = [sample.episode_id for _ in range(3) for sample in next(batches).samples]
        threading.Event().wait(0.3)
        assert sampler.position <= 12 + 3 * 4  # two are ready, one is in hand
        state = json.loads(json.dumps(batches.state_dict()))
    again = lake.snapshot().sampler("epochs", epochs=3, seed=1)
    again.load_state_dict(state)
    seen += [sample.episode_id for batch in again.batches(4) for sample in batch.samples]
    assert seen == expected
    assert len(list(lake.snapshot().sampler("epochs", epochs=1).batches(4, drop_last=True))) == 14 // 4
    with pytest.raises(UsageError, match="cannot be read ahead"):
        lake.snapshot().sampler("prioritized").batches(4, prefetch=1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_a_reader_reaches_the_caller(lake, prefetch):
    class Failing(CountingStore):
        def get_ranges(self, key, ranges):
            if self.calls["get_ranges"] > 0:  # the footer is read, the rows are not
                raise StoreError("the disk is on fire")
            return super().get_ranges(key, ranges)

    sampler = trajlake.Lake(Failing(lake.store)).snapshot().sampler(seed=1)
    with sampler.batches(2, prefetch=prefetch) as batches, pytest.raises(StoreError, match="on fire"):
        for _ in range(20):
            next(batches)


# -- readers in other processes ------------------------------------------------------------------------------------


def part(opening, rank, world_size):
    return [sample.episode_id for batch in opening.open(rank, world_size).batches(3) for sample in batch.samples]


def test_processes_get_disjoint_parts_of_one_sequence(lake):
    opening = Opening.of(lake.snapshot().sampler("epochs", epochs=1, seed=5))
    opening = pickle.loads(pickle.dumps(opening))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(part, [opening] * 3, range(3), [3] * 3))
    assert [len(each) for each in parts] == [5, 5, 4]
    assert len(set().union(*parts)) == 14
    with pytest.raises(UsageError, match="samplers of a snapshot"):
        Opening.of(lake.sampler("fifo", live=True))


@pytest.fixture
def huggingface(tmp_path, monkeypatch):
    """`datasets` that keeps its files to this test, and asks no server."""
    module = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    module.disable_progress_bars()
    return module


def test_a_stream_of_huggingface_datasets_gives_the_same_episodes(lake, huggingface):
    from trajlake.adapters.datasets import to_iterable

    dataset = to_iterable(lake.snapshot().sampler("epochs", epochs=1, seed=5), shards=3)
    assert dataset.n_shards == 3
    rows = list(dataset)
    whole = part(Opening.of(lake.snapshot().sampler("epochs", epochs=1, seed=5)), 0, 1)
    assert [row["episode_id"] for row in rows] == whole[0::3] + whole[1::3] + whole[2::3]
    assert rows[0].keys() == dataset.features.keys()
    assert [row["episode_id"] for row in dataset.take(2)] == [row["episode_id"] for row in rows[:2]]
    counted = dataset.map(lambda row: {"n": len(row["messages"])})
    assert {row["episode_id"]: row["n"] for row in counted}["e3"] == 4


@pytest.mark.parametrize("strategy", ["epochs", "prioritized", "group"])
def test_huggingface_datasets_have_what_the_reader_would_draw_from_where_it_is(lake, huggingface, strategy):
    from trajlake.adapters.datasets import to_dataset, to_iterable

    choices = {"seed": 5, "where": "group_id IS NOT NULL"}
    choices |= {"max_times_sampled": 2} if strategy == "prioritized" else {"epochs": 2}

    def names(rows):
        return [row["episode_id"] for row in rows]

    for rank in range(3):
        sampler = lake.snapshot().sampler(strategy, **choices, rank=rank, world_size=3)
        for draws in (0, 1, 2):
            if (drawn := sampler.take(draws)[-1:]) and strategy == "prioritized":
                sampler.update_priorities(drawn, [7.0])
            state = sampler.state_dict()
            if sampler.left <= rank:
                break
            table = names(to_dataset(sampler))
            streamed, parts = names(to_iterable(sampler)), names(to_iterable(sampler, shards=2))
            assert sampler.state_dict() == state
            expected = [sample.episode_id for sample in sampler.take(100)]
            assert table == streamed == expected != []
            assert sorted(parts) == sorted(expected)
            sampler.load_state_dict(state)
        sampler.take(100)
        assert names(to_iterable(sampler, shards=2)) == []
        with pytest.raises(UsageError, match="nothing is left for this reader to draw"):
            to_dataset(sampler)


def test_a_table_of_what_never_ends_is_refused(lake, huggingface):
    from trajlake.adapters.datasets import to_dataset

    with pytest.raises(UsageError, match="uniform never ends, and a table must"):
        to_dataset(lake.snapshot().sampler("uniform"))
    assert len(to_dataset(lake.snapshot().sampler("uniform", max_times_sampled=1))) > 0


@pytest.mark.parametrize("shards", [0, -1])
def test_huggingface_datasets_of_no_shards_are_refused(lake, huggingface, shards):
    from trajlake.adapters.datasets import to_dataset, to_iterable

    sampler = lake.snapshot().sampler("epochs", epochs=1)
    with pytest.raises(UsageError, match="must be at least 1"):
        to_iterable(sampler, shards=shards)
    with pytest.raises(UsageError, match="must be at least 1"):
        to_dataset(sampler, batch_size=shards)


def test_a_table_of_huggingface_datasets_has_chat_messages_as_structs(tmp_path, huggingface):
    from trajlake.adapters.datasets import to_dataset

    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer, writer.episode(episode_id="e", task_id=7) as episode:
        episode.step(source="user", content_parts=[{"type": "text", "text": "look"}, {"type": "image_url"}])
        calls = [{"id": "c", "name": "look", "arguments": {"x": 1}}, {"id": "d", "name": "go", "arguments": "{}"}]
        episode.step(source="agent", message="\ud800!", reasoning="why", tool_calls=calls)
        episode.step(source="tool", tool_results=[{"call_id": "c", "content": "seen"}])
        episode.step(source="agent", message="done")
        episode.end(reward=1.0, success=True)
    compact(lake)
    dataset = to_dataset(lake.snapshot().sampler("epochs", epochs=1))
    (row,) = dataset
    assert {name: row[name] for name in ("episode_id", "task_id", "reward", "success", "weight")} == {
        "episode_id": "e", "task_id": "7", "reward": 1.0, "success": True, "weight": 1.0,
    }  # fmt: skip
    nothing = dict.fromkeys(("role", "content", "reasoning_content", "tool_call_id", "tool_calls"))
    assert row["messages"] == [
        {**nothing, "role": "user", "content": "look"},
        {
            **nothing,
            "role": "assistant",
            "content": "\ufffd!",
            "reasoning_content": "why",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}},
                {"id": "d", "type": "function", "function": {"name": "go", "arguments": "{}"}},
            ],
        },
        {**nothing, "role": "tool", "content": "seen", "tool_call_id": "c"},
        {**nothing, "role": "assistant", "content": "done"},
    ]
    assert dataset.filter(lambda row: row["messages"][-1]["content"] == "done").num_rows == 1
    assert to_dataset(lake.snapshot().sampler("epochs", epochs=1)).cache_files == dataset.cache_files


def made_anew(folder, message):
    shutil.rmtree(folder, ignore_errors=True)
    lake = trajlake.create(folder)
    with lake.writer(run="run", worker="w") as writer, writer.episode(episode_id="e") as episode:
        episode.step(source="user", message=message)
        episode.end(reward=1.0)
    compact(lake)
    return lake


def test_a_lake_that_was_made_anew_at_the_same_place_is_another_one(tmp_path, huggingface):
    from trajlake.adapters.datasets import to_dataset

    found = []
    for message in ("old", "new"):
        lake = made_anew(tmp_path / "lake", message)
        found.append(to_dataset(lake.snapshot().sampler("epochs", epochs=1)))
    assert [dataset[0]["messages"][0]["content"] for dataset in found] == ["old", "new"]


@pytest.mark.parametrize("live", [False, True])
def test_a_state_of_a_lake_that_is_no_more_is_refused(tmp_path, live):
    before = made_anew(tmp_path / "lake", "old").sampler("fifo", live=live)
    before.take(1)
    state = json.loads(json.dumps(before.state_dict()))
    opening = None if live else Opening.of(before)
    after = made_anew(tmp_path / "lake", "new").sampler("fifo", live=live)
    with pytest.raises(UsageError, match="its lake_id is"):
        after.load_state_dict(state)
    if opening is not None:
        assert opening.token == after.snapshot.token
        with pytest.raises(UsageError, match="made anew"):
            opening.open(0, 1)
    state.pop("lake_id")  # as states were before
    after.load_state_dict(state)
    assert len(after.take(1)) == 0 if not live else after.samples == 1


def test_a_batch_that_was_pickled_needs_its_snapshot_no_more(lake):
    batch = lake.snapshot().sampler("fifo", window=Window(3, 2, False, True), where="env_name = 'toy'").batch(5)
    again = pickle.loads(pickle.dumps(batch))
    assert again.samples == batch.samples
    assert again.steps.equals(batch.steps)
    assert list(again) == list(batch)
    assert again[1:3] == batch[1:3]
    assert (again.array("observation") == batch.array("observation")).all()
    assert again.is_last.tolist() == batch.is_last.tolist()
    assert len(pickle.dumps(batch)) < 30_000  # and not all that was decoded beside it


def test_a_forked_process_is_told_that_it_cannot_read(lake):
    opening = Opening.of(lake.snapshot().sampler("epochs", epochs=1))
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool, pytest.raises(UsageError, match="forkserver"):
        pool.submit(part, opening, 0, 1).result(timeout=100)


def test_the_readers_of_all_ranks_and_workers_share_one_sequence(monkeypatch, lake):
    """Against the little of PyTorch that the dataset uses, so that it is tested without, too."""
    worker = types.SimpleNamespace(id=0, num_workers=2)
    data = types.ModuleType("torch.utils.data")
    data.IterableDataset = object
    data.get_worker_info = lambda: worker
    for name, module in (("torch", types.ModuleType("torch")), ("torch.utils", types.ModuleType("torch.utils"))):
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["torch"].from_numpy = lambda array: array
    monkeypatch.setitem(sys.modules, "torch.utils.data", data)
    monkeypatch.delitem(sys.modules, "trajlake.adapters.torch", raising=False)
    from trajlake.adapters.torch import TrajectoryDataset, pack, pad

    sampler = lake.snapshot().sampler("epochs", epochs=1, where="group_id IS NOT NULL", seed=5)
    parts = []
    for rank in range(2):
        for worker.id in range(2):
            dataset = TrajectoryDataset(sampler, batch_size=2, rank=rank, world_size=2)
            parts.append([each.episode_id for batch in dataset for each in batch.samples])
    assert sorted(map(len, parts)) == [2, 2, 3, 3]
    assert sorted(name for part in parts for name in part) == [f"e{number}" for number in range(10)]
    ranked = lake.snapshot().sampler("epochs", epochs=1, rank=1, world_size=2)
    TrajectoryDataset(ranked, batch_size=2, rank=1, world_size=2)
    with pytest.raises(UsageError, match="reader 1 of 2: give rank and world_size to the dataset"):
        TrajectoryDataset(ranked, batch_size=2)
    worker.id, worker.num_workers = 0, 1
    rows = list(TrajectoryDataset(sampler, batch_size=4, collate=pad(max_tokens=8)))
    assert [row["input_ids"].shape for row in rows] == [(4, 8), (4, 8), (2, 8)]
    assert (rows[0]["weights"] == rows[0]["loss_mask"]).all()
    (packs,) = TrajectoryDataset(sampler, batch_size=10, collate=pack(token_budget=32))
    assert all(row["input_ids"].shape == (32,) for row in packs)
    whole = list(TrajectoryDataset(sampler, batch_size=3))
    first = TrajectoryDataset(sampler, batch_size=3)
    iterator = iter(first)
    next(iterator)
    resumed = TrajectoryDataset(sampler, batch_size=3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [batch.samples for batch in resumed] == [batch.samples for batch in whole[1:]]
    assert [batch.samples for batch in resumed] == [batch.samples for batch in whole]  # the next iteration is whole
    iterator.close()
    monkeypatch.delitem(sys.modules, "trajlake.adapters.torch", raising=False)


def test_what_is_not_installed_is_told_with_the_command_that_installs_it(monkeypatch, lake):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.utils.data", None)
    monkeypatch.delitem(sys.modules, "trajlake.adapters.torch", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'trajlake\[torch\]'"):
        import trajlake.adapters.torch  # noqa: F401
    monkeypatch.setitem(sys.modules, "datasets", None)
    from trajlake.adapters.datasets import to_iterable

    with pytest.raises(UsageError, match=r"pip install 'trajlake\[datasets\]'"):
        to_iterable(lake.snapshot().sampler())


def test_a_resent_episode_is_read_whole(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, [1])
    compact(lake)
    assert [len(table) for table in lake.snapshot().sampler().batch(2).tables] == [3, 3]
