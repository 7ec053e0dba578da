"""Whatever a trajectory says in any of its fields, no command lets it steer the terminal, or a shell."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trajlake
from trajlake_cli.replay.player import Player

pytestmark = pytest.mark.beam

HOSTILE = (
    "<script>alert(1)</script> \x1b[2J\x1b]0;title\x07\x1b[31mred\x9b2J \u202eevil\u2066\u200f \rover\x08\x00 "
    "[bold]x[/bold] $(touch hacked) `touch hacked` 'q' \"d\"\nforged: line"
)
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
IDS = [f"\x1b[3{number}m{HOSTILE}" for number in range(3)]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> trajlake.Lake:
    """Three episodes of two policies with HOSTILE in every field that takes text; the third is retracted."""
    from trajlake_pipelines.compact import compact

    folder = tmp_path_factory.mktemp("hostile")
    lake = trajlake.create(folder / "lake")
    with lake.writer(run="run", worker="w", spool=folder / "spool") as writer:
        for number, episode_id in enumerate(IDS):
            with writer.episode(
                episode_id=episode_id, group_id=HOSTILE, task_id=HOSTILE, task_family=HOSTILE, domain=HOSTILE,
                difficulty=HOSTILE, env_name=HOSTILE, env_version=HOSTILE, env_snapshot=HOSTILE,
                policy_name=f"{HOSTILE}{number % 2}", policy_version=HOSTILE, agent_name=HOSTILE,
                agent_version=HOSTILE, parent_episode_id=HOSTILE, source_format=HOSTILE, source_hash=HOSTILE,
                tags={HOSTILE: HOSTILE}, extra={HOSTILE: HOSTILE},
            ) as episode:  # fmt: skip
                episode.step(
                    source="agent", message=HOSTILE, reasoning=HOSTILE, model=HOSTILE, error=HOSTILE,
                    policy_version=HOSTILE, extra={HOSTILE: HOSTILE},
                    content_parts=[{"type": HOSTILE, "media_type": HOSTILE, "uri": HOSTILE}, {"text": HOSTILE}],
                    tool_calls=[{"id": HOSTILE, "name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}],
                    tensors={HOSTILE: [1.0]},
                )  # fmt: skip
                episode.step(source="agent", tool_calls=[{"id": "c", "name": HOSTILE, "arguments": HOSTILE}])
                episode.step(source="tool", tool_results=[{"call_id": HOSTILE, "content": HOSTILE, "is_error": True}])
                episode.end(
                    status="completed", success=number == 0, reward=float(number), stop_reason=HOSTILE,
                    rewards=[{"name": HOSTILE, "value": 1.0}], failure_stage="other", failure_detail=HOSTILE,
                )  # fmt: skip
        writer.retract(IDS[2], HOSTILE)
    compact(lake)
    return lake


COMMANDS = [
    ["runs"],
    ["episodes", "--columns", "all"],
    ["episodes"],
    ["show", IDS[0]],
    ["show", IDS[2]],
    ["query", "SELECT * FROM episodes"],
    ["query", "SELECT * FROM steps"],
    ["query", f'SELECT 1 AS "{HOSTILE.replace(chr(34), "")}" FROM episodes'],
    *(["stats", "--by", column] for column in ("task_id", "policy", "domain,env_name,group")),
    ["compare", f"{HOSTILE}0", f"{HOSTILE}1"],
    ["sample", "-n", "2"],
    ["sample", "-n", "1", "--strategy", "group", "--by", "domain"],
    ["lineage", IDS[2]],
    ["segments"],
    ["doctor"],
    ["dedupe"],
    ["vacuum", "--dry-run"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(map(repr, command))[:40])
@pytest.mark.parametrize("output", ["table", "json", "jsonl"])
def test_rows(run: Any, lake: trajlake.Lake, command: list[str], output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run(*command, "-o", output, "--lake", lake.uri)
    assert not STEERS.search(result.stdout)
    assert not STEERS.search(result.stderr)
    assert not any(line.startswith("forged") for line in (result.stdout + result.stderr).splitlines())
    if output == "json":
        json.loads(result.stdout)
    if output == "table":
        assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_replay(run: Any, lake: trajlake.Lake) -> None:
    for arguments in ([IDS[0]], [IDS[2]], ["--where", "true", "--max-chars", "0"]):
        text = run("replay", *arguments, "--lake", lake.uri).stdout
        assert not STEERS.search(text)
        assert "<script>alert(1)</script>" in text
        assert "retracted  because: <script>" in text or arguments == [IDS[0]]
    trajectories = list(lake.snapshot().trajectories(IDS))
    player = Player(3, trajectories.__getitem__)
    for keys in ("", "n", "n", "]", "]", "/", HOSTILE, "\r", "?"):
        for key in keys:
            player.press(key)
        for line in player.screen(80, 24):
            assert not STEERS.search(line.plain)
            assert line.cell_len <= 80


@pytest.mark.parametrize(
    "command",
    [
        ["show", "\x1b"],
        ["show", HOSTILE],
        ["lineage", HOSTILE],
        ["replay", HOSTILE],
        ["episodes", "--where", HOSTILE],
        ["episodes", "--columns", HOSTILE],
        ["episodes", "--run", HOSTILE],
        ["episodes", "--snapshot", HOSTILE],
        ["query", HOSTILE],
        ["query", f'SELECT "{HOSTILE.replace(chr(34), "")}" FROM episodes'],
        ["stats", "--by", HOSTILE],
        ["compare", HOSTILE, "b"],
        ["compare", f"{HOSTILE}0", HOSTILE, "--by", "policy"],
        ["sample", "--from", HOSTILE.replace("\x00", "")],
        ["sample", "--strategy", "stratified", "--ratio", f"x{HOSTILE}=1"],
        ["sample", "--strategy", HOSTILE],
        ["episodes", "--limit", HOSTILE],
        ["stats", "--pass-k", HOSTILE],
        [HOSTILE],
        ["runs", f"--{HOSTILE}"],
    ],
    ids=lambda command: " ".join(map(repr, command))[:40],
)
def test_errors(run: Any, lake: trajlake.Lake, command: list[str]) -> None:
    result = run("--lake", lake.uri, *command, code=2 if _is_usage(command) else 1)
    assert not STEERS.search(result.stderr)
    assert result.stdout == ""
    assert "unexpected" not in result.stderr


def _is_usage(command: list[str]) -> bool:
    return (
        command[0] == HOSTILE
        or command[1] in ("--limit", "--pass-k", f"--{HOSTILE}")
        or command[1:]
        == [
            "--strategy",
            HOSTILE,
        ]
    )


def test_csv_on_a_terminal(lake: trajlake.Lake) -> None:
    master, slave = pty.openpty()
    program = "from trajlake_cli.main import main; main()"
    arguments = ["query", f'SELECT task_id AS "{HOSTILE[:40]}" FROM episodes', "-o", "csv", "--lake", lake.uri]
    with subprocess.Popen([sys.executable, "-c", program, *arguments], stdin=slave, stdout=slave, stderr=slave) as one:
        os.close(slave)
        seen = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(master, 65536):
                seen += data
        assert one.wait(60) == 0
    os.close(master)
    text = seen.decode().replace("\r\n", "\n")
    assert "<script>" in text
    assert not STEERS.search(text)


def test_commands_that_are_suggested_are_safe_to_paste(run: Any, lake: trajlake.Lake) -> None:
    compared = run("compare", f"{HOSTILE}0", f"{HOSTILE}1", "--lake", lake.uri).stderr
    shown = run("show", IDS[0], "--lake", lake.uri).stderr
    for text, words in ((compared, 4), (shown, 3)):
        (line,) = (line for line in text.splitlines() if "trajlake replay" in line)
        parts = shlex.split(line[line.index("trajlake replay") :])
        assert len(parts) == words, "what came from outside is one word, in quotes that expand nothing"
        assert "$(touch hacked)" in parts[-1]


def test_a_manifest_and_its_batch_warn_of_what_was_retracted_since(
    run: Any, tmp_path: Path, lake: trajlake.Lake
) -> None:
    from trajlake_pipelines.compact import compact

    other = trajlake.create(tmp_path / "lake")
    with other.writer(run="run", worker="w", spool=tmp_path / "spool") as writer:
        for number in range(2):
            with writer.episode(episode_id=f"e{number}") as episode:
                episode.step(message="x")
    compact(other)
    manifest = tmp_path / "m.json"
    first = run("sample", "--strategy", "epochs", "-n", 2, "--manifest", manifest, "--lake", other.uri, "-o", "json")
    with other.writer(run="later", worker="w", spool=tmp_path / "spool") as writer:
        writer.retract("e1", HOSTILE)
    compact(other)
    again = run("sample", "--from", manifest, "--lake", other.uri, "-o", "json")
    assert again.stdout == first.stdout, "a manifest is what was drawn, for ever"
    assert "warning: episode e1 is in this batch, but was retracted since, because: <script>" in again.stderr
    assert not STEERS.search(again.stderr)
    for command in (["show", "e1"], ["lineage", "e1"]):
        assert "episode e1 is retracted, because: <script>" in run(*command, "--lake", other.uri).stderr


def test_an_episode_that_was_retracted_for_good_is_said_to_be(run: Any, tmp_path: Path) -> None:
    from trajlake_pipelines.compact import compact
    from trajlake_pipelines.retract import retract

    other = trajlake.create(tmp_path / "lake")
    with other.writer(run="run", worker="w", spool=tmp_path / "spool") as writer:
        for number in range(2):
            with writer.episode(episode_id=f"e{number}") as episode:
                episode.step(message="x")
    compact(other)
    manifest = tmp_path / "m.json"
    run("sample", "--strategy", "epochs", "-n", 2, "--manifest", manifest, "--lake", other.uri)
    retract(other, ["e1"], reason=HOSTILE, for_good=True)
    for command in (["show", "e1"], ["replay", "e1"], ["sample", "--from", str(manifest)]):
        error = run(*command, "--lake", other.uri, code=1).stderr
        assert "episode e1 was retracted for good, because: <script>" in error
        assert not STEERS.search(error)
    uses = run("lineage", "e1", "--lake", other.uri, "-o", "json")
    assert [use["name"] for use in json.loads(uses.stdout)] == [str(manifest)]
    assert "retracted for good, because: <script>" in uses.stderr
    assert "no episode e2" in run("lineage", "e2", "--lake", other.uri, code=1).stderr
