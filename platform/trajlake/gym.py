"""Recording Gymnasium environments: `env = trajlake.gym.record(env, writer)`, and use `env` as before.

    with lake.writer("run") as writer:
        env = trajlake.gym.record(gymnasium.make("CartPole-v1"), writer, policy_version="3")
        observation, info = env.reset(seed=7)
        …

Every episode of the environment becomes an episode of the lake, every action a step: the observation before it, the
action, the reward, `terminated` and `truncated` as the environment said them. The last step also has the final
observation, which vector environments hide in different places depending on how they start anew. Needs gymnasium.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from trajlake.errors import UsageError

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector.utils import iterate
except ImportError as missing:
    raise UsageError("recording environments needs gymnasium: pip install 'trajlake[gym]'") from missing

if TYPE_CHECKING:
    from trajlake.ingest.episode import Episode, EpisodeFields, StepFields
    from trajlake.ingest.writer import Writer


Tensors = dict[str, np.ndarray[Any, Any]]

_NEXT_STEP, _SAME_STEP, _DISABLED = "NextStep", "SameStep", "Disabled"
_MOST_BOUNDS = 64  # elements of a Box whose bounds are written down one by one


def record(env: Any, writer: Writer, **fields: Unpack[EpisodeFields]) -> Any:
    """`env` with everything that happens in it recorded; `fields` are said of every episode.

    A `gymnasium.Env` gives a `RecordEnv`, a `gymnasium.vector.VectorEnv` a `RecordVectorEnv`. Raises UsageError for
    anything else.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        return RecordVectorEnv(env, writer, **fields)
    if isinstance(env, gymnasium.Env):
        return RecordEnv(env, writer, **fields)
    raise UsageError(f"neither a gymnasium.Env nor a gymnasium.vector.VectorEnv: {type(env).__name__}")


class _Track:
    """One environment's way through its episodes; an episode begins at its first step."""

    def __init__(self, writer: Writer, fields: EpisodeFields, env: Any, observation_space: Any, action_space: Any):
        self._writer = writer
        self._fields = fields
        self._spaces = {"observation": observation_space, "action": action_space}
        self._said: dict[str, Any] = {
            "observation_space": describe(observation_space),
            "action_space": describe(action_space),
        }
        spec = env.spec
        self._env = {} if spec is None else {"env_name": spec.id, "env_version": gymnasium.__version__}
        self._episode: Episode | None = None
        self._before: Tensors | None = None
        self._total = 0.0
        self._seed: int | None = None
        self._seeded: tuple[int, int] | None = None  # the last seed, and how many times it was reset since
        self.is_done = False

    @property
    def may_step(self) -> bool:
        return self._before is not None

    def reset(self, observation: Any, seed: int | None) -> None:
        """The environment has begun anew. A seed that was not given is still said by the last one and by how often
        the environment was reset since."""
        if self._episode is not None:
            self._end(status="aborted", stop_reason="reset before its end")
        self._before = flatten("observation", observation, self._spaces["observation"])
        self._seed = seed
        if seed is not None:
            self._seeded = (seed, 0)
        elif self._seeded is not None:
            self._seeded = (self._seeded[0], self._seeded[1] + 1)
        self.is_done = False

    def step(
        self, action: Any, after: Any, reward: float, terminated: bool, truncated: bool, notes: StepFields
    ) -> None:
        """One action; `after` is what was observed after it in the same episode."""
        assert self._before is not None
        if self._episode is None:
            self._begin()
        assert self._episode is not None
        observed = flatten("observation", after, self._spaces["observation"])
        tensors = self._before | flatten("action", action, self._spaces["action"])
        if terminated or truncated:
            tensors |= {f"final_{name}": array for name, array in observed.items()}
        given = {**notes, "tensors": tensors | dict(notes.get("tensors") or {})}
        self._episode.step(
            **cast(
                "StepFields",
                {"source": "agent", **given, "reward": reward, "terminated": terminated, "truncated": truncated},
            )
        )
        self._total += reward
        self._before = observed
        if terminated or truncated:
            self.is_done = True
            self._end()

    def close(self) -> None:
        """The environment is closed."""
        if self._episode is not None:
            self._end(status="aborted", stop_reason="the environment was closed")

    def _begin(self) -> None:
        extra = {**self._said, **(self._fields.get("extra") or {})}
        if self._seed is None and self._seeded is not None:
            extra["last_seed"], extra["resets_since"] = self._seeded
        given = {**self._env, "seed": self._seed, **self._fields, "extra": extra}
        self._episode = self._writer.episode(**cast("EpisodeFields", given))
        self._total = 0.0

    def _end(self, **how: str) -> None:
        episode, self._episode = self._episode, None
        assert episode is not None
        episode.end(reward=self._total, **cast(Any, how))


