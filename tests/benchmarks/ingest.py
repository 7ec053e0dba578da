"""What recording costs: in the rollout's thread, and until everything is durable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import trajlake
from tests.benchmarks.data import Rollout, as_lists, rollouts, tau_bench
from tests.benchmarks.harness import (
    OURS,
    Options,
    Result,
    folder_bytes,
    in_turns,
    median,
    percentile,
    timed,
)
from trajlake.errors import NotDurable, StoreUnavailable
from trajlake.ingest.writer import Writer
from trajlake.lake import Lake
from trajlake.storage import ObjectStore, open_store
from trajlake.storage.wrappers import OPERATIONS
from trajlake_schemas import STEPS

TITLE = "Ingest"
SEGMENT_BYTES = 4 << 20
_UPLOAD_TIMES = 5  # how often the episodes are recorded, so that there are several segments
_SETTLE_SECONDS = 10.0
_PACED_STEPS = 1_000
_PACE_SECONDS = 0.001


def run(options: Options) -> list[Result]:
    arrays = list(rollouts(options.steps_from, seed=1))
    lists = [as_lists(rollout) for rollout in arrays]
    results = [
        *_thread_cost(options, "tokens as lists", lists),
        *_thread_cost(options, "tokens as numpy arrays", arrays),
        *_thread_cost(options, "tokens as lists, one step a millisecond", lists, paced=True),
    ]
    if real := list(islice(tau_bench(), options.steps_from)):
        results += _thread_cost(options, "tau-bench, no tokens", real)
    results += _durable(options, lists, None)
    results += _tensors(options)
    if options.s3:
        results += _durable(options, lists, options.s3_scratch("ingest"))
        results += _uploaded(options, arrays, options.s3_scratch("upload"))
    return results


# -- in the rollout's thread -------------------------------------------------------------------------------------------


Cost = tuple[list[float], float]  # seconds of each step; processor seconds of this thread a step


def _thread_cost(options: Options, name: str, episodes: Sequence[Rollout], paced: bool = False) -> list[Result]:
    steps = [step for rollout in episodes for step in rollout.steps][: _PACED_STEPS if paced else None]

    def ours() -> Cost:
        folder = options.scratch("ingest")
        lake = trajlake.create(folder / "lake")
        with lake.writer("bench", "w", spool=folder / "spool") as writer, writer.episode() as episode:
            return _each(steps, lambda step: episode.step(**step), paced)

    def as_json() -> Cost:
        with (options.scratch("ingest") / "steps.jsonl").open("w") as file:
            return _each(steps, lambda step: file.write(json.dumps(step, default=_plain) + "\n"), paced)

    case = f"cost of a step in the rollout's thread: {name}"
    results = []
    for contender, costs in in_turns({OURS: ours, "json.dumps + write": as_json}, options.repeats).items():
        every = [seconds for each, _ in costs for seconds in each]
        results.append(
            Result(
                case,
                contender,
                median(sum(each) / len(each) for each, _ in costs),
                p95=percentile(every, 95),
                p99=percentile(every, 99),
                time_goal=None if contender == OURS else 2.0,
                note=f"{median(processor for _, processor in costs) * 1e6:.1f} µs of the thread's own processor time",
            )
        )
    return results


def _each(steps: Sequence[dict[str, Any]], action: Callable[[dict[str, Any]], Any], paced: bool) -> Cost:
    seconds = []
    processor = 0.0
    for step in steps:
        if paced:
            time.sleep(_PACE_SECONDS)
        cpu, began = time.thread_time(), time.perf_counter()
        action(step)
        seconds.append(time.perf_counter() - began)
        processor += time.thread_time() - cpu
    return seconds, processor / len(steps)


def _plain(value: Any) -> Any:
    return value.tolist()


# -- until it is durable -----------------------------------------------------------------------------------------------


def _durable(options: Options, episodes: Sequence[Rollout], uri: str | None) -> list[Result]:
    """All steps until they are durable: in the local folder, or on the S3 server below `uri`."""
    work = sum(len(line) for line in _lines(episodes))
    sizes: dict[str, int] = {}
    segments: list[bytes] = []
    runs = iter(range(1_000))

    def place(name: str) -> str:
        return f"{uri}/{name}-{next(runs)}" if uri else str(options.scratch(name))

    def ours() -> float:
        lake = trajlake.create(place("lake"))
        seconds = _write_and_flush(lake, options.scratch("spool"), episodes)
        if not segments:
            segments.extend(lake.store.get(info.key) for info in lake.store.list("landing/"))
            sizes[OURS] = sizes["bare PUTs"] = sum(map(len, segments))
        return seconds

    def bare_puts() -> float:
        store = open_store(place("bare"))
        return timed(lambda: [store.put_if_absent(f"{number}.arrow", data) for number, data in enumerate(segments)])

    def as_json() -> float:
        if uri:
            return timed(lambda: _put_lines(open_store(place("json")), episodes))
        path = Path(place("json")) / "steps.jsonl"
        return timed(lambda: _write_lines(path, episodes))

    def by_lance() -> float:
        where = place("lance")
        settings = open_store(where).storage_options()
        target = open_store(where).location("steps.lance")
        seconds = timed(lambda: _append_lance(target, settings, episodes))
        if not uri:
            sizes["Lance append"] = folder_bytes(Path(target))
        return seconds

    sizes["JSON lines"] = work
    json_name = "JSON lines, PUT" if uri else "JSON lines, write + fsync"
    sizes[json_name] = work
    contenders = {OURS: ours, "bare PUTs": bare_puts, json_name: as_json, "Lance append": by_lance}
    notes = {
        "bare PUTs": "of the same segments, one after the other, with the same client; nothing is encoded",
        json_name: f"one object or fsync every {SEGMENT_BYTES >> 20} MiB",
        "Lance append": f"a version every {SEGMENT_BYTES >> 20} MiB of text, with Lance's defaults",
    }
    return [
        Result(
            f"all steps until durable: {'S3' if uri else 'local'}",
            name,
            median(seconds),
            work=work,
            size=sizes.get(name),
            note=notes.get(name, "flush() with durability remote"),
        )
        for name, seconds in in_turns(contenders, options.repeats).items()
    ]


# -- tensors alone, beside a replay buffer -----------------------------------------------------------------------------


_TENSOR_STEPS = 200  # an episode; sizes of MuJoCo's HalfCheetah


def _tensors(options: Options) -> list[Result]:
    """Steps of classic RL, an episode after the other, until they are in files."""
    count = options.steps_from
    rng = np.random.default_rng(0)
    shapes = {"observation": (17,), "action": (6,)}
    episodes = [
        {name: rng.random((_TENSOR_STEPS, *shape), np.float32) for name, shape in shapes.items()}
        | {"reward": rng.random(_TENSOR_STEPS)}
        for _ in range(count)
    ]
    sizes: dict[str, int] = {}

    def ours() -> Cost:
        folder = options.scratch("tensors")
        lake = trajlake.create(folder / "lake")

        def write() -> None:
            for each in episodes:
                with writer.episode() as episode:
                    for number in range(_TENSOR_STEPS):
                        episode.step(
                            observation=each["observation"][number],
                            action=each["action"][number],
                            reward=float(each["reward"][number]),
                            terminated=number == _TENSOR_STEPS - 1,
                        )
            writer.flush()

        with lake.writer("bench", "w", spool=folder / "spool") as writer:
            cost = _cost(write)
        sizes[OURS] = folder_bytes(folder / "lake" / "landing")
        return cost

    def by_torchrl() -> Cost:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

        folder = options.scratch("torchrl")
        storage = LazyMemmapStorage(count * _TENSOR_STEPS, scratch_dir=folder)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=256)

        def extend() -> None:
            for each in episodes:
                done = torch.zeros(_TENSOR_STEPS, 1, dtype=torch.bool)
                done[-1] = True
                columns = {name: torch.from_numpy(array) for name, array in each.items()}
                buffer.extend(TensorDict({**columns, "done": done}, [_TENSOR_STEPS]))

        cost = _cost(extend)
        sizes["TorchRL LazyMemmapStorage"] = folder_bytes(folder)
        return cost

    contenders: dict[str, Callable[[], Cost]] = {OURS: ours}
    note = "not installed: pip install -e '.[bench-torch]'"
    if is_there := find_spec("torchrl") is not None:
        contenders["TorchRL LazyMemmapStorage"] = by_torchrl
        note = "an episode at once, already stacked; mapped memory, not synced, and for this process alone"
    case = f"{count} episodes of {_TENSOR_STEPS} steps of tensors until in files: local"
    notes = {OURS: "a step at a time, flush() with durability remote", "TorchRL LazyMemmapStorage": note}
    found = [
        Result(
            case,
            name,
            median(seconds for (seconds,), _ in costs),
            processor=median(processor for _, processor in costs),
            size=sizes[name],
            note=notes[name],
        )
        for name, costs in in_turns(contenders, options.repeats).items()
    ]
    return found if is_there else [*found, Result(case, "TorchRL LazyMemmapStorage", None, note=note)]


# -- the upload alone --------------------------------------------------------------------------------------------------


class _Gate:
    """A store that is down as long as somebody says so."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.is_down = False

    def __getattr__(self, name: str) -> Any:
        if self.is_down and name in OPERATIONS:
            raise StoreUnavailable("the gate is closed")
        return getattr(self._store, name)


