"""Certify proves that files come out as they went in, and says where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import trajlake.formats.tau_bench
from trajlake.formats import format_named
from trajlake_pipelines.certify import Certificate, certify

pytestmark = pytest.mark.beam

ROW = {
    "task_id": 17,
    "reward": 1,
    "info": {"user_cost": 0.5, "big": 2**70, "odd": "\ud800", "nan": float("nan")},
    "traj": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}, "type": "other"}]},
        {"role": "tool", "content": {"a": [1]}, "name": None},
    ],
    "trial": None,
}


def one(path: Path) -> Certificate:
    [found] = certify([path])
    return found


@pytest.mark.parametrize("layout", ["array", "indented", "lines"])
def test_a_file_that_comes_out_as_it_went_in_is_equal(tmp_path: Path, layout: str) -> None:
    rows = [{**ROW, "trial": trial} for trial in range(12)] + [ROW]
    path = tmp_path / "rows.json"
    texts = {
        "array": json.dumps(rows),
        "indented": json.dumps(rows, indent=1),
        "lines": "\n".join(map(json.dumps, rows)),
    }
    path.write_text(texts[layout])
    found = one(path)
    assert (found.format, found.episodes, found.steps, found.refused) == ("tau-bench", 13, 39, 0)
    assert (found.equal, found.reason) == (True, "")
    assert found.typed_share is not None
    assert 0.1 < found.typed_share < 0.9


def test_files_that_are_no_trajectories_have_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("notes")
    (tmp_path / "b.json").write_text(json.dumps([ROW]))
    unknown, known = certify([tmp_path])
    assert (unknown.equal, unknown.typed_share) == (None, None)
    assert "not a format that is known" in unknown.reason
    assert known.equal


def test_a_row_that_does_not_come_in_is_no_success(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW, {**ROW, "reward": "high"}]))
    found = one(path)
    assert (found.equal, found.episodes, found.refused) == (False, 1, 1)
    assert "`reward` is not a number" in found.reason


def test_a_format_that_forgets_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = format_named("tau-bench")
    write = honest.write
    assert write is not None

    for dishonest, reason in (
        (
            replace(honest, write=lambda episodes: iter([b"".join(write(episodes)).replace(b'"hi"', b'"ho"')])),
            'row 1: ["traj", 0, "content"] differs',
        ),
        (replace(honest, write=lambda episodes: iter([b"[]"])), "it has rows that did not come out"),
        (replace(honest, write=lambda episodes: write(list(episodes) * 2)), "rows came out"),
        (replace(honest, write=None), "has no way back"),
    ):
        monkeypatch.setattr(trajlake.formats.tau_bench, "FORMAT", dishonest)
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([ROW]))
        found = one(path)
        assert found.equal is (None if dishonest.write is None else False)
        assert reason in found.reason


FORMATS = ("tau-bench", "tau2-bench", "swe-agent", "mini-swe-agent", "openhands", "verifiers", "intercode")
FOLDERS = ("tau-bench", "tau2-bench", "swe-agent", "mini-swe-agent-pr816", "openhands", "verifiers", "intercode")


def test_every_real_file_is_equal(realdata: Path) -> None:
    found = list(certify([realdata / folder for folder in FOLDERS]))
    importable = [certificate for certificate in found if certificate.format in FORMATS and certificate.episodes]
    assert {certificate.format for certificate in importable} == set(FORMATS)
    assert [certificate for certificate in importable if not certificate.equal] == []
