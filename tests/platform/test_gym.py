"""Gymnasium environments through `trajlake.gym.record`, in every way in which they begin anew."""

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

import trajlake  # noqa: E402
import trajlake.gym  # noqa: E402
from trajlake.errors import UsageError  # noqa: E402
from trajlake_pipelines.compact import compact  # noqa: E402

pytestmark = pytest.mark.unit

OBSERVATION = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (2, 2), np.uint8),
        "body": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1, (1,), np.float16))),
    }
)


class Counter(gymnasium.Env):
    """Counts its steps: it terminates after `end` of them, or is truncated after `limit`."""

    observation_space = OBSERVATION
    action_space = spaces.Dict({"push": spaces.Discrete(5), "keys": spaces.MultiBinary(2)})

    def __init__(self, end=2, limit=99):
        self.end, self.limit, self.count, self.first = end, limit, 0, 0

    def _look(self):
        return {
            "camera": np.full((2, 2), self.count, np.uint8),
            "body": (self.count, np.array([self.count / 8], np.float16)),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._look(), {}

    def step(self, action):
        self.count += 1
        return self._look(), self.count / 2, self.count == self.end, self.count == self.limit, {}


class Number(gymnasium.Env):
    """Its observation is the number of steps since it was made, so that each one can be told from every other."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, ends, truncates=()):
        self.ends, self.truncates, self.total, self.count, self.episode = ends, truncates, 100, 0, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total += 100
        self.count = 0
        self.episode += 1
        return np.array([self.total], np.float32), {}

    def step(self, action):
        self.total += 1
        self.count += 1
        end = self.count == self.ends[self.episode % len(self.ends)]
        return np.array([self.total], np.float32), 1.0, end, end and self.episode in self.truncates, {}


@pytest.fixture
def lake(tmp_path):
    return trajlake.create(tmp_path / "lake")


def played(lake, play):
    """The episodes in the order in which they began, after `play(writer)`."""
    with lake.writer("run", "w") as writer:
        play(writer)
    compact(lake, stale_after=0)
    snapshot = lake.snapshot()
    rows = snapshot.episodes.collect().sort("episode_id")
    return list(snapshot.trajectories(rows["episode_id"]))


def test_every_part_of_a_space_is_a_tensor_of_its_own_dtype_and_shape(lake):
    def play(writer):
        env = trajlake.gym.record(Counter(), writer, task_id="count", policy_version=3)
        env.reset(seed=11)
        env.step({"push": 4, "keys": np.array([1, 0], np.int8)})
        env.note(tensors={"logprob": np.float32(-0.5)}, latency_ms=2.0)
        env.step({"push": np.int64(2), "keys": np.array([0, 1], np.int8)})
        env.close()

    (episode,) = played(lake, play)
    assert (episode.episode["seed"], episode.episode["task_id"], episode.episode["policy_version"]) == (11, "count", 3)
    assert (episode.episode["reward"], episode.episode["status"]) == (1.5, "completed")
    first = {tensor["name"]: episode.tensor(0, tensor["name"]) for tensor in episode.steps[0]["tensors"]}
    assert {name: (array.dtype.name, array.shape) for name, array in first.items()} == {
        "observation.camera": ("uint8", (2, 2)),
        "observation.body.0": ("int64", ()),
        "observation.body.1": ("float16", (1,)),
        "action.push": ("int64", ()),
        "action.keys": ("int8", (2,)),
    }
    assert (first["action.push"].item(), first["action.keys"].tolist()) == (4, [1, 0])
    assert episode.tensor(1, "observation.camera").tolist() == [[1, 1], [1, 1]]
    assert episode.tensor(1, "final_observation.camera").tolist() == [[2, 2], [2, 2]]
    assert episode.tensor(1, "final_observation.body.1").item() == 0.25
    assert (episode.tensor(1, "logprob").item(), episode.steps[1]["latency_ms"]) == (-0.5, 2.0)
    assert [(step["reward"], step["terminated"], step["truncated"]) for step in episode.steps] == [
        (0.5, False, False), (1.0, True, False),
    ]  # fmt: skip


def test_spaces_and_names_are_written_down(lake):
    import json

    def play(writer):
        env = trajlake.gym.record(gymnasium.make("CartPole-v1"), writer)
        env.reset(seed=1)
        env.step(0)
        env.reset()
        env.step(env.action_space.sample())
        env.close()

    first, second = played(lake, play)
    assert (first.episode["env_name"], first.episode["env_version"]) == ("CartPole-v1", gymnasium.__version__)
    said = json.loads(first.episode["extra"])
    assert said["action_space"] == {"type": "Discrete", "shape": [], "dtype": "int64", "n": 2, "start": 0}
    assert (said["observation_space"]["dtype"], said["observation_space"]["high"][1]) == ("float32", "inf")
    assert (first.episode["status"], first.episode["stop_reason"]) == ("aborted", "reset before its end")
    assert (second.episode["status"], second.episode["seed"]) == ("aborted", None)
    assert json.loads(second.episode["extra"])["last_seed"] == 1
    assert first.tensor(0, "action").dtype == np.int64


def test_a_time_limit_truncates_and_both_may_be_true_at_once(lake):
    def play(writer):
        for end, limit in ((9, 2), (2, 2)):
            env = trajlake.gym.record(Counter(end, limit), writer)
            env.reset()
            for _ in range(2):
                env.step(env.action_space.sample())

    rows = [(one.episode["terminated"], one.episode["truncated"], one.episode["status"]) for one in played(lake, play)]
    assert rows == [(False, True, "truncated"), (True, True, "completed")]


def test_the_autoreset_wrapper_adds_no_step(lake):
    def play(writer):
        env = trajlake.gym.record(gymnasium.wrappers.Autoreset(Number([2, 3])), writer)
        env.reset(seed=5)
        for _ in range(8):
            env.step(1)
        env.close()

    episodes = played(lake, play)
    assert [[one.tensor(at, "observation").item() for at in range(len(one.steps))] for one in episodes] == [
        [200, 201], [302, 303, 304], [405],
    ]  # fmt: skip
    assert [one.episode["status"] for one in episodes] == ["completed", "completed", "aborted"]


@pytest.mark.parametrize("vector", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_the_steps_of_a_vector_environment_are_those_of_its_environments_alone(lake, vector, mode):
    ends = [[2, 4], [3], [1, 2, 5]]
    makers = [lambda ends=ends: Number(ends, truncates=(1,)) for ends in ends]

    def play(writer):
        envs = trajlake.gym.record(vector(makers, autoreset_mode=mode), writer)
        envs.reset(seed=40)
        for count in range(12):
            _, _, terminated, truncated, _ = envs.step(np.array([count % 3, 1, 2]))
            done = terminated | truncated
            if mode == AutoresetMode.DISABLED and done.any():
                envs.reset(options={"reset_mask": done})
        envs.close()

    episodes = played(lake, play)
    for number in range(len(ends)):
        own = [one for one in episodes if one.episode["seed"] == 40 + number]
        assert len(own) == 1, "the first episode of each has its seed"
    whole = [one for one in episodes if one.episode["status"] != "aborted"]
    assert len(whole) >= 9
    for one in episodes:
        seen = [one.tensor(at, "observation").item() for at in range(len(one.steps))]
        assert seen == list(range(int(seen[0]), int(seen[0]) + len(seen))), "no reset and no other episode among them"
        assert [step["reward"] for step in one.steps] == [1.0] * len(seen)
        assert {one.tensor(0, name).dtype.name for name in ("observation",)} == {"float32"}
        assert one.tensor(0, "action").shape == ()
    for one in whole:
        last = len(one.steps) - 1
        assert one.tensor(last, "final_observation").item() == one.tensor(last, "observation").item() + 1
        assert one.steps[last]["terminated"]
        assert [step["terminated"] for step in one.steps[:-1]] == [False] * last
        assert one.episode["truncated"] == (int(one.tensor(0, "observation").item()) // 100 == 3)
    lengths = sorted((len(one.steps) for one in whole), reverse=True)
    assert lengths[0] == 5
    assert {1, 2, 3, 4} <= set(lengths)


def test_a_vector_of_composed_spaces_is_taken_apart(lake):
    def play(writer):
        envs = trajlake.gym.record(SyncVectorEnv([Counter, Counter], autoreset_mode=AutoresetMode.SAME_STEP), writer)
        envs.reset()
        envs.note([{"policy_version": "a"}, {"policy_version": "b"}])
        envs.step(envs.action_space.sample())
        envs.step(envs.action_space.sample())
        envs.close()

    one, two = played(lake, play)
    assert {one.steps[0]["policy_version"], two.steps[0]["policy_version"]} == {"a", "b"}
    assert one.tensor(1, "final_observation.camera").tolist() == [[2, 2], [2, 2]]
    assert one.tensor(1, "observation.body.1").dtype == np.float16


def test_what_is_no_environment_and_what_was_not_reset_is_told(lake):
    with lake.writer("run", "w") as writer:
        with pytest.raises(UsageError, match="neither a gymnasium.Env nor"):
            trajlake.gym.record(object(), writer)
        env = Counter()
        env.reset()
        with pytest.raises(UsageError, match=r"call reset\(\) of the environment that record\(\) gave"):
            trajlake.gym.record(env, writer).step(env.action_space.sample())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.MultiDiscrete([2, 3]),
        spaces.Sequence(spaces.Box(0, 1, (2,), np.float32), seed=1),
        spaces.Sequence(spaces.Discrete(3), stack=True, seed=1),
        spaces.Graph(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2), seed=1),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,), np.float64)], seed=1),
        spaces.Box(0, 1, (), np.float64),
        spaces.Box(0, 1, (0, 3), np.float32),
    ],
    ids=str,
)
def test_every_kind_of_space_becomes_arrays_that_can_be_stored(space):
    from trajlake.ingest.arrays import tensor

    for _ in range(5):
        for name, array in trajlake.gym.flatten("observation", space.sample(), space).items():
            assert tensor(name, array)["shape"] == list(array.shape)
    assert trajlake.gym.describe(space)["type"] == type(space).__name__
