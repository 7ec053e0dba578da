"""Calls with full prompts, discarded episodes, sub-episodes, and what is said of an episode later."""

import types

import numpy as np
import pytest

import trajlake
from trajlake.errors import UsageError, WriterClosed
from trajlake.ingest.segment import decode_segment
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.unit


@pytest.fixture
def lake(tmp_path):
    return trajlake.create(tmp_path / "lake")


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def recorded(lake, record):
    """The steps of an episode after `record` had it, and a compaction."""
    with lake.writer("run", "w") as writer, writer.episode(episode_id="e") as episode:
        record(episode)
    compact(lake)
    return lake.snapshot().episode("e").steps


def test_only_what_is_new_in_a_prompt_becomes_a_step(lake):
    def record(episode):
        messages = [said("system", "s"), said("user", "q0")]
        for number in range(5):
            answer = said("assistant", f"a{number}", tool_calls=[{"id": str(number), "name": "f", "arguments": "{}"}])
            assert episode.call(messages, answer, token_ids=[number], logprobs=[-0.5]) == 2 + 2 * number
            messages += [answer, said("tool", f"r{number}", tool_call_id=str(number))]

    steps = recorded(lake, record)
    assert [step["message"] or step["tool_results"][0]["content"] for step in steps] == [
        "s", "q0", "a0", "r0", "a1", "r1", "a2", "r2", "a3", "r3", "a4",
    ]  # fmt: skip
    assert [step["parent_step"] for step in steps] == [None] * 11
    assert [step["token_ids"] for step in steps if step["source"] == "agent"] == [[n] for n in range(5)]
    assert steps[4]["tool_calls"][0]["id"] == "1"


def test_where_history_was_rewritten_the_conversation_forks(lake):
    def record(episode):
        episode.call([said("system", "s"), said("user", "q")], "a")  # 0 1 2
        episode.call([said("system", "s"), said("user", "summary")], "b")  # 3 4
        episode.call([said("system", "s"), said("user", "q"), said("assistant", "a"), said("user", "more")], "c")  # 5 6
        episode.call([said("system", "another")], "d")  # 7 8
        episode.call([said("system", "s"), said("user", "summary")], "b again")  # 9

    steps = recorded(lake, record)
    assert [step["message"] for step in steps] == [
        "s",
        "q",
        "a",
        "summary",
        "b",
        "more",
        "c",
        "another",
        "d",
        "b again",
    ]
    assert [step["parent_step"] for step in steps] == [None, None, None, 0, None, 2, None, -1, None, 3]
    assert not any(step["extra"] for step in steps)


def test_an_answer_that_is_sent_back_without_its_reasoning_is_no_other_history(lake):
    def record(episode):
        first = [said("user", "q")]
        episode.call(first, said("assistant", "a", reasoning_content="because", refusal=None))
        episode.call([*first, said("assistant", "a"), said("user", "q2")], "b")
        episode.call([*first, said("assistant", "a", reasoning_content="other")], "c")

    steps = recorded(lake, record)
    assert [(step["message"], step["reasoning"], step["parent_step"]) for step in steps] == [
        ("q", None, None), ("a", "because", None), ("q2", None, None), ("b", None, None), ("a", "other", 0),
        ("c", None, None),
    ]  # fmt: skip


def test_a_message_that_the_caller_changes_later_stays_as_it_was_sent(lake):
    def record(episode):
        message = said("user", [{"type": "text", "text": "one"}])
        episode.call([message], "a")
        message["content"][0]["text"] = "two"
        episode.call([message], "b")

    steps = recorded(lake, record)
    texts = [step["content_parts"][0]["text"] if step["content_parts"] else step["message"] for step in steps]
    assert texts == ["one", "a", "two", "b"]


def test_a_chat_completion_gives_usage_model_and_logprobs(lake):
    completion = types.SimpleNamespace(
        model_dump=lambda exclude_none: {
            "model": "m",
            "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
            "choices": [
                {
                    "message": {"role": "assistant", "content": "a"},
                    "finish_reason": "stop",
                    "logprobs": {"content": [{"token": "a", "logprob": -0.25}]},
                }
            ],
        }
    )
    steps = recorded(lake, lambda episode: episode.call([said("user", "q")], completion, reward=0.5))
    step = steps[1]
    assert (step["model"], step["prompt_tokens"], step["completion_tokens"], step["cached_tokens"]) == ("m", 7, 2, 4)
    assert (step["logprobs"], step["reward"], step["extra"]) == ([-0.25], 0.5, '{"finish_reason":"stop"}')


@pytest.mark.parametrize(
    ("messages", "response", "fields", "reason"),
    [
        ("q", "a", {}, "messages must be a list of messages, not str"),
        ([said("robot", "q")], "a", {}, "message 1: the role 'robot' is none of"),
        ([said("user", "q")], {"choices": [1, 2]}, {}, "the response has 2 choices"),
        ([said("user", "q")], None, {"reward": 1.0}, "reward belong to a response, and there is none"),
        ([said("user", "q")], "a", {"token_ids": ["x"]}, "step field token_ids: must hold numbers"),
    ],
)
def test_a_call_that_cannot_be_recorded_is_refused_whole(lake, messages, response, fields, reason):
    def record(episode):
        with pytest.raises(UsageError, match=reason):
            episode.call(messages, response, **fields)
        episode.call([said("user", "good")], "a")

    assert [step["message"] for step in recorded(lake, record)] == ["good", "a"]


