"""Messages of the usual shapes become steps by a shorter way, and these are the steps of the longer one."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.fuzzing import made_rows, real_data, real_rows
from tests.platform.formats.mutation import Dice, mutated

from trajlake.errors import FormatError
from trajlake.formats import FORMATS, Record, format_named, open_source
from trajlake.formats.rebuild import Exact

NAMES = [name for name in FORMATS if made_rows(name)]
_SHORTER = ("_usual", "_is_usual")
_OF_CHAT = {"tau-bench", "verifiers", "openai-chat"}
_EXAMPLES = 300


def _longer_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in map(import_module, ("trajlake.formats.chat", FORMATS[name], "trajlake.formats.openhands_v1")):
        for shorter in _SHORTER:
            if hasattr(module, shorter):
                monkeypatch.setattr(module, shorter, lambda *_: None)


def _stored(name: str, path: Path) -> tuple[list[Any], int]:
    """All that the file would put into a lake, in words; and how many steps came by the shorter way."""
    found: list[Any] = []
    exact = 0
    try:
        for item in format_named(name).read(open_source(path)):
            if isinstance(item, Record):
                exact += sum(type(step) is Exact for step in item.steps)
                rows = [{key: row[key] for key in sorted(row) if row[key] is not None} for row in item.rows.steps]
                found.append((item.key, item.rows.begin, rows, item.rows.end, item.source, item.notes))
            else:
                found.append(item)
    except FormatError as error:
        found.append(error)
    return [repr(item) for item in found], exact


@pytest.mark.parametrize("name", NAMES)
def test_the_shorter_way_stores_what_the_longer_one_does(name: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    folder = real_data()
    rows = made_rows(name) + (real_rows(name, folder) if folder else [])
    texts = [json.dumps(row) for row in rows]
    inputs = [*texts, *(json.dumps(mutated(Dice(f"{name} {number}"), texts)) for number in range(_EXAMPLES))]
    exact = 0
    for text in inputs:
        path.write_text(text)
        found, count = _stored(name, path)
        exact += count
        with pytest.MonkeyPatch.context() as patch:
            _longer_way(name, patch)
            wanted, none = _stored(name, path)
        assert found == wanted
        assert none == 0
    if name in _OF_CHAT or any(hasattr(import_module(FORMATS[name]), shorter) for shorter in _SHORTER):
        assert exact > _EXAMPLES // 4
