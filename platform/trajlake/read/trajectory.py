"""One episode in the reader's hands, with the values as the source had them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajlake.ingest.arrays import element_type


@dataclass(frozen=True)
class Trajectory:
    """An episode's row and its steps in order; keys are the columns of docs/schema.md."""

    episode: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def episode_id(self) -> str:
        return str(self.episode["episode_id"])

    def tensor(self, step: int, name: str) -> np.ndarray[Any, Any]:
        """One recorded array, with its dtype and shape. Raises KeyError where the step has none of that name."""
        for row in self.steps[step]["tensors"] or ():
            if row["name"] == name:
                return to_array(row)
        raise KeyError(name)


def to_array(row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A `tensors` entry as a numpy array (a read-only view of its bytes)."""
    return np.frombuffer(row["data"], element_type(row["dtype"])).reshape(row["shape"])


def restored(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with the originals that its `restore` column keeps put back; tags become a dict."""
    row = dict(row)
    if tags := row.get("tags"):  # as Arrow gives them, or Polars; a path into them counts pairs
        row["tags"] = [list(pair) for pair in (tags.items() if isinstance(tags, dict) else tags)]
    text = row.pop("restore", None)
    if text:
        for path, original in json.loads(text).items():
            _put(row, path.split("."), _decoded(original))
    if row.get("parent_step", 0) is None and '"begins_anew":true' in (row.get("extra") or ""):
        row["parent_step"] = -1  # as the first writers said it
    if row.get("tags") is not None:
        row["tags"] = dict(row["tags"])
    return row


def _decoded(original: Any) -> Any:
    if isinstance(original, dict) and set(original) == {"wtf8"}:
        return base64.b64decode(original["wtf8"]).decode("utf-8", "surrogatepass")
    return original


def _put(target: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if isinstance(target, list):
        target[int(path[-1])] = value
    else:
        target[path[-1]] = value
