"""Classic RL in arrays: Minari datasets (HDF5 or Arrow), `rollouts/final.npz` of imitation, `evaluations.npz` of SB3.

https://minari.farama.org/content/dataset_standards/ , https://github.com/HumanCompatibleAI/imitation
(`data/serialize.py`) and https://github.com/DLR-RM/stable-baselines3 (`EvalCallback`). One action is one step; of N + 1
observations the last is the last step's `final_observation`. Arrays of objects are pickles: they are never loaded.
"""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from tokenize import TokenError
from typing import Any, cast

import numpy as np
import pyarrow as pa

from trajlake.errors import FormatError
from trajlake.formats.archive import is_archive, open_archive
from trajlake.formats.base import Format, Record, Refused
from trajlake.formats.rebuild import Exact
from trajlake.formats.source import Source
from trajlake.ingest.arrays import Row, tensor_rows
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields

Array = np.ndarray[Any, Any]

_HDF5 = b"\x89HDF\r\n\x1a\n"
_ARROW = b"ARROW1"
_IMITATION = ("obs", "acts", "terminal", "indices")
_EVALUATIONS = ("timesteps", "results", "ep_lengths")
_ARROW_COLUMNS = {"episode_id", "observations", "actions", "rewards", "terminations", "truncations"}
_ENDS = ("rewards", "terminations", "truncations")
_LONGEST_HEADER = 10_000  # bytes of an array's header, as numpy allows
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_NO_HEADER = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    SyntaxError,
    TokenError,
    RecursionError,
    MemoryError,
)
"""What numpy raises for a header that is none: it parses Python's syntax."""


def _detect(source: Source) -> bool:
    if source.head.startswith(_HDF5):
        return True
    if source.head.startswith(_ARROW):
        return _arrow_names(source) >= _ARROW_COLUMNS
    if not is_archive(source):
        return False
    try:
        with open_archive(source) as archive:
            names = archive.names
    except FormatError:
        return b".npy" in source.head[:256]  # reading it says what is wrong
    return bool(names) and all(name.endswith(".npy") for name in names)


def _read(source: Source) -> Iterator[Record | Refused]:
    if source.head.startswith(_HDF5):
        return _read_hdf5(source)
    if source.head.startswith(_ARROW):
        return _read_arrow(source)
    if is_archive(source):
        return _read_npz(source)
    raise FormatError(f"{source.path}: neither HDF5 nor Arrow nor .npz")


# -- .npz --------------------------------------------------------------------------------------------------------


def _read_npz(source: Source) -> Iterator[Record | Refused]:
    arrays: dict[str, Array] = {}
    skipped: dict[str, str] = {}
    with open_archive(source) as archive:
        for name in archive.names:
            try:
                arrays[name.removesuffix(".npy")] = _array(archive.read(name))
            except FormatError as error:
                skipped[name.removesuffix(".npy")] = str(error)
    for names, read in ((_IMITATION, _read_imitation), (_EVALUATIONS, _read_evaluations)):
        if set(names) <= arrays.keys() | skipped.keys():
            if lost := [name for name in names if name in skipped]:
                raise FormatError(f"{source.path}: its array {lost[0]!r}: {skipped[lost[0]]}")
            yield from read(source, arrays, {"not_read": skipped} if skipped else {})
            return
    found = ", ".join(map(repr, [*arrays, *skipped][:8]))
    raise FormatError(
        f"{source.path}: arrays of no layout that is known (it has {found}); known are imitation's rollouts "
        f"({', '.join(_IMITATION)}) and Stable-Baselines3's evaluations ({', '.join(_EVALUATIONS)})"
    )


