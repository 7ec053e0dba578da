"""verifiers results come in with the environment and model that metadata.json names; its averages are not believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import check, check_real_file, real_files, withstand

from trajlake.errors import FormatError
from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.verifiers import FORMAT

CALL = '{"id": "c1", "function": {"arguments": "{\\"url\\":1}", "name": "fetch"}, "type": "function"}'
METADATA = {"env_id": "wordle", "model": "gpt-5", "num_examples": 5, "rollouts_per_example": 3, "avg_reward": 0.0}


def row(**changes: Any) -> dict[str, Any]:
    whole = {
        "example_id": 0,
        "prompt": [{"role": "system", "content": "play"}],
        "completion": [
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "page", "tool_calls": None},
        ],
        "task": "default",
        "reward": 1.37,
        "generation_ms": 10.5,
        "answer": "story",
        "check_answer_reward_func": 1.0,
        "judge_reward": 0.37,
        "info": {"oai_tools": []},
    }
    return whole | changes


def lines(*rows: Any) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def read(path: Path) -> list[Record]:
    check(FORMAT, path)
    found = list(FORMAT.read(open_source(path)))
    assert all(isinstance(item, Record) for item in found), found
    return [item for item in found if isinstance(item, Record)]


@pytest.mark.unit
def test_a_row_becomes_an_episode_and_each_message_of_the_completion_a_step(put: Any) -> None:
    path = put(lines(row(), row()), "results.jsonl")
    assert detect(path).name == "verifiers"
    [first, second] = read(path)
    assert first.begin["extra"] == {name: row()[name] for name in ("prompt", "generation_ms", "answer", "info")}
    assert (first.begin["task_id"], first.begin["group_id"]) == (0, "verifiers/default/0")
    assert (first.begin["trial"], second.begin["trial"]) == (0, 1)
    assert first.end == {
        "reward": 1.37,
        "rewards": [
            {"name": "check_answer_reward_func", "value": 1.0, "kind": None},
            {"name": "judge_reward", "value": 0.37, "kind": "judged"},
        ],
    }
    call, result = first.steps
    assert call["tool_calls"] == [json.loads(CALL)]
    assert call["extra"] == {"tool_calls_as_text": True}
    assert result["tool_results"] == [{"call_id": None, "content": "page"}]


@pytest.mark.unit
def test_metadata_beside_the_rows_names_environment_and_model(put: Any) -> None:
    path = put(lines(row(), row(reward=2)), "results.jsonl")
    put(METADATA, "metadata.json")
    first, last = read(path)
    assert first.begin["env_name"] == first.begin["task_family"] == "wordle"
    assert first.begin["policy_name"] == "gpt-5"
    assert first.notes == ()
    assert last.notes == (
        "metadata.json beside it says that the average reward is 0.0, and the 2 rows have 1.685 on average: "
        "the rows are right",
    )
    put({**METADATA, "avg_reward": 1.685}, "metadata.json")
    assert read(path)[-1].notes == ()


@pytest.mark.unit
def test_a_contradiction_is_in_the_report_of_the_import(put: Any, run_import: Any) -> None:
    path = put(lines(row(), "no row"), "results.jsonl")
    put(METADATA, "metadata.json")
    [report] = run_import(path).report.files
    assert (report.episodes, report.refused) == (1, 1)
    assert [note for note in report.notes if "the rows are right" in note]


@pytest.mark.unit
@pytest.mark.parametrize("content", ["{", "[]", "\ud800", json.dumps({"model": "x"}), " "])
def test_metadata_that_cannot_be_read_hides_no_rows(put: Any, content: str) -> None:
    path = put(lines(row()), "results.jsonl")
    put(content.encode("utf-8", "surrogatepass"), "metadata.json")
    [record] = read(path)
    assert record.begin["policy_name"] is None


@pytest.mark.unit
def test_metadata_itself_is_refused_with_the_reason(put: Any) -> None:
    path = put(METADATA, "metadata.json")
    assert detect(path).name == "verifiers"
    with pytest.raises(FormatError, match=r"metadata of a verifiers evaluation.*results\.jsonl"):
        list(FORMAT.read(open_source(path)))


@pytest.mark.unit
@pytest.mark.parametrize(("value", "success"), [(1.0, True), (0, False), (True, True), (0.5, None), ("yes", None)])
def test_success_is_what_the_row_says_if_it_is_yes_or_no(put: Any, value: Any, success: bool | None) -> None:
    [record] = read(put(lines(row(success=value))))
    assert record.end.get("success") is success


@pytest.mark.unit
def test_the_newer_rows(put: Any) -> None:
    newer = row(metrics={"format": 1, "note": "x"}, is_truncated=True, stop_condition="max_turns", error=None)
    [record] = read(put(lines(newer)))
    assert record.end["rewards"] == [{"name": "format", "value": 1, "kind": None}]
    assert (record.end["status"], record.end["stop_reason"]) == ("truncated", "max_turns")
    [failed] = read(put(lines(row(error="boom"))))
    assert (failed.end["status"], failed.end["failure_detail"]) == ("failed", "boom")


ERROR = {"error": "SandboxError", "error_chain_repr": "SandboxError('boom')", "error_chain_str": "SandboxError"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("error", "detail"),
    [
        ("boom", "boom"),
        (ERROR, "SandboxError('boom')"),
        ({**ERROR, "message": "boom", "error_chain_repr": ""}, "boom"),
        ({"error": "SandboxError"}, "SandboxError"),
        ({"code": 5}, '{"code":5}'),
    ],
)
@pytest.mark.parametrize("completion", [[], None, row()["completion"][:1]])
def test_a_row_with_an_error_is_failed(put: Any, error: Any, detail: str, completion: Any) -> None:
    given = row(completion=completion, metrics={}, error=error, stop_condition="has_error", reward=0.0)
    [failed] = read(put(lines(given)))
    assert (failed.end["status"], failed.end["failure_stage"]) == ("failed", "other")
    assert failed.end["failure_detail"] == detail
    assert len(failed.steps) == len(completion or ())
    assert "patch" not in failed.source


@pytest.mark.unit
@pytest.mark.parametrize("error", [None, "", {}, 0.5, False])
def test_a_row_that_names_no_error_is_not_failed(put: Any, error: Any) -> None:
    [record] = read(put(lines(row(error=error, metrics={}))))
    assert "status" not in record.end
    [record] = read(put(lines(row(error=error, metrics={}, stop_condition="has_error"))))
    assert (record.end["status"], record.end["failure_detail"]) == ("failed", None)


@pytest.mark.unit
def test_text_and_null_come_in(put: Any) -> None:
    [record] = read(put(lines(row(completion="it is 5", prompt="2+3", reward=None, id="a"))))
    assert record.steps == [{"source": "agent", "message": "it is 5"}]
    assert "reward" not in record.end
    [record] = read(put(lines(row(completion=[], reward=float("nan")))))
    assert record.steps == []


@pytest.mark.unit
def test_rows_that_are_none_are_refused_with_their_reason(put: Any) -> None:
    found = list(FORMAT.read(open_source(put(lines(row(), {"prompt": ""}, row(completion=5), [1])))))
    assert [item.reason if isinstance(item, Refused) else None for item in found] == [
        None,
        "has no `completion`",
        "its messages are a number, not a list",
        "not an object: a row of verifiers has prompt, completion and reward",
    ]


@pytest.mark.unit
def test_mutated_rows_give_records_and_refusals(tmp_path: Path) -> None:
    rows = [row(), [row(), row(success=1.0)], row(completion="x", metrics={"a": 1}), row(completion=None, error=ERROR)]
    withstand(FORMAT, rows, tmp_path)


def test_the_published_results_come_in_and_out_whole(realdata: Path, tmp_path: Path) -> None:
    files = real_files(realdata, "verifiers")
    assert len(files) == 21
    for path, episodes, steps in files:
        check_real_file(FORMAT, path, episodes, steps, tmp_path)


def test_the_published_metadata_that_is_wrong_is_told(realdata: Path, run_import: Any) -> None:
    report = run_import(realdata / "verifiers").report
    told = {file.path.parent.parent.name for file in report.files if file.notes}
    assert told == {
        "prml--gpt-4.1-mini",
        "wordle--gpt-4.1-mini",
        "wordle--gpt-5-mini",
        "wordle--qwen--qwen3-30b-a3b-thinking-2507",
    }
    pointers = [file for file in report.failed if "Git LFS pointer" in (file.error or "")]
    assert len(pointers) == 2


def test_mutated_published_results(realdata: Path, tmp_path: Path) -> None:
    rows = [json.loads(path.read_text().partition("\n")[0]) for path, _, _ in real_files(realdata, "verifiers")]
    withstand(FORMAT, [{**one, "completion": one["completion"][:6]} for one in rows], tmp_path)