def _uploaded(options: Options, episodes: Sequence[Rollout], uri: str) -> list[Result]:
    """Closed segments from the spool of a writer that lives, when its store is back, until they are durable; and the
    same bytes by the same client alone."""
    segments: list[bytes] = []
    runs = iter(range(1_000))

    def ours() -> Cost:
        lake = trajlake.create(f"{uri}/lake-{next(runs)}")
        gate = _Gate(lake.store)
        spool = options.scratch("spool")
        with Writer(gate, "bench", "w", spool=spool, segment_bytes=SEGMENT_BYTES) as writer:  # type: ignore[arg-type]
            writer.score("none", "begins", 1.0)
            writer.flush()  # the epoch is claimed once in the life of a writer
            gate.is_down = True
            for turn in range(_UPLOAD_TIMES):
                for rollout in episodes:
                    with writer.episode(episode_id=f"{rollout.episode_id}-{turn}", **rollout.begin) as episode:
                        for step in rollout.steps:
                            episode.step(**step)
                        episode.end(**rollout.end)
            with suppress(NotDurable):
                writer.flush(timeout=_SETTLE_SECONDS)
            assert writer.stats.queued_events == 0
            if not segments:
                segments.extend(file.read_bytes() for file in sorted(spool.glob("*/*.arrow")))
            gate.is_down = False
            return _cost(writer.flush)

    def bare_puts() -> Cost:
        store = open_store(f"{uri}/bare-{next(runs)}")
        store.put_if_absent("connected", b"x")
        return _cost(lambda: [store.put_if_absent(f"{number}.arrow", data) for number, data in enumerate(segments)])

    return [
        Result(
            f"segments from the spool until durable: S3, {len(segments)} of up to {SEGMENT_BYTES >> 20} MiB",
            name,
            median(seconds for (seconds,), _ in costs),
            work=sum(map(len, segments)),
            processor=median(processor for _, processor in costs),
            time_goal=None if name == OURS else 0.8,
        )
        for name, costs in in_turns({OURS: ours, "bare PUTs": bare_puts}, 3 * options.repeats).items()
    ]