def _array(data: bytes) -> Array:
    """The array in a `.npy` member: only plain elements, and as many as there are bytes for."""
    file = io.BytesIO(data)
    try:
        with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise FormatError("its .npy version is neither 1.0 nor 2.0")
            shape, fortran, dtype = _HEADERS[version](file, max_header_size=_LONGEST_HEADER)
    except _NO_HEADER as error:
        raise FormatError(f"not an array of NumPy: {error}") from error
    if dtype.hasobject:
        raise FormatError("an array of objects is a pickle, which can run any code: it is never loaded")
    if dtype.names is not None or dtype.kind == "V":
        raise FormatError(f"elements of dtype {dtype} are not read")
    rest = memoryview(data)[file.tell() :]
    count = 1
    for length in shape:
        count *= length
    if min(shape, default=1) < 0 or count * dtype.itemsize != len(rest):
        raise FormatError(f"its shape {shape} does not fit its {len(rest)} bytes")
    flat = np.frombuffer(rest, dtype) if dtype.itemsize else np.zeros(count, dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def _read_imitation(
    source: Source, arrays: Mapping[str, Array], extra: Mapping[str, Any]
) -> Iterator[Record | Refused]:
    obs, acts, terminal = arrays["obs"], arrays["acts"], arrays["terminal"]
    ends, rewards = arrays["indices"], arrays.get("rews")
    if min(obs.ndim, acts.ndim) < 1 or terminal.ndim != 1 or ends.ndim != 1 or ends.dtype.kind not in "iu":
        raise FormatError(f"{source.path}: its arrays are not those of rollouts: {_shapes(arrays)}")
    bounds = [0, *map(int, ends), len(acts)]
    rising = all(start <= stop for start, stop in pairwise(bounds))
    if len(terminal) != len(bounds) - 1 or len(obs) != len(acts) + len(terminal) or not rising:
        raise FormatError(
            f"{source.path}: of {len(terminal)} episodes with {len(acts)} actions there must be "
            f"{len(acts) + len(terminal)} observations and {max(len(terminal) - 1, 0)} rising indices: "
            f"{_shapes(arrays)}"
        )
    if rewards is not None and rewards.shape != (len(acts),):
        raise FormatError(f"{source.path}: its rewards are not one an action: {_shapes(arrays)}")
    for number, (start, stop) in enumerate(pairwise(bounds)):
        ended = bool(terminal[number])
        yield _episode(
            f"episode {number}",
            obs[start + number : stop + number + 1],
            acts[start:stop],
            None if rewards is None else rewards[start:stop],
            # An episode that did not end was cut off, which is all that the file tells.
            (ended, not ended),
            {"extra": dict(extra)} if extra and not number else {},
        )


def _read_evaluations(
    source: Source, arrays: Mapping[str, Array], extra: Mapping[str, Any]
) -> Iterator[Record | Refused]:
    steps, results, lengths = (arrays[name] for name in _EVALUATIONS)
    successes = arrays.get("successes")
    shape = results.shape
    good = steps.ndim == 1 and results.ndim == 2 and len(steps) == len(results) and lengths.shape == shape
    whole = steps.dtype.kind in "iu" and lengths.dtype.kind in "iu" and results.dtype.kind in "iuf"
    if not good or not whole or (successes is not None and successes.shape != shape):
        raise FormatError(f"{source.path}: its arrays are not those of evaluations: {_shapes(arrays)}")
    for row, step in enumerate(steps):
        for trial in range(shape[1]):
            end: EndFields = {"reward": float(results[row, trial])}
            if successes is not None:
                end["success"] = bool(successes[row, trial])
            begin: dict[str, Any] = {"policy_version": int(step), "trial": trial}
            begin["extra"] = {"l": int(lengths[row, trial]), **({} if row or trial else extra)}
            yield Record(f"evaluation {row} episode {trial}", cast(EpisodeFields, begin), [], end)


# -- Minari ------------------------------------------------------------------------------------------------------


def _read_hdf5(source: Source) -> Iterator[Record | Refused]:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise FormatError(
            f"{source.path}: an HDF5 file, which is read as a Minari dataset with h5py: pip install 'trajlake[minari]'"
        ) from None
    try:
        with h5py.File(source.path, "r") as file:
            names = [name for name in file if name.startswith("episode_") and name[8:].isdigit()]
            if not names:
                raise FormatError(f"{source.path}: an HDF5 file without groups episode_0, …: not a Minari dataset")
            for name in sorted(names, key=lambda name: int(name[8:])):
                try:
                    yield _hdf5_episode(h5py, name, file[name])
                except (OSError, RuntimeError, LookupError, TypeError, ValueError, FormatError) as error:
                    yield Refused(name, f"not an episode of Minari: {error}")
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"{source.path}: a damaged HDF5 file: {error}") from error


