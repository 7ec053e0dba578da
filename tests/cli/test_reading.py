"""The commands that read, on a small lake with everything in it."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import trajlake
from trajlake_cli.progress import progress

pytestmark = pytest.mark.beam

FASTPARQUET_LEAVES_FILES_OPEN = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def ask(run: Any, full_lake: str) -> Any:
    """`ask("runs")`: the result of a command on the small lake."""

    def asked(command: str, *args: object, **options: Any) -> Any:
        return run(command, *args, "--lake", full_lake, **options)

    return asked


def rows(result: Any) -> list[dict[str, Any]]:
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def test_runs(ask: Any) -> None:
    result = ask("runs", "-o", "json")
    found = {row["run_id"]: row for row in rows(result)}
    assert found["agents"]["episodes"] == 7
    assert found["agents"]["tasks"] == 4
    assert found["control"]["steps"] == 6
    assert found["control"]["reward_mean"] == 3.0
    assert found["control"]["first"].endswith("Z")
    assert result.stderr.startswith("snapshot e")


def test_runs_count_retracted_episodes_apart_as_stats_do(run: Any, tmp_path: Path) -> None:
    from trajlake_pipelines.compact import compact

    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="r", worker="w", spool=tmp_path / "spool") as writer:
        for number in range(3):
            with writer.episode(episode_id=f"e{number}", task_id=str(number)) as episode:
                for _ in range(number + 1):
                    episode.step(message="x")
                episode.end(success=number == 2, reward=float(number))
        writer.retract("e2", "wrong")
    compact(lake)
    [found] = rows(run("runs", "--lake", lake.uri, "-o", "json"))
    assert (found["episodes"], found["retracted"], found["tasks"], found["steps"]) == (2, 1, 2, 3)
    assert (found["success_rate"], found["reward_mean"]) == (0.0, 0.5)
    [counted] = rows(run("stats", "--lake", lake.uri, "-o", "json"))
    assert {name: found[name] for name in ("episodes", "success_rate", "reward_mean")} == {
        name: counted[name] for name in ("episodes", "success_rate", "reward_mean")
    }


def test_the_lake_may_be_named_before_the_command_or_in_the_environment(
    run: Any, full_lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run("--lake", full_lake, "runs").stdout
    monkeypatch.setenv("TRAJLAKE_LAKE", full_lake)
    assert run("runs").stdout == expected
    monkeypatch.setenv("TRAJLAKE_LAKE", "/nowhere")
    assert run("runs", "--lake", full_lake).stdout == expected
    assert run("--lake", full_lake, "runs").stdout == expected


def test_episodes(ask: Any) -> None:
    result = ask("episodes", "--failed", "--sort", "-episode_id", "-o", "json")
    assert [row["episode_id"][:2] for row in rows(result)] == ["a3", "a1"]
    assert result.stderr == "2 of 2 episodes\n"


def test_aborted_episodes_are_not_failed_ones_and_are_found_by_their_status(ask: Any) -> None:
    found = rows(ask("episodes", "--status", "aborted", "-o", "json"))
    assert [row["episode_id"][:2] for row in found] == ["b0"]
    both = rows(ask("episodes", "--status", "aborted", "--status", "completed", "--run", "agents", "-o", "json"))
    assert {row["run_id"] for row in both} == {"agents"}
    assert len(both) == 7
    assert "○ aborted" in ask("replay", "--status", "aborted").stdout


def test_a_run_that_is_not_there_is_named_with_those_that_are(ask: Any) -> None:
    for command in ("episodes", "replay", "stats", "sample", "export"):
        where = [command] if command != "export" else [command, "out"]
        assert "there is no run 'agent'; did you mean agents?" in ask(*where, "--run", "agent", code=1).stderr
    assert "there is agents, control" in ask("episodes", "--run", "zzz", code=1).stderr


def test_a_condition_that_ends_with_a_comment_goes_with_other_options(ask: Any, tmp_path: Path) -> None:
    for where in ("success -- solved", "success /* solved */"):
        alone = rows(ask("episodes", "--where", where, "-o", "json"))
        agents = rows(ask("episodes", "--where", where, "--run", "agents", "-o", "json"))
        assert agents == [row for row in alone if row["run_id"] == "agents"] != []
        assert agents[0]["episode_id"] in ask("replay", "--where", where, "--run", "agents", "--limit", "0").stdout
    assert ask("replay", "--where", " ", "--limit", "1").stdout
    assert rows(ask("episodes", "--where", " ", "-o", "json")) == rows(ask("episodes", "-o", "json"))
    for more in ((), ("--run", "agents")):
        error = ask("episodes", "--where", "success AS solved", *more, code=1).stderr
        assert "trajlake: 'success AS solved' is not only a condition, it has a name" in error


def test_short_names_of_columns(ask: Any) -> None:
    found = rows(ask("episodes", "--columns", "run,policy,env", "--sort", "-run", "--limit", "1", "-o", "json"))
    assert list(found[0]) == ["run_id", "policy_name", "env_name"]
    assert found[0]["env_name"] == "CartPole-v1"


def test_episodes_in_every_format(ask: Any) -> None:
    arguments = ("episodes", "--where", "task_id = 'scores'", "--columns", "episode_id,reward,tags,success")
    assert {row["reward"] for row in rows(ask(*arguments, "-o", "json"))} == {"NaN", None}
    assert {row["reward"] for row in csv.DictReader(io.StringIO(ask(*arguments, "-o", "csv").stdout))} == {"NaN", ""}
    assert len(ask(*arguments, "-o", "jsonl").stdout.splitlines()) == 2
    assert "NaN" in ask(*arguments).stdout


def test_episodes_limits(ask: Any) -> None:
    result = ask("episodes", "--limit", "2", "--columns", "all", "-o", "json")
    assert len(rows(result)) == 2
    assert {"episode_id", "tags", "steps_path", "retracted"} <= set(rows(result)[0])
    assert result.stderr == "2 of 9 episodes (--limit 0 shows all)\n"


def test_tags_are_an_object(ask: Any) -> None:
    found = rows(ask("episodes", "--where", "trial = 0", "--columns", "tags", "--limit", "1", "-o", "json"))
    assert found == [{"tags": {"team": "blue", "note": "x"}}]
    found = rows(ask("episodes", "--columns", "tags['team']", "--sort", "tags['team']", "--limit", "1", "-o", "json"))
    assert found == [{"tags['team']": "blue"}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--where", "nope > 1"], "nope"),
        (["--where", "reward >"], "trajlake: 'reward >' is no condition in SQL"),
        (["--where", "task_id = tau"], "unknown column 'tau': did you mean status?"),
        (["--where", "task_id = airline"], "a text is written 'airline'"),
        (["--columns", "rewrad"], "no column 'rewrad'; there is reward"),
        (["--sort", "-tasks"], "no column 'tasks'"),
        (["--snapshot", "yesterday"], "is not a snapshot's token"),
        (["--snapshot", "e999.s999"], "take a newer one"),
    ],
)
def test_episodes_that_cannot_be(ask: Any, arguments: list[str], words: str) -> None:
    result = ask("episodes", *arguments, code=1)
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_show(ask: Any) -> None:
    text = ask("show", "a1").stdout
    assert "airline/0" in text
    assert "→ get_user" in text
    (found,) = rows(ask("show", "a1", "-o", "json"))
    assert found["tags"] == {"team": "blue", "note": "x"}
    assert found["steps"][1]["tool_calls"][0]["name"] == "get_user"
    table = list(csv.DictReader(io.StringIO(ask("show", "a1", "-o", "csv").stdout)))
    assert [row["source"] for row in table] == ["user", "agent", "tool"]
    assert "no episode zzz" in ask("show", "zzz", code=1).stderr


def test_tables_of_eighty_columns_are_tables(
    ask: Any, full_lake: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (
        ["show", "a1"],
        ["runs"],
        ["episodes"],
        ["stats", "--by", "run,policy,task"],
        ["stats", "--by", "policy", "--confidence", "0.95"],
        ["sample", "-n", "3", "--manifest", tmp_path / "manifest-of-a-sample.json"],
        ["lineage", "d0"],
    ):
        text = ask(*command).stdout
        assert "── 1 ──" not in text, f"{command} shows records:\n{text}"
        assert all(len(line) <= 80 for line in text.splitlines())


def test_an_empty_lake_says_what_fills_it(run: Any, tmp_path: Path) -> None:
    run("--lake", tmp_path / "lake", "init")
    for command in (["runs"], ["episodes"], ["stats"], ["replay", "--failed"]):
        error = run("--lake", tmp_path / "lake", *command).stderr
        assert error.startswith("no episodes yet: `trajlake import` or a worker brings them, `trajlake compact`")


def test_the_beginning_of_several_ids_lists_them(ask: Any) -> None:
    first, *others = ask("show", "a", code=1).stderr.splitlines()
    assert first == "trajlake: 4 episodes begin with a: give more of the id"
    assert others[0] == f"  a0{'0' * 30}  airline/airline/0  completed, solved"
    assert len(others) == 4


def test_an_id_of_no_letters_is_none(ask: Any) -> None:
    for command in ("show", "replay", "lineage"):
        assert ask(command, "", code=1).stderr == "trajlake: no id was given: `trajlake episodes` lists them\n"


def test_query(ask: Any) -> None:
    sql = "SELECT run_id, count(*) AS n FROM episodes GROUP BY run_id ORDER BY n"
    assert rows(ask("query", sql, "-o", "json")) == [{"run_id": "control", "n": 2}, {"run_id": "agents", "n": 7}]
    assert rows(ask("query", "-", "-o", "json", stdin="SELECT max(step_index) AS m FROM steps")) == [{"m": 2}]
    assert ask("query", "SELECT episode_id FROM episodes WHERE reward = 9").stderr == "no rows\n"
    unknown = ask("query", "SELECT 1 FROM episode", code=1).stderr
    assert "there is no table 'episode': the tables are episodes and steps" in unknown
    for wrong in ("SELEC", "SELECT nope FROM episodes", ""):
        result = ask("query", wrong, code=1)
        assert result.stderr.startswith("trajlake: ")
        assert result.stderr.count("\n") == 1
        assert "unexpected" not in result.stderr


@pytest.mark.parametrize("before", ["", "\n (", "\n-- SELECT\n", "/* SELECT\n*/ ; "])
def test_a_query_only_reads(ask: Any, before: str) -> None:
    for changes in (
        "DELETE FROM episodes",
        "drop table episodes",
        "CREATE TABLE x AS SELECT 1",
        "TRUNCATE TABLE episodes",
        "INSERT INTO episodes VALUES (1)",
        "UPDATE episodes SET reward = 1",
        "ALTER TABLE episodes DROP COLUMN reward",
        "",
    ):
        result = ask("query", before + changes, code=1)
        assert result.stderr.startswith("trajlake: a query only reads, and ")
        assert result.stderr.endswith("`trajlake retract` removes episodes\n")
        assert result.stdout == ""
    closed = ")" * before.count("(")
    assert rows(ask("query", f"{before}SELECT count(*) AS n FROM episodes{closed}", "-o", "json")) == [{"n": 9}]


@pytest.mark.parametrize(
    "sql",
    [
        "with few as (SELECT reward FROM episodes) SELECT count(*) AS n FROM few",
        "FROM episodes",
        "VALUES (1, 2)",
        "SHOW TABLES",
        "EXPLAIN SELECT reward FROM episodes",
    ],
)
def test_every_statement_that_reads_is_answered(ask: Any, sql: str) -> None:
    assert rows(ask("query", sql, "-o", "json"))


def test_what_polars_cannot_answer_is_said_in_a_line(ask: Any) -> None:
    error = ask("query", "SHOW COLUMNS FROM episodes", code=1).stderr
    assert error == "trajlake: statement type is not supported: ShowColumns\n"


def test_stats(ask: Any) -> None:
    arguments = ("stats", "--where", "task_family = 'airline'", "--pass-k", "1,2")
    (found,) = rows(ask(*arguments, "-o", "json"))
    assert found["episodes"] == 4
    assert found["success_rate"] == 0.5
    assert (found["pass^1"], found["pass@1"], found["pass^2"], found["pass@2"]) == (0.5, 0.5, 0.0, 1.0)
    table = ask(*arguments)
    assert "0.500 ± 0.289" in table.stdout
    assert "± standard error over episodes, ddof 1\n" in table.stderr
    assert "note" not in table.stderr
    by_task = ask("stats", "--by", "task", "--where", "task_family = 'airline'", "--convention", "inspect")
    assert by_task.stderr.startswith("± standard error over tasks (the mean of each task's trials), ddof 1\n")
    assert len(rows(ask("stats", "--by", "run_id", "--by", "task_id,trial", "-o", "json"))) == 7
    assert "no column 'nope'" in ask("stats", "--by", "nope", code=1).stderr


def test_stats_of_one_value_or_of_equal_ones_look_no_more_certain_than_they_are(ask: Any) -> None:
    one = ask("stats", "--where", "trial = 0 AND task_id = 'airline/0'").stdout
    assert "1.000 ± n/a" in one
    sure = ask("stats", "--where", "task_family = 'airline'", "--confidence", "0.95")
    assert "0.500 [0.150, 0.850]" in sure.stdout, "Wilson's interval of 2 of 4"
    assert "[ ] 95 % interval over episodes: success Wilson's, reward Student's t\n" in sure.stderr
    assert "[n/a]" in ask("stats", "--where", "trial = 0 AND task_id = 'airline/0'", "--confidence", "0.9").stdout
    equal = ask("stats", "--run", "control").stdout
    assert "1.000 ± 0 " in equal
    assert "± 0.000" not in equal


def test_stats_say_what_they_pool(ask: Any) -> None:
    note = "note: one row pools 2 runs and 2 policies; --by run,policy,policy_version keeps them apart\n"
    assert note in ask("stats").stderr
    assert note in ask("stats", "-o", "json").stderr
    apart = ask("stats", "--by", "run,policy")
    assert "note" not in apart.stderr
    assert "rows pool up to 2 policies; --by run_id,policy,policy_version" in ask("stats", "--by", "run").stderr
    assert "note" not in ask("stats", "--run", "control").stderr


def test_sample_is_the_same_every_time(ask: Any) -> None:
    first = ask("sample", "-n", "5", "--seed", "7", "-o", "json")
    assert first.stdout == ask("sample", "-n", "5", "--seed", "7", "-o", "json").stdout
    assert [row["position"] for row in rows(first)] == list(range(5))
    token = first.stderr.split()[-1]
    assert first.stdout == ask("sample", "-n", "5", "--seed", "7", "-o", "json", "--snapshot", token).stdout
    assert "no episode fits" in ask("sample", "--where", "reward = 100", code=1).stderr
    ended = ask("sample", "--strategy", "fifo", "-n", "99", "--run", "control")
    assert "2 of the 99 asked for: the strategy ends there, after 2 episodes" in ended.stderr


@FASTPARQUET_LEAVES_FILES_OPEN
def test_slices_are_shifted_only_where_there_are_some(ask: Any) -> None:
    def starts(*args: object) -> list[int]:
        drawn = ask(
            "sample", "--strategy", "epochs", "--where", "run_id = 'control'", "--window", 1, "-o", "json", *args
        )
        return sorted({row["start"] for row in rows(drawn)})

    assert (starts(), starts("--shift", 2)) == ([0, 1, 2], [0, 2])
    assert "--shift says where slices begin: it needs --window" in ask("sample", "--shift", 2, code=2).stderr


def test_export(ask: Any, tmp_path: Path) -> None:
    result = ask("export", tmp_path / "out", "--shards", "2", "--where", "success", "-o", "json")
    assert sum(row["rows"] for row in rows(result)) == 4
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert "4 episodes in 2 files" in result.stderr
    again = ask("export", tmp_path / "out", "--shards", "2", "--where", "success", "-o", "json")
    assert rows(again) == rows(result)
    assert "were there already" in again.stderr
    assert "holds another export" in ask("export", tmp_path / "out", code=1).stderr


def test_replay(ask: Any) -> None:
    result = ask("replay", "--failed", "--where", "task_family = 'airline'", "--limit", "1")
    assert "✗ failed  airline/" in result.stdout
    assert "failure    tool_call: no such user" in result.stdout
    assert '→ get_user {"user_id": "mia"}' in result.stdout
    assert "← get_user  error" in result.stdout
    assert "1 of 2 episodes" in result.stderr


def test_replay_of_classic_steps(ask: Any) -> None:
    text = ask("replay", "d0").stdout
    assert "✓ solved  CartPole-v1 · seed 0" in text
    assert "observation  float32[4]  0.5 -0.25 0.125 1" in text
    assert "terminated" in text


def test_replay_of_what_is_hostile(ask: Any) -> None:
    text = ask("replay", "b0").stdout
    assert "red ␛[31mtext␛[0m, ⟨U+202E⟩override, [bold]markup[/bold], ⟨U+009B⟩2J, nul ␀" in text
    assert "\x1b" not in text


def test_replay_cuts_and_chooses(ask: Any) -> None:
    assert "4,200 more characters" in ask("replay", "c0").stdout
    assert "x" * 50 + "\n" in ask("replay", "c0", "--max-chars", "0").stdout
    text = ask("replay", "a0", "--step", "1", "--speed", "1000").stdout
    assert "get_user" in text
    assert "Book me" not in text
    assert "has 3 steps, the first is 0: there is no 7" in ask("replay", "a0", "--step", "7", code=1).stderr
    assert ask("replay", "--where", "reward = 100").stderr == "no episode fits\n"
    assert len(ask("replay", "a0", "a1…").stdout.split("episode    a")) == 3


def test_doctor(ask: Any) -> None:
    result = ask("doctor", "-o", "json")
    assert all(row["ok"] for row in rows(result))
    assert {"lake", "table episodes"} <= {row["check"] for row in rows(result)}


def test_schema_diff_of_a_fresh_lake_is_empty(ask: Any) -> None:
    assert rows(ask("schema", "diff", "-o", "json")) == []


def test_vacuum_has_nothing_to_do(ask: Any) -> None:
    result = ask("vacuum", "--dry-run")
    assert result.stderr.startswith("nothing to remove")


class Terminal:
    """The command in a terminal of its own, driven by keys."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        program = "from trajlake_cli.main import main; main()"
        environment = {**os.environ, "TERM": "xterm-256color", "LINES": "24", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read until `text` was shown after what was waited for before."""
        deadline, fresh = time.monotonic() + seconds, ""
        while text not in fresh:
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{fresh}"
            ready, _, _ = select.select([self.master], [], [], 1.0)
            if ready:
                try:
                    fresh += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert text in fresh, f"{text!r} did not come:\n{fresh}"
        self.seen += fresh

    def close(self) -> int:
        code = self.process.wait(30)
        os.close(self.master)
        return code


def test_interactive_replay_in_a_terminal(full_lake: str) -> None:
    terminal = Terminal("replay", "--lake", full_lake, "--failed", "-i", "--where", "task_family = 'airline'")
    terminal.wait_for("Book me a flight.")
    terminal.press("n")
    terminal.wait_for("get_user")
    terminal.press("\x1b[D")
    terminal.wait_for("Book me a flight.")
    terminal.press("/no such\r")
    terminal.wait_for("step 2 of")
    terminal.press("0nn")
    terminal.wait_for("step 2 of")
    terminal.press("q")
    terminal.wait_for("\x1b[?1049l")
    assert terminal.close() == 0


@FASTPARQUET_LEAVES_FILES_OPEN
def test_long_work_without_a_terminal_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("trajlake_cli.progress._clock", lambda: now)
    with progress("export") as report:
        for now in (1.0, 14.0, 16.0, 20.0, 32.0):
            report(int(now) * 100, 5000 if now < 30 else None)
    assert capsys.readouterr() == ("", "export: 1,600 of 5,000\nexport: 3,200\n")


def test_progress_is_for_terminals(full_lake: str, tmp_path: Path, run: Any) -> None:
    terminal = Terminal("export", str(tmp_path / "a"), "--lake", full_lake)
    terminal.wait_for("9 episodes")
    assert "export" in terminal.seen
    assert terminal.close() == 0
    result = run("export", tmp_path / "b", "--lake", full_lake)
    assert "\x1b" not in result.stderr
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["9", "snapshot"]


@FASTPARQUET_LEAVES_FILES_OPEN
def test_returns_without_steps_are_drawn_only_where_asked_for_and_exports_say_they_have_them(
    run: Any, tmp_path: Path
) -> None:
    from trajlake_pipelines.compact import compact

    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="r", worker="w", spool=tmp_path / "spool") as writer:
        for name, steps in (("full", 1), ("empty", 0)):
            with writer.episode(episode_id=name) as episode:
                for _ in range(steps):
                    episode.step(message="x")
                episode.end(reward=1.0)
    compact(lake)

    def drawn(*arguments: str) -> tuple[set[str], str]:
        result = run("sample", "-n", 9, "--strategy", "epochs", *arguments, "-o", "json", "--lake", lake.uri)
        return {row["episode_id"] for row in rows(result)}, result.stderr

    found, said = drawn()
    assert found == {"full"}
    assert "1 episode was left out: no steps" in said
    assert drawn("--with-empty")[0] == {"full", "empty"}
    exported = run("export", tmp_path / "out", "--lake", lake.uri)
    assert 'note: 1 of them have no steps; --where "n_steps > 0" leaves such episodes out' in exported.stderr


def test_compare_says_which_tasks_got_worse(run: Any, tmp_path: Path) -> None:
    from trajlake_pipelines.compact import compact

    lake = trajlake.create(tmp_path / "lake")
    outcomes = {"old": {"easy": "1111", "hard": "0011"}, "new": {"easy": "0000", "hard": "0111", "third": "1"}}
    with lake.writer(run="r", worker="w", spool=tmp_path / "spool") as writer:
        for policy, tasks in outcomes.items():
            for task, trials in tasks.items():
                for each in trials:
                    with writer.episode(task_id=task, policy_name=policy) as episode:
                        episode.step(message=f"{policy} {task}")
                        episode.end(success=each == "1", reward=float(each))
    compact(lake)
    text = run("compare", "old", "new", "--lake", lake.uri)
    lines = [line.split() for line in text.stdout.splitlines() if line.startswith(("easy", "hard"))]
    assert [line[:4] for line in lines] == [["easy", "4/4", "0/4", "-1.000"], ["hard", "2/4", "3/4", "+0.250"]]
    assert lines[0][-1] == "!"
    assert "0.750 → 0.375: -0.375" in text.stdout
    assert "0 tasks of a, 1 of b" in text.stdout
    assert "trajlake replay --where \"task_id = 'easy' AND policy_name = 'new'\"" in text.stderr
    (found,) = rows(run("compare", "old", "new", "--by", "policy", "--lake", lake.uri, "-o", "json"))
    assert (found["column"], found["difference"], found["p_value"]) == ("policy_name", -0.375, 1.0)
    assert [task["task_id"] for task in found["tasks"]] == ["easy", "hard"]
    table = run("compare", "old", "new", "--metric", "reward", "--limit", "1", "--lake", lake.uri, "-o", "csv").stdout
    assert [row["difference"] for row in csv.DictReader(io.StringIO(table))] == ["-1.0"]
    wrong = run("compare", "old", "nwe", "--lake", lake.uri, code=1).stderr
    assert "has policy, policy version or run 'nwe'; there is new (policy_name)" in wrong
    again = run("dedupe", "--lake", lake.uri)
    assert "repeat another one" in again.stdout
    note = "episodes have the content of another (sent twice, or the same answer given twice)"
    assert note in run("stats", "--lake", lake.uri).stderr
    assert note in run("compare", "old", "new", "--lake", lake.uri).stderr
    assert note not in run("stats", "--unique", "--lake", lake.uri).stderr
