"""Arrays of classic RL: steps with tensors, one final observation; pickles are never loaded."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajlake.errors import FormatError
from trajlake.formats import Record, Refused, detect, format_named, open_source
from trajlake.formats.rebuild import stored

pytestmark = pytest.mark.unit

LOADED: list[str] = []


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return (LOADED.append, ("unpickled",))


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def rollouts(**changes: Any) -> bytes:
    """Two episodes of 2 and 3 actions, as imitation writes them."""
    arrays = {
        "obs": np.arange(14, dtype=np.float32).reshape(7, 2),
        "acts": np.array([0, 1, 0, 1, 1]),
        "rews": np.array([1.0, 0.5, 1.0, 1.0, -2.0]),
        "indices": np.array([2]),
        "terminal": np.array([True, False]),
        "infos": np.array([Trap()] * 5, dtype=object),
    }
    return npz(**{name: array for name, array in {**arrays, **changes}.items() if array is not None})


def array(tensors: Any, name: str) -> Any:
    [row] = [tensor for tensor in tensors if tensor["name"] == name]
    return np.frombuffer(row["data"], row["dtype"]).reshape(row["shape"])


def test_an_action_is_a_step_and_the_last_has_the_final_observation(put: Any, run_import: Any) -> None:
    imported = run_import(put(rollouts()))
    [file] = imported.report.files
    assert (file.format, file.episodes, file.steps, file.error) == ("minari", 2, 5, None)
    assert [step["reward"] for step in imported.steps] == [1.0, 0.5, 1.0, 1.0, -2.0]
    assert [array(step["tensors"], "observation").tolist() for step in imported.steps] == [
        *([0.0, 1.0], [2.0, 3.0]),
        *([6.0, 7.0], [8.0, 9.0], [10.0, 11.0]),
    ]
    assert array(imported.steps[1]["tensors"], "final_observation").tolist() == [4.0, 5.0]
    assert [array(step["tensors"], "action").item() for step in imported.steps] == [0, 1, 0, 1, 1]
    assert imported.steps[0]["tensors"][0]["dtype"] == "float32"
    assert [(step["terminated"], step["truncated"]) for step in imported.steps] == [
        *((False, False), (True, False)),
        *((False, False), (False, False), (False, True)),
    ]
    assert [(end["reward"], end["terminated"], end["truncated"]) for end in imported.ends] == [
        (1.5, True, False),
        (0.0, False, True),
    ]


def test_arrays_of_objects_are_never_loaded_and_said(put: Any, run_import: Any) -> None:
    LOADED.clear()
    imported = run_import(put(rollouts()))
    assert "infos" in json.loads(imported.begins[0]["extra"])["not_read"]
    [file] = run_import(put(rollouts(acts=np.array([Trap()] * 5, dtype=object)))).report.files
    assert "its array 'acts': an array of objects is a pickle" in str(file.error)
    assert file.episodes == 0
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as zipped:
        for name in ("obs", "acts", "terminal", "indices"):
            zipped.writestr(f"{name}.npy", pickle.dumps(Trap()))
    [file] = run_import(put(raw.getvalue())).report.files
    assert "not an array of NumPy" in str(file.error)
    assert LOADED == []


@pytest.mark.parametrize(
    "changes",
    [
        {"obs": np.zeros((5, 2))},  # N observations for N actions
        {"obs": np.zeros((8, 2))},
        {"indices": np.array([2, 3])},
        {"indices": np.array([9])},
        {"indices": np.array([-1])},
        {"indices": np.array([0.5])},
        {"rews": np.zeros(4)},
        {"terminal": np.array([True])},
        {"acts": np.array(3)},
    ],
)
def test_arrays_that_do_not_fit_together_refuse_the_file(put: Any, run_import: Any, changes: dict[str, Any]) -> None:
    [file] = run_import(put(rollouts(**changes))).report.files
    assert (file.episodes, file.error is not None) == (0, True)


def test_an_episode_without_actions_and_rollouts_without_rewards(put: Any, run_import: Any) -> None:
    data = npz(obs=np.zeros((1, 2)), acts=np.zeros(0), indices=np.zeros(0, int), terminal=np.array([False]))
    imported = run_import(put(data))
    assert (imported.report.episodes, imported.report.steps) == (1, 0)
    assert imported.ends[0]["reward"] is None


def test_evaluations_are_episodes_of_a_version_each(put: Any, run_import: Any) -> None:
    data = npz(
        timesteps=np.array([1000, 2000]),
        results=np.array([[1.0, 2.0], [3.0, np.nan]]),
        ep_lengths=np.array([[5, 6], [7, 8]]),
        successes=np.array([[True, False], [True, True]]),
    )
    imported = run_import(put(data))
    assert [json.loads(begin["restore"])["policy_version"] for begin in imported.begins] == [1000, 1000, 2000, 2000]
    assert [begin["trial"] for begin in imported.begins] == [0, 1, 0, 1]
    assert [json.loads(begin["extra"])["l"] for begin in imported.begins] == [5, 6, 7, 8]
    assert [end["reward"] for end in imported.ends][:3] == [1.0, 2.0, 3.0]
    assert [end["success"] for end in imported.ends] == [True, False, True, True]


def test_other_arrays_say_what_is_known(put: Any, run_import: Any) -> None:
    [file] = run_import(put(npz(weights=np.zeros(3)))).report.files
    assert "known are imitation's rollouts (obs, acts, terminal, indices)" in str(file.error)


def test_a_header_that_promises_more_than_there_is(put: Any, run_import: Any) -> None:
    header = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999, 9), }".ljust(117)
        + b"\n"
    )
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as zipped:
        for name in ("obs", "acts", "terminal", "indices"):
            zipped.writestr(f"{name}.npy", header + bytes(80))
    [file] = run_import(put(raw.getvalue())).report.files
    assert "does not fit its 80 bytes" in str(file.error)


@pytest.mark.parametrize(
    "text",
    ["{'shape'u°(", "()", "{'descr': (), 'fortran_order': False, 'shape': (10,)}", "[" * 300, "{'descr': '<f8'"],
)
def test_a_header_that_is_none_refuses_the_file(put: Any, run_import: Any, text: str) -> None:
    header = text.encode("latin-1").ljust(1000) + b"\n"
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as zipped:
        for name in ("obs", "acts", "terminal", "indices"):
            zipped.writestr(
                f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(80)
            )
    [file] = run_import(put(raw.getvalue())).report.files
    assert "its array 'obs': not an array of NumPy" in str(file.error)


# -- Minari ------------------------------------------------------------------------------------------------------


def arrow(**changes: Any) -> bytes:
    columns: dict[str, Any] = {
        "episode_id": pa.array([0, 0, 0], pa.int32()),
        "observations": pa.StructArray.from_arrays(
            [pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2), pa.array([1, 2, 3])], ["position", "mode"]
        ),
        "actions": pa.array([[0.5], [0.25], [0.0]], pa.list_(pa.float32())),
        "rewards": [1.0, 2.0, 0.0],
        "terminations": [False, True, False],
        "truncations": [False, False, False],
    }
    table = pa.table({**columns, **changes})
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def test_a_file_of_arrow_is_an_episode(put: Any, run_import: Any) -> None:
    imported = run_import(put(arrow()))
    assert (imported.report.files[0].format, imported.report.steps) == ("minari", 2)
    first, last = imported.steps
    assert array(first["tensors"], "observation/position").tolist() == [0.0, 1.0]
    assert array(last["tensors"], "final_observation/mode").item() == 3
    assert array(last["tensors"], "action").tolist() == [0.25]
    assert (imported.ends[0]["reward"], imported.ends[0]["terminated"]) == (3.0, True)


def test_images_in_jpeg_and_other_arrow_are_refused(put: Any, run_import: Any) -> None:
    [file] = run_import(put(arrow(observations=pa.array([b"x", b"y", b"z"])))).report.files
    assert "JPEG" in file.refusals[0].reason
    with pytest.raises(FormatError, match="an Arrow file"):
        detect(put(arrow(rewards=[1.0, 2.0, 0.0])[:40] + b""))


def test_hdf5_without_its_library_says_what_to_install(put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    path = put(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert detect(path).name == "minari"
    with pytest.raises(FormatError, match=r"pip install 'trajlake\[minari\]'"):
        list(format_named("minari").read(open_source(path)))


def write_hdf5(path: Path) -> None:
    """Three episodes of two actions, of which the second lacks its rewards."""
    import h5py

    with h5py.File(path, "w") as file:
        for number in (0, 10, 2):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "seed": 7, "total_steps": 2})
            group.create_group("observations")["position"] = np.arange(6.0).reshape(3, 2) + number
            group["actions"] = np.array([1, 0])
            group["rewards"] = np.array([1.0, 2.0])
            group["terminations"] = np.array([False, False])
            group["truncations"] = np.array([False, True])
            group.create_group("infos")["x"] = np.zeros(3)
        del file["episode_2/rewards"]


def test_hdf5_groups_are_episodes(tmp_path: Path, run_import: Any) -> None:
    pytest.importorskip("h5py", reason="h5py is optional")
    path = tmp_path / "main_data.hdf5"
    write_hdf5(path)
    imported = run_import(path)
    [report] = imported.report.files
    assert (report.episodes, report.steps, [refused.row for refused in report.refusals]) == (2, 4, ["episode_2"])
    assert imported.begins[0]["seed"] == 7
    assert json.loads(imported.begins[1]["extra"])["id"] == 10
    assert array(imported.steps[3]["tensors"], "final_observation/position").tolist() == [14.0, 15.0]
    assert (imported.ends[0]["terminated"], imported.ends[0]["truncated"]) == (False, True)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_give_episodes_and_refusals(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(data.draw(st.sampled_from([rollouts(), arrow()])))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / "file"
    path.write_bytes(bytes(content))
    LOADED.clear()
    with suppress(FormatError):
        detect(path)
    with suppress(FormatError):
        for item in format_named("minari").read(open_source(path)):
            assert isinstance(item, (Record, Refused))
            if isinstance(item, Record):
                stored(item)
    assert LOADED == []