def test_two_hundred_calls_with_full_prompts_take_the_bytes_of_the_content_once(lake):
    def size(run, record):
        with lake.writer(run, "w") as writer, writer.episode() as episode:
            record(episode)
        return sum(info.size for info in lake.store.list(f"landing/{run}/"))

    turns = [(f"question {n} " * 40, f"answer {n} " * 60) for n in range(200)]

    def full(episode):
        messages = []
        for question, answer in turns:
            messages.append(said("user", question))
            episode.call(list(messages), answer)
            messages.append(said("assistant", answer))

    def once(episode):
        for question, answer in turns:
            episode.step(source="user", message=question)
            episode.step(source="agent", message=answer)

    assert size("full", full) <= 1.2 * size("once", once)


def test_a_discarded_episode_is_in_no_sample(lake):
    with lake.writer("run", "w") as writer:
        with writer.episode(episode_id="bad") as episode:
            episode.step(message="x")
            episode.discard()
            with pytest.raises(WriterClosed):
                episode.step(message="y")
        with writer.episode(episode_id="worse") as episode:
            episode.end(reward=1.0)
            episode.discard("a bug of the environment")
        writer.episode(episode_id="good").end(reward=1.0)
    compact(lake)
    rows = {row["episode_id"]: row for row in lake.snapshot().episodes.collect().iter_rows(named=True)}
    assert {name: row["retracted"] for name, row in rows.items()} == {
        "bad": "discarded", "worse": "a bug of the environment", "good": None,
    }  # fmt: skip
    assert (rows["bad"]["status"], rows["worse"]["status"]) == ("aborted", "completed")


def test_a_sub_episode_knows_its_parent(lake):
    with lake.writer("run", "w") as writer, writer.episode(episode_id="parent") as parent:
        with parent.sub_episode(episode_id="child", task_id="t") as child:
            child.step(message="x")
        parent.step(message="y")
    compact(lake)
    row = lake.snapshot().episode("child").episode
    assert (row["parent_episode_id"], row["task_id"]) == ("parent", "t")


def test_scores_and_retractions_come_later_from_elsewhere(lake):
    with lake.writer("run", "w") as writer:
        for name in ("a", "b", "c"):
            writer.episode(episode_id=name).end()
    compact(lake)
    with lake.scores("run") as scores:
        scores.add("a", "judge", 0.75, weight=2.0, kind="judged")
        scores.add("b", "tests", 1.0)
        scores.flush()
    lake.retract(["b", "c"], "leaked answers")
    compact(lake)
    rows = {row["episode_id"]: row for row in lake.snapshot().episodes.collect().iter_rows(named=True)}
    assert rows["a"]["rewards"] == [{"name": "judge", "value": 0.75, "weight": 2.0, "kind": "judged"}]
    assert [rows[name]["retracted"] for name in "abc"] == [None, "leaked answers", "leaked answers"]


@pytest.mark.parametrize("episode_id", [None, "", 7, "\ud800"])
def test_what_is_said_of_no_episode_is_refused(lake, episode_id):
    with lake.writer("run", "w") as writer, lake.scores("run") as scores:
        for said in (
            lambda: writer.score(episode_id, "judge", 1.0),
            lambda: scores.add(episode_id, "judge", 1.0),
            lambda: writer.retract(episode_id, "leaked"),
        ):
            with pytest.raises(UsageError, match="episode_id must be text that is not empty"):
                said()
        with pytest.raises(UsageError, match="'judge' has no value"):
            scores.add("e", "judge", None)
        with pytest.raises(UsageError, match="say why it is retracted"):
            writer.retract("e", None)
    with pytest.raises(UsageError, match="episode_id must be text"):
        lake.retract([episode_id], "leaked")
    assert not list(lake.store.list("landing/"))


@pytest.mark.parametrize("passed", [True, np.True_, 1, np.float32(1)])
def test_what_a_verifier_finds_may_be_a_boolean(lake, passed):
    with lake.scores("run") as scores:
        scores.add("e", "success", passed)
    [info] = lake.store.list("landing/")
    [event] = decode_segment(lake.store.get(info.key), info.key).to_pylist()
    assert event["score"] == {"name": "success", "value": 1.0, "weight": None, "kind": None}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("success", 0.5, "score 'success' is the verdict: 1 or 0, True or False, not 0.5"),
        ("success", float("nan"), "score 'success' is the verdict"),
        ("tests", "passed", "score 'tests': must be a number, not 'passed'"),
    ],
)
def test_a_score_that_says_nothing_is_refused_by_its_name(lake, name, value, reason):
    with lake.scores("run") as scores, pytest.raises(UsageError, match=reason):
        scores.add("e", name, value)


def test_a_score_before_the_end_counts_too(lake):
    with lake.writer("run", "w") as writer, writer.episode(episode_id="e") as episode:
        episode.score("format", 0.2)
    (begin, *_) = [decode_segment(lake.store.get(i.key), i.key).to_pylist() for i in lake.store.list("landing/")]
    assert [event["kind"] for event in begin] == ["begin", "score", "end"]
