"""With PyTorch itself: loaders with workers, several ranks, resuming, tensors in and out. `make test-torch` runs it."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-torch`")

from tests.platform.torch_loading import Failing, by_worker, loader, names, refuse, sampler  # noqa: E402

import trajlake  # noqa: E402
from trajlake.adapters.torch import TrajectoryDataset, pack, pad, to_tensor  # noqa: E402
from trajlake.errors import StoreError, UsageError  # noqa: E402
from trajlake_pipelines.compact import compact  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.beam,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than this machine has cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it
]

EPISODES = 23


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch")
    lake = trajlake.create(folder / "lake")
    with lake.writer(run="run", worker="w", spool=folder / "spool") as writer:
        for number in range(EPISODES):
            with writer.episode(episode_id=f"e{number:02d}", group_id=f"g{number // 4}") as episode:
                episode.step(source="user", token_ids=[1, 2])
                ids = torch.full((number % 6 + 1,), 10 + number)
                episode.step(source="agent", token_ids=ids, logprobs=torch.full(ids.shape, -0.5))
                episode.end(reward=float(number % 2), success=number % 2 == 1)
    compact(lake)
    return lake


def assert_workers_end():
    """They do when the loader's iterator is gone, which an error's traceback may keep for a while."""
    for _ in range(300):
        gc.collect()
        if not multiprocessing.active_children():
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {multiprocessing.active_children()}")


# -- workers and ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "spawn"), (3, "forkserver")])
def test_workers_share_the_sequence_of_a_single_reader(lake, workers, method):
    whole = [sample.episode_id for sample in sampler(lake)]
    dataset = TrajectoryDataset(sampler(lake), batch_size=3, collate=by_worker)
    loading = loader(dataset, workers, method, persistent_workers=workers > 0)
    for _ in range(2):  # the second time by the same workers, where they persist
        parts = [[] for _ in range(max(1, workers))]
        for worker, batch in loading:
            parts[worker] += batch
        for rank, part in enumerate(parts):
            assert part == whole[rank :: len(parts)]
    assert len(set(whole)) == EPISODES


def test_a_forked_worker_says_what_to_do_instead_of_waiting_for_ever(lake):
    dataset = TrajectoryDataset(sampler(lake), batch_size=3, collate=names)
    with pytest.raises(UsageError, match="multiprocessing_context='forkserver'"):
        list(loader(dataset, 2, "fork"))
    assert_workers_end()


def test_a_batch_comes_whole_from_a_worker(lake):
    (one,) = loader(TrajectoryDataset(sampler(lake), batch_size=EPISODES))
    (other,) = loader(TrajectoryDataset(sampler(lake), batch_size=EPISODES), 1)
    assert other.samples == one.samples
    assert list(other) == list(one)
    assert other.steps.equals(one.steps)
    assert (other.valid == one.valid).all()
    assert other.is_last.tolist() == one.is_last.tolist()


RANK = """
    import json, sys
    import torch.distributed as distributed
    import trajlake
    from tests.platform.torch_loading import loader, names, sampler
    from trajlake.adapters.torch import TrajectoryDataset

    if __name__ == "__main__":
        address, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
        dataset = TrajectoryDataset(
            sampler(trajlake.connect(address)),
            batch_size=3,
            rank=distributed.get_rank(),
            world_size=distributed.get_world_size(),
            collate=names,
        )
        mine = [name for batch in loader(dataset, 2) for name in batch]
        parts = [None, None]
        distributed.all_gather_object(parts, mine)
        distributed.destroy_process_group()
        print(json.dumps(parts))