def _cost(action: Callable[[], Any]) -> Cost:
    processor = time.process_time()
    seconds = timed(action)
    return [seconds], time.process_time() - processor


def _write_and_flush(lake: Lake, spool: Path, episodes: Sequence[Rollout]) -> float:
    with lake.writer("bench", "w", spool=spool, segment_bytes=SEGMENT_BYTES) as writer:

        def write() -> None:
            for rollout in episodes:
                with writer.episode(episode_id=rollout.episode_id, **rollout.begin) as episode:
                    for step in rollout.steps:
                        episode.step(**step)
                    episode.end(**rollout.end)
            writer.flush()

        return timed(write)


def _lines(episodes: Sequence[Rollout]) -> Iterator[str]:
    for rollout in episodes:
        for index, step in enumerate(rollout.steps):
            yield json.dumps({"episode_id": rollout.episode_id, "step_index": index, **step}) + "\n"


def _write_lines(path: Path, episodes: Sequence[Rollout]) -> None:
    waiting = 0
    with path.open("w") as file:
        for line in _lines(episodes):
            file.write(line)
            waiting += len(line)
            if waiting >= SEGMENT_BYTES:
                file.flush()
                os.fsync(file.fileno())
                waiting = 0
        file.flush()
        os.fsync(file.fileno())


def _put_lines(store: ObjectStore, episodes: Sequence[Rollout]) -> None:
    waiting: list[str] = []
    size = number = 0
    for line in [*_lines(episodes), ""]:
        waiting.append(line)
        size += len(line)
        if size >= SEGMENT_BYTES or not line:
            store.put_if_absent(f"{number}.jsonl", "".join(waiting).encode())
            waiting, size, number = [], 0, number + 1


def _append_lance(target: str, settings: dict[str, str] | None, episodes: Sequence[Rollout]) -> None:
    """Rows in the columns of our table, as someone would append them who uses Lance as the store of rollouts."""
    rows: list[dict[str, Any]] = []
    size = 0

    def append() -> None:
        table = pa.Table.from_pylist(rows, schema=STEPS.arrow)
        lance.write_dataset(table, target, mode="append" if done else "create", storage_options=settings)
        rows.clear()

    done = False
    for rollout in episodes:
        for index, step in enumerate(rollout.steps):
            timestamp = int(step["timestamp"] * 1e6)
            rows.append({"episode_id": rollout.episode_id, "step_index": index, **step, "timestamp": timestamp})
            size += 300 + len(step.get("message") or "") + len(step.get("reasoning") or "")
            size += sum(len(result["content"]) for result in step.get("tool_results") or ())
            size += 8 * len(step.get("token_ids") or ())
        if size >= SEGMENT_BYTES:
            append()
            done, size = True, 0
    if rows:
        append()