def _hdf5_episode(h5py: Any, name: str, group: Any) -> Record:
    attributes = {key: _plain(value) for key, value in group.attrs.items()}
    begin: dict[str, Any] = {}
    if isinstance(attributes.get("seed"), int):
        begin["seed"] = attributes.pop("seed")
    infos: dict[str, Any] = {}
    if "infos" in group:
        infos = {key: value for key, value in _leaves(h5py, group["infos"], "infos") if isinstance(value, np.ndarray)}
    if attributes or infos:
        begin["extra"] = {**attributes, **({"infos": infos} if infos else {})}
    return _arrays_episode(
        name,
        dict(_leaves(h5py, group["observations"], "observation")),
        dict(_leaves(h5py, group["actions"], "action")),
        [np.asarray(group[part]) for part in _ENDS],
        begin,
    )


def _leaves(h5py: Any, node: Any, path: str) -> Iterator[tuple[str, Array]]:
    """The arrays below a node, by path: a space of a Dict or Tuple is a group."""
    if isinstance(node, h5py.Dataset):
        if node.size * max(node.dtype.itemsize, 1) > 1 << 30:
            raise FormatError(f"its array {path} is larger than 1 GiB")
        array = np.asarray(node[()])
        if array.dtype.hasobject:
            array = np.array([item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel()])
        yield path, array
        return
    for name in node:
        yield from _leaves(h5py, node[name], f"{path}/{name.removeprefix('_index_')}")


def _arrow_names(source: Source) -> set[str]:
    try:
        with pa.memory_map(str(source.path)) as file:
            return set(pa.ipc.open_file(file).schema.names)
    except (pa.ArrowException, OSError, ValueError):
        return set()


def _read_arrow(source: Source) -> Iterator[Record | Refused]:
    """One file of a Minari dataset in Arrow: one episode, its last row of actions and rewards a filling."""
    try:
        with pa.memory_map(str(source.path)) as file:
            table = pa.ipc.open_file(file).read_all()
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{source.path}: a damaged Arrow file: {error}") from error
    if not _ARROW_COLUMNS - {"episode_id"} <= set(table.column_names):
        raise FormatError(f"{source.path}: an Arrow file with other columns than a Minari dataset")
    try:
        yield _arrays_episode(
            "episode",
            dict(_columns(table["observations"], "observation")),
            dict(_columns(table["actions"].slice(0, max(len(table) - 1, 0)), "action")),
            [table[name].to_numpy()[:-1] for name in _ENDS],
            {},
        )
    except (pa.ArrowException, TypeError, ValueError, FormatError) as error:
        yield Refused("episode", f"not an episode of Minari: {error}")


def _columns(column: pa.ChunkedArray, path: str) -> Iterator[tuple[str, Array]]:
    if pa.types.is_struct(column.type):
        flat = column.combine_chunks()
        for position, field in enumerate(column.type):
            yield from _columns(pa.chunked_array([flat.field(position)]), f"{path}/{field.name}")
    elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        raise FormatError("its images are JPEG; write the dataset without jpeg_encoding")
    else:
        yield path, np.array(column.to_pylist())