class RecordEnv(gymnasium.Wrapper):  # type: ignore[misc]  # gymnasium is not checked here
    """A single environment that is recorded; see `record`.

    `episode_fields` may be changed at any time, and hold from the next episode on (`policy_version`, `tags`, …).
    """

    def __init__(self, env: Any, writer: Writer, **fields: Unpack[EpisodeFields]) -> None:
        super().__init__(env)
        self.episode_fields = fields
        self._track = _Track(writer, fields, env, env.observation_space, env.action_space)
        self._notes: StepFields = {}
        self._resets_itself = any(isinstance(layer, gymnasium.wrappers.Autoreset) for layer in _layers(env))

    def note(self, **fields: Unpack[StepFields]) -> None:
        """Say something of the next step: `note(tensors={"action_logprob": …}, policy_version="4")`."""
        self._notes = {**self._notes, **fields}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a new episode; one that had not ended is ended as aborted."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._track.reset(observation, seed)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Do `action`, and record it. Raises UsageError where `reset` was not called on this object before."""
        if not self._track.may_step:
            raise UsageError("call reset() of the environment that record() gave, and not of the one inside")
        was_done = self._track.is_done
        observation, reward, terminated, truncated, info = self.env.step(action)
        notes, self._notes = self._notes, {}
        if not was_done:
            self._track.step(action, observation, float(reward), bool(terminated), bool(truncated), notes)
        elif self._resets_itself:  # Gymnasium's Autoreset: this call was the reset, and its action was not done
            self._track.reset(observation, None)
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment; an episode that had not ended is ended as aborted."""
        self._track.close()
        super().close()


class RecordVectorEnv(gymnasium.vector.VectorWrapper):  # type: ignore[misc]
    """A vector environment that is recorded, each of its environments as episodes of its own; see `record`.

    All three ways of Gymnasium to begin anew are known (`AutoresetMode`): with NEXT_STEP the call after the end is
    the reset, and is no step; with SAME_STEP the final observation is in `info["final_obs"]`; with DISABLED the
    caller resets, by `options={"reset_mask": …}`.
    """

    def __init__(self, env: Any, writer: Writer, **fields: Unpack[EpisodeFields]) -> None:
        super().__init__(env)
        self.episode_fields = fields
        self._tracks = [
            _Track(writer, fields, env, env.single_observation_space, env.single_action_space)
            for _ in range(env.num_envs)
        ]
        self._notes: Sequence[StepFields] = ()
        mode = env.metadata.get("autoreset_mode", _NEXT_STEP)  # what it is in Gymnasium 1.0, which has no name for it
        self._mode = getattr(mode, "value", mode)
        if self._mode not in {_NEXT_STEP, _SAME_STEP, _DISABLED}:
            raise UsageError(f"the environment begins anew in a way that is not known: autoreset_mode={mode!r}")

    def note(self, each: Sequence[StepFields]) -> None:
        """Say something of the next step of each environment: one dict for each of them."""
        if len(each) != len(self._tracks):
            raise UsageError(f"{len(each)} notes for {len(self._tracks)} environments")
        self._notes = each

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes, with `options={"reset_mask": …}` only where the mask is True. One seed means seed,
        seed + 1, … as Gymnasium does it."""
        count = len(self._tracks)
        seeds: Sequence[int | None]
        if seed is None:
            seeds = [None] * count
        elif isinstance(seed, (int, np.integer)):
            seeds = [int(seed) + index for index in range(count)]
        else:
            seeds = seed
        # Gymnasium takes the mask out of the options, so it is copied before.
        mask = None if options is None else options.get("reset_mask")
        chosen = np.ones(count, bool) if mask is None else np.array(mask, bool)
        observations, info = self.env.reset(seed=seed, options=options)
        each = self._each(self.env.observation_space, observations)
        for track, observation, one, is_reset in zip(self._tracks, each, seeds, chosen, strict=True):
            if is_reset:
                track.reset(observation, one)
        return observations, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Do one action in each environment, and record what was done. Raises UsageError as `RecordEnv.step`."""
        if not all(track.may_step for track in self._tracks):
            raise UsageError("call reset() of the environment that record() gave, and not of the one inside")
        each_action = list(self._each(self.env.action_space, actions))
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        notes, self._notes = self._notes or [{} for _ in self._tracks], ()
        for index, (track, observation) in enumerate(
            zip(self._tracks, self._each(self.env.observation_space, observations), strict=True)
        ):
            if track.is_done:
                if self._mode == _NEXT_STEP:  # this call was the reset, and its action was not done
                    track.reset(observation, None)
                continue
            is_end = bool(terminated[index] or truncated[index])
            is_replaced = is_end and self._mode == _SAME_STEP
            after = info["final_obs"][index] if is_replaced else observation
            track.step(
                each_action[index],
                after,
                float(rewards[index]),
                bool(terminated[index]),
                bool(truncated[index]),
                notes[index],
            )
            if is_replaced:
                track.reset(observation, None)
        return observations, rewards, terminated, truncated, info

    def close(self, **kwargs: Any) -> None:
        """Close the environments; episodes that had not ended are ended as aborted."""
        for track in self._tracks:
            track.close()
        super().close(**kwargs)

    @staticmethod
    def _each(space: Any, batch: Any) -> Iterator[Any]:
        return iter(iterate(space, batch))


def flatten(name: str, value: Any, space: Any) -> Tensors:
    """`value` of `space` as named arrays, copied: `observation`, or `observation.camera`, `observation.0.joints`, …
    for spaces of several parts. Arrays keep their dtype; plain numbers get that of the space."""
    if isinstance(space, spaces.Dict):
        return _merged(flatten(f"{name}.{key}", value[key], part) for key, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return _merged(flatten(f"{name}.{at}", value[at], part) for at, part in enumerate(space.spaces))
    if isinstance(space, spaces.OneOf):
        chosen, inner = value
        return {f"{name}.choice": np.asarray(chosen, np.int64)} | flatten(
            f"{name}.value", inner, space.spaces[int(chosen)]
        )
    if isinstance(space, spaces.Sequence):
        if space.stack:  # already one value of the space of batches
            return flatten(name, value, space.stacked_feature_space)
        parts = _merged(flatten(f"{name}.{at}", item, space.feature_space) for at, item in enumerate(value))
        return {f"{name}.length": np.asarray(len(value), np.int64)} | parts
    if isinstance(space, spaces.Graph):
        found = {"nodes": value.nodes, "edges": value.edges, "edge_links": value.edge_links}
        return {f"{name}.{part}": np.array(array) for part, array in found.items() if array is not None}
    if isinstance(value, (np.ndarray, np.generic)) or space is None or space.dtype in (None, str):
        return {name: np.array(value)}
    return {name: np.array(value, dtype=space.dtype)}


def describe(space: Any) -> dict[str, Any]:
    """A space as JSON: its type, shape, dtype, bounds, and its parts. Bounds of large boxes that differ from element
    to element are left out; those that are infinite are text."""
    found: dict[str, Any] = {"type": type(space).__name__}
    if isinstance(space, spaces.Dict):
        return found | {"spaces": {key: describe(part) for key, part in space.spaces.items()}}
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        return found | {"spaces": [describe(part) for part in space.spaces]}
    if isinstance(space, spaces.Sequence):
        return found | {"feature_space": describe(space.feature_space), "stack": space.stack}
    if getattr(space, "shape", None) is not None:
        found["shape"] = [int(length) for length in space.shape]
    if isinstance(getattr(space, "dtype", None), np.dtype):
        found["dtype"] = space.dtype.name
    if isinstance(space, spaces.Box):
        found |= {name: bound for name in ("low", "high") if (bound := _bound(getattr(space, name))) is not None}
    elif isinstance(space, spaces.Discrete):
        found |= {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, spaces.MultiDiscrete):
        found |= {"nvec": np.asarray(space.nvec).tolist()}
    elif not isinstance(space, (spaces.MultiBinary, spaces.Text)):
        found["description"] = str(space)
    return found


def _bound(bound: np.ndarray[Any, Any]) -> Any:
    if bound.size and np.all(bound == bound.flat[0]):
        return _number(bound.flat[0])
    return [_number(item) for item in bound.flat] if 0 < bound.size <= _MOST_BOUNDS else None


def _number(value: Any) -> Any:
    number = value.item()
    return number if np.isfinite(number) else str(number)


def _merged(parts: Iterator[Tensors]) -> Tensors:
    return {name: array for part in parts for name, array in part.items()}


def _layers(env: Any) -> Iterator[Any]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


__all__ = ["RecordEnv", "RecordVectorEnv", "describe", "flatten", "record"]
