"""Files with any bytes, and what comes out of a lake's landing after an import."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trajlake.formats.importing import ImportReport, import_files
from trajlake.ingest.segment import decode_segment
from trajlake.ingest.writer import Writer
from trajlake.storage import open_store

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """`put(content, name="rows.json")` writes bytes, text, or anything else as JSON."""

    def put(content: Any, name: str = "rows.json") -> Path:
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, (bytes, str)):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


@dataclass
class Imported:
    """The events of an import, by kind, in the order of recording."""

    report: ImportReport
    begins: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    ends: list[dict[str, Any]]
    episode_ids: list[str]


@pytest.fixture
def run_import(tmp_path: Path) -> Callable[..., Imported]:
    """`run_import(*paths, **arguments)` imports through a Writer, and reads landing by another way than the product."""
    count = 0

    def run(*paths: Path, run: str = "run", **arguments: Any) -> Imported:
        nonlocal count
        count += 1
        store = open_store(str(tmp_path / f"lake-{count}"))
        with Writer(store, run, "import-1", spool=tmp_path / f"spool-{count}") as writer:
            report = import_files(writer, paths, **arguments)
            keys = [info.key for info in store.list("landing/") if info.key.endswith(".arrow")]
            events = [event for key in keys for event in decode_segment(store.get(key), key).to_pylist()]
        kinds = {kind: [event[kind] for event in events if event["kind"] == kind] for kind in ("begin", "step", "end")}
        assert sum(end["n_steps"] for end in kinds["end"]) == len(kinds["step"])
        ids = [event["episode_id"] for event in events if event["kind"] == "begin"]
        return Imported(report, kinds["begin"], kinds["step"], kinds["end"], ids)

    return run