"""


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, "-W", "ignore", str(path)], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_ranks_and_their_workers_have_disjoint_parts(lake, tmp_path):
    command, environment = script(tmp_path, RANK)
    ranks = [
        subprocess.Popen([*command, lake.uri, str(tmp_path / "meeting"), str(rank)], stdout=subprocess.PIPE,
                         env=environment, text=True)
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == outputs[1]
    parts = json.loads(outputs[0].splitlines()[-1])
    assert [len(part) for part in parts] == [12, 11]
    assert sorted(parts[0] + parts[1]) == sorted(sample.episode_id for sample in sampler(lake))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes_in_the_middle_of_an_epoch(lake, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def loading():
        dataset = TrajectoryDataset(sampler(lake), batch_size=2, collate=names)
        context = {"multiprocessing_context": "forkserver", "timeout": 200} if workers else {}
        return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **context)

    whole = list(loading())
    first = loading()
    batches = iter(first)
    seen = [next(batches) for _ in range(5)]
    state = json.loads(json.dumps(first.state_dict()))
    del batches
    second = loading()
    second.load_state_dict(state)
    assert seen + list(second) == whole
    assert list(second) == whole  # the next epoch is a whole one


def test_a_dataset_resumes_without_workers(lake):
    first = TrajectoryDataset(sampler(lake, epochs=2), batch_size=5, collate=names)
    assert first.state_dict() == {"sampler": None}
    batches = iter(first)
    seen = [next(batches) for _ in range(7)]
    second = TrajectoryDataset(sampler(lake, epochs=2), batch_size=5, collate=names)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    drawn = [name for batch in [*seen, *second] for name in batch]
    assert drawn == [sample.episode_id for sample in sampler(lake, epochs=2)]


# -- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_worker_reaches_the_caller_and_nobody_waits(lake, workers):
    broken = trajlake.Lake(Failing(lake.store))
    with pytest.raises(StoreError, match="the disk is on fire"):
        list(loader(TrajectoryDataset(sampler(broken), batch_size=2), workers))
    with pytest.raises(ValueError, match="no room for 2 episodes"):
        list(loader(TrajectoryDataset(sampler(lake), batch_size=2, collate=refuse), workers))
    assert_workers_end()


ENDLESS = """
    import os, sys
    import trajlake
    from tests.platform.torch_loading import loader, names, sampler
    from trajlake.adapters.torch import TrajectoryDataset

    if __name__ == "__main__":
        dataset = TrajectoryDataset(sampler(trajlake.connect(sys.argv[1]), epochs=None), 3, collate=names)
        for number, batch in enumerate(loader(dataset, 2, sys.argv[2])):
            if number == 20:
                print("going", flush=True)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_control_c_ends_the_trainer_and_its_workers(lake, tmp_path, method):
    command, environment = script(tmp_path, ENDLESS)
    trainer = subprocess.Popen([*command, lake.uri, method], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment, start_new_session=True)  # fmt: skip
    assert trainer.stdout.readline() == "going\n"
    os.killpg(trainer.pid, signal.SIGINT)  # as a terminal does
    trainer.communicate(timeout=60)
    assert trainer.returncode in (1, -signal.SIGINT)
    for _ in range(600):
        try:
            os.killpg(trainer.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(trainer.pid, signal.SIGKILL)
    pytest.fail("workers go on without their trainer")


# -- tensors out ---------------------------------------------------------------------------------------------------


def test_padded_batches_are_tensors_of_the_usual_types(lake):
    dataset = TrajectoryDataset(sampler(lake), batch_size=4, collate=pad(multiple_of=8, pad_id=-1))
    for batch in loader(dataset, 1):
        assert {name: tensor.dtype for name, tensor in batch.items()} == {
            "input_ids": torch.int64, "attention_mask": torch.int64, "loss_mask": torch.int64,
            "logprobs": torch.float32, "advantages": torch.float32, "weights": torch.float32,
        }  # fmt: skip
        assert len({tensor.shape for tensor in batch.values()}) == 1
        assert batch["input_ids"].shape[1] == 8
        assert ((batch["input_ids"] == -1) == (batch["attention_mask"] == 0)).all()
        assert (batch["logprobs"][batch["loss_mask"] == 1] == -0.5).all()
        assert (batch["weights"] == batch["loss_mask"]).all()


@pytest.mark.parametrize("padding", [True, False])
def test_packed_rows_keep_to_the_budget_and_never_cross_an_episode(lake, padding):
    dataset = TrajectoryDataset(sampler(lake), batch_size=EPISODES, collate=pack(token_budget=16, pad=padding))
    (rows,) = loader(dataset)
    order = [sample.episode_id for sample in sampler(lake)]
    seen = []
    for row in rows:
        assert len(row["input_ids"]) == 16 if padding else row["cu_seqlens"][-1]
        assert row["cu_seqlens"].dtype == torch.int32
        for number, (start, end) in enumerate(pairwise(row["cu_seqlens"].tolist())):
            name = order[row["samples"][number]]
            seen.append(name)
            expected = [1, 2, *[10 + int(name[1:])] * (int(name[1:]) % 6 + 1)]
            assert row["input_ids"][start:end].tolist() == expected
            assert row["position_ids"][start:end].tolist() == list(range(len(expected)))
            assert (row["sequence_ids"][start:end] == number).all()
    assert sorted(seen) == sorted(order)


# -- tensors in ----------------------------------------------------------------------------------------------------


def recorded(tmp_path, steps):
    """These steps, as they are read back."""
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer, writer.episode(episode_id="e") as episode:
        for step in steps:
            episode.step(**step)
    compact(lake)
    return lake.snapshot()


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


def test_tensors_come_back_with_their_dtype_and_shape(tmp_path):
    torch.manual_seed(1)
    base = torch.randn(4, 6) * 3
    tensors = {name: base.to(getattr(torch, name)) for name in DTYPES + NARROW}
    tensors |= {
        "scalar": torch.tensor(3, dtype=torch.int32),
        "narrow scalar": torch.tensor(0.1, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "grad": torch.randn(3, requires_grad=True),
        "graph": torch.randn(3, requires_grad=True) * 2,
        "transposed": base.T,
        "every second": base[:, ::2],
        "narrow transposed": base.to(torch.bfloat16).T,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
    }
    given = {name: tensor.detach().clone().resolve_conj() for name, tensor in tensors.items()}
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer, writer.episode(episode_id="e") as episode:
        episode.step(observation=tensors["bfloat16"], action=tensors["scalar"], tensors=tensors)
        with torch.no_grad():
            for tensor in tensors.values():  # a rollout reuses its buffers: what was recorded does not change
                if tensor.is_contiguous() and tensor.numel():
                    tensor.zero_()
    compact(lake)
    trajectory = lake.snapshot().episode("e")
    for name, tensor in given.items():
        found = to_tensor(trajectory.tensor(0, name))
        assert found.dtype == tensor.dtype, name
        assert found.shape == tensor.shape, name
        assert bytes(found.reshape(-1).view(torch.uint8).numpy().tobytes()) == bytes(
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ), name
    batch = lake.snapshot().sampler("fifo").batch(1)
    assert to_tensor(batch.array("observation")).dtype == torch.bfloat16
    assert to_tensor(batch.array("observation"))[0, 0].equal(given["bfloat16"])
    assert batch.array("action").dtype == np.int32


@pytest.mark.parametrize("ids", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_token_ids_and_logprobs_may_be_tensors(tmp_path, ids, kind):
    table = torch.arange(12).reshape(3, 4).to(ids)
    logprobs = (-torch.arange(1, 13).reshape(3, 4) / 7).to(kind).requires_grad_()
    masks = torch.tensor([[True, False, True, True]])
    snapshot = recorded(
        tmp_path,
        [
            {"token_ids": table[1], "logprobs": logprobs[1], "loss_mask": masks[0]},
            {"token_ids": table[:, 1], "logprobs": logprobs[:, 1] * 2},
            {"token_ids": list(table[2]), "logprobs": list(logprobs[2].detach())},
        ],
    )
    steps = snapshot.episode("e").steps
    exact = logprobs.detach().float()
    assert [step["token_ids"] for step in steps] == [[4, 5, 6, 7], [1, 5, 9], [8, 9, 10, 11]]
    assert steps[0]["loss_mask"] == [1, 0, 1, 1]
    assert steps[0]["logprobs"] == exact[1].tolist()
    assert steps[1]["logprobs"] == (logprobs[:, 1] * 2).detach().float().tolist()
    assert steps[2]["logprobs"] == exact[2].tolist()


def test_numbers_and_flags_of_a_step_may_be_tensors(tmp_path):
    step = {
        "reward": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
        "terminated": torch.tensor(True),
        "truncated": torch.tensor([False]),
        "prompt_tokens": torch.tensor(7),
        "extra": {"values": torch.tensor([1, 2])},
    }
    (found,) = recorded(tmp_path, [step]).episode("e").steps
    assert (found["reward"], found["terminated"], found["truncated"], found["prompt_tokens"]) == (0.5, True, False, 7)
    assert json.loads(found["extra"]) == {"values": [1, 2]}


def test_tensors_without_values_are_refused_by_name(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer, writer.episode() as episode:
        for wrong in (
            {"observation": torch.zeros(3, device="meta")},
            {"observation": torch.zeros(3, 3).to_sparse()},
            {"token_ids": torch.zeros(2, 2, dtype=torch.int64)},
            {"token_ids": torch.tensor([0.5])},
            {"token_ids": torch.tensor([2**40])},
            {"logprobs": torch.zeros(3, device="meta")},
            {"reward": torch.zeros(2)},
            {"terminated": torch.tensor(0.5)},
        ):
            with pytest.raises(
                UsageError, match=f"step field {'tensors' if 'observation' in wrong else next(iter(wrong))}"
            ):
                episode.step(**wrong)


# -- the documentation ---------------------------------------------------------------------------------------------


def test_the_trainer_of_the_documentation_raises_the_chance_of_what_was_rewarded(lake):
    text = (Path(__file__).resolve().parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    section = text.partition("## Using it from a trainer")[2].partition("\n## ")[0]
    blocks = [block.partition("```")[0] for block in section.split("```python\n")[1:]]
    assert len(blocks) == 3
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    names = {"lake": lake, "model": model, "optimizer": optimizer}

    def chances():  # of the tokens of odd episodes, which were rewarded, after the prompt
        after = torch.softmax(model(torch.tensor([2])), -1)[0]
        return after[[10 + number for number in range(1, 20, 2)]].sum().item()

    before = chances()
    for block in blocks:
        exec(block, names)
    assert chances() > before
    assert names["state"]["position"] > 0
    assert all(len(row["input_ids"]) == 4096 for row in names["rows"])
    assert names["sampler"].left_out == {}