def _arrays_episode(
    key: str,
    observations: Mapping[str, Array],
    actions: Mapping[str, Array],
    ends_of_steps: Sequence[Array],
    begin: Mapping[str, Any],
) -> Record:
    rewards, terminations, truncations = ends_of_steps
    length = len(rewards)
    if (
        len(terminations) != length
        or len(truncations) != length
        or any(len(item) != length for item in actions.values())
    ):
        raise FormatError(f"actions, rewards and ends differ in number: {length} rewards")
    if any(len(item) != length + 1 for item in observations.values()):
        raise FormatError(f"of {length} actions there must be {length + 1} observations")
    ends = (bool(terminations[-1]), bool(truncations[-1])) if length else (False, False)
    return _episode(key, observations, actions, rewards, ends, begin)


def _episode(
    key: str,
    observations: Array | Mapping[str, Array],
    actions: Array | Mapping[str, Array],
    rewards: Array | None,
    ends: tuple[bool, bool],
    begin: Mapping[str, Any],
) -> Record:
    """`ends`: whether the last step terminated the episode, and whether it was truncated."""
    seen = observations if isinstance(observations, Mapping) else {"observation": observations}
    done = actions if isinstance(actions, Mapping) else {"action": actions}
    steps = _number_steps(seen, done, rewards)
    if steps is None:
        steps = _steps(seen, done, rewards)
    if steps:
        steps[-1]["terminated"], steps[-1]["truncated"] = ends
    end: EndFields = {"terminated": ends[0], "truncated": ends[1]}
    if rewards is not None:
        end["reward"] = float(np.sum(rewards, dtype=np.float64))
    return Record(key, cast(EpisodeFields, dict(begin)), steps, end)


def _steps(seen: Mapping[str, Array], done: Mapping[str, Array], rewards: Array | None) -> list[StepFields]:
    count = len(next(iter(done.values())))
    steps: list[StepFields] = []
    for index in range(count):
        tensors = {name: array[index] for name, array in {**seen, **done}.items()}
        step: StepFields = {"source": "agent", "tensors": tensors, "terminated": False, "truncated": False}
        if rewards is not None:
            step["reward"] = float(rewards[index])
        steps.append(step)
    if steps:
        final = {f"final_{name}": array[count] for name, array in seen.items()}
        steps[-1]["tensors"] = {**(steps[-1].get("tensors") or {}), **final}
    return steps


def _number_steps(
    seen: Mapping[str, Array], done: Mapping[str, Array], rewards: Array | None
) -> list[StepFields] | None:
    """The steps as they are stored, where all arrays hold numbers, which are then checked once an array and not once
    a step; else None."""
    if rewards is not None and (rewards.ndim != 1 or rewards.dtype.kind not in "biuf"):
        return None
    columns: list[list[Row]] = []
    for name, array in {**seen, **done}.items():
        if (rows := tensor_rows(name, array)) is None:
            return None
        columns.append(rows)
    said = {"source": "agent", "terminated": False, "truncated": False}
    # An observation has one item more than there are actions, and so than there are steps.
    steps = [Exact(said, tensors=list(tensors)) for tensors in zip(*columns, strict=False)]
    if rewards is not None:
        for step, reward in zip(steps, rewards.tolist(), strict=True):
            step["reward"] = float(reward)
    if steps:
        final = zip(columns, seen, strict=False)
        steps[-1]["tensors"] += [{**rows[-1], "name": f"final_{name}"} for rows, name in final]
    return cast(list[StepFields], steps)


def _plain(value: Any) -> Any:
    return (
        value.tolist()
        if isinstance(value, (np.ndarray, np.generic))
        else str(value)
        if isinstance(value, bytes)
        else value
    )


def _shapes(arrays: Mapping[str, Array]) -> str:
    found: Sequence[str] = [f"{name} {array.shape}" for name, array in arrays.items()]
    return ", ".join(found[:8])


FORMAT = Format(
    name="minari",
    description="arrays: Minari (HDF5 with h5py, Arrow), imitation's rollouts .npz, SB3's evaluations.npz",
    detect=_detect,
    read=_read,
)
