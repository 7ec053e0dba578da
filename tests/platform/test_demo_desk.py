"""The demo's desk: tools refuse what is wrong, tasks can be solved, the verifier sees what is not, the agent errs."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict

import numpy as np
import pytest

from trajlake.demo.desk import rollout, tools
from trajlake.demo.desk.agent import POLICIES, Agent, Habits, corruptions
from trajlake.demo.desk.tasks import DOMAINS, make_task, verify
from trajlake.demo.desk.tokens import END_OF_TURN, encode, turn_logprobs
from trajlake.demo.desk.world import ToolError, World

pytestmark = pytest.mark.unit

FAULTLESS = Habits(0.0, 0.0, 0.0, 0.0)
TASKS = [make_task(domain, number) for domain in DOMAINS for number in range(12)]


def played(assignment):
    """The steps without what is measured, and the outcome."""
    steps = []
    play = assignment.play()
    while True:
        try:
            steps.append(next(play))
        except StopIteration as end:
            return [{name: value for name, value in step.items() if name != "latency_ms"} for step in steps], end.value


@pytest.fixture(scope="module")
def episodes():
    """Everything that the demo plays at the desk: (assignment, steps, outcome)."""
    return [(assignment, *played(assignment)) for assignment in rollout.assignments(12, 4)]


def solve(task, world, change=lambda calls: calls):
    """Carry out the plan of a task without an agent; `change` may disturb the calls that change the world."""
    plan = task.plan()
    call = next(plan)
    while True:
        result = tools.call(world, call.name, call.arguments)
        try:
            call = plan.send(result)
        except StopIteration as end:
            for last in change(end.value):
                with contextlib.suppress(ToolError):  # in another order some are refused
                    tools.call(world, last.name, last.arguments)
            return


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.task_id)
def test_the_plan_of_a_task_solves_it(task):
    world = task.world()
    solve(task, world)
    verdict = verify(task, world)
    assert verdict.findings == ()
    assert verdict.reward == 1.0


@pytest.mark.parametrize("task", TASKS[::6], ids=lambda task: task.task_id)
def test_a_task_is_not_solved_by_doing_nothing_or_half_or_in_another_order(task):
    for change in (lambda calls: [], lambda calls: calls[:-1], lambda calls: calls[::-1]):
        world = task.world()
        solve(task, world, change)
        verdict = verify(task, world)
        assert not verdict.success
        assert verdict.reward == 0.0
        assert verdict.findings


def test_the_verifier_names_what_is_wrong():
    task = make_task("ledger", 0)
    world = task.world()
    solve(task, world)
    source = next(iter(task.expected)).removeprefix("account/")
    world.write("account", source, world.read("account", source) | {"state": "open"})
    world.write("account", "L999", {"state": "open"})
    world.outbox[0]["to"] = "nobody"
    verdict = verify(task, world)
    assert (verdict.state, verdict.order, verdict.notice) == (False, True, False)
    assert verdict.findings[0] == f"account {source}: state is 'open', not 'closed'"
    assert verdict.findings[1] == "account/L999 should not be there"
    assert "messages went to nobody" in verdict.findings[2]


def test_the_verifier_stands_a_damaged_record():
    task = make_task("ledger", 0)
    damaged = next(iter(task.expected))
    assert f"{damaged.replace('/', ' ')} is damaged" in verify(task, task.world(damaged)).findings


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("dance", {}, "there is no tool 'dance'"),
        ("get_order", {}, "argument 'order_id' is missing"),
        ("get_order", {"order_id": 7}, "'order_id' must be a str, not 7"),
        ("get_order", {"order_id": "A1", "loud": 1}, "there is no argument 'loud'"),
        ("get_order", {"order_id": "A2"}, "there is no order 'A2'"),
        ("refund", {"order_id": "A1", "amount": 51}, "51 is more than was paid"),
        ("refund", {"order_id": "A1", "amount": True}, "must be a float"),
        ("cancel_order", {"order_id": "A1", "reason": ""}, "is shipped and cannot be cancelled"),
        ("calculate", {"expression": "1 / 0"}, "division by zero"),
        ("calculate", {"expression": "().__class__"}, "cannot calculate a Attribute"),
        ("calculate", {"expression": "2 ** 9"}, "cannot calculate a BinOp"),
        ("calculate", {"expression": "1 +"}, "invalid syntax"),
        ("calculate", {"expression": "1" * 201}, "longer than 200"),
        ("list_files", {"folder": "x"}, "there is no folder 'x'"),
        ("send_message", {"to": "x", "text": "y"}, "there is no person 'x'"),
    ],
)
def test_tools_refuse_with_the_reason_and_change_nothing(name, arguments, complaint):
    records = {"order/A1": json.dumps({"customer": "c", "total": 50, "refunded": 0, "status": "shipped"})}
    world = World(dict(records))
    with pytest.raises(ToolError) as refusal:
        tools.call(world, name, arguments)
    assert complaint in str(refusal.value)
    assert (world.records, world.changes, world.outbox) == (records, [], [])


def test_every_domain_has_tools_and_all_tools_belong_somewhere():
    named = {*tools.SHARED_TOOLS, *(name for names in tools.DOMAIN_TOOLS.values() for name in names)}
    assert named == set(tools.TOOLS)
    assert set(tools.DOMAIN_TOOLS) == set(DOMAINS) == set(POLICIES["v1"]) == set(POLICIES["v2"])


def test_the_same_seed_plays_the_same_episode(episodes):
    for assignment, steps, outcome in episodes[::17]:
        again, same = played(assignment)
        assert same == outcome
        np.testing.assert_equal(again, steps)


def test_tasks_are_the_same_everywhere():
    assert make_task("orders", 3).records == make_task("orders", 3).records
    assert make_task("orders", 3).prompt == (
        "dmitri wants a chair instead of the lamp, which is 5 cheaper. Exchange it if there is one, then pay the "
        "difference back, then tell them."
    )


def test_every_way_to_fail_occurs_and_says_so_in_the_same_terms(episodes):
    by_stage = defaultdict(list)
    for _, steps, outcome in episodes:
        by_stage[outcome.get("failure_stage")].append((steps, outcome))
    assert set(by_stage) == {None, "tool_call", "validation", "budget", "planning", "environment"}
    for stage, found in by_stage.items():
        for steps, outcome in found:
            last = steps[-1]
            if stage == "environment":
                assert outcome["status"] == "failed"
                assert "reward" not in outcome  # nobody judged it, which is not 0
                assert last["error"].startswith("JSONDecodeError")
                continue
            assert outcome["reward"] == last["reward"] == float(stage is None)
            assert outcome["success"] is (stage is None)
            assert last["terminated"] is not last["truncated"]
            if stage is not None:  # one that is out of turns may have done everything, and not have said so
                assert last["truncated"] is (stage == "budget")
            assert [part["name"] for part in outcome["rewards"]] == ["state", "order", "notice"]
            assert (min(part["value"] for part in outcome["rewards"]) == 1.0) is (stage is None)
    refused = [
        sum(result["is_error"] for step in steps for result in step.get("tool_results", ()))
        for steps, _ in by_stage["tool_call"]
    ]
    assert min(refused) >= 1
    assert any("done as" in outcome["failure_detail"] for _, outcome in by_stage["validation"])  # a wrong order
    assert any("balance is" in outcome["failure_detail"] for _, outcome in by_stage["validation"])  # a wrong amount


def test_some_tool_errors_are_got_over(episodes):
    assert any(
        outcome.get("success") and any(result["is_error"] for step in steps for result in step.get("tool_results", ()))
        for _, steps, outcome in episodes
    )


def test_v2_is_better_at_orders_and_ledger_and_worse_at_files(episodes):
    solved = defaultdict(list)
    for assignment, _, outcome in episodes:
        if "success" in outcome:
            solved[assignment.begin["domain"], assignment.begin["policy_version"]].append(outcome["success"])
    rate = {key: np.mean(values) for key, values in solved.items()}
    assert rate["orders", "v2"] > rate["orders", "v1"] + 0.1
    assert rate["ledger", "v2"] > rate["ledger", "v1"] + 0.1
    assert rate["files", "v2"] < rate["files", "v1"] - 0.1


def test_shares_divide_the_tasks():
    every = {assignment.begin["task_id"] for assignment in rollout.assignments(4, 1)}
    shares = [
        {assignment.begin["task_id"] for assignment in rollout.assignments(4, 1, share=n, shares=2)} for n in (0, 1)
    ]
    assert len(every) == 12
    assert shares[0] | shares[1] == every
    assert not shares[0] & shares[1]


def test_a_faultless_agent_solves_every_task():
    for task in TASKS:
        world, agent = task.world(), Agent(task, FAULTLESS, np.random.default_rng(0))
        while (move := agent.turn().move).call is not None:
            agent.observe(move, tools.call(world, move.call.name, move.call.arguments), False)
        assert move.kind == "done"
        assert verify(task, world).success


def test_corruptions_differ_from_the_call_and_from_each_other():
    for task in TASKS:
        call = next(task.plan())
        wrong = [json.dumps(other.arguments) for other in corruptions(call)]
        assert len(set(wrong)) == len(wrong) >= 2
        assert json.dumps(call.arguments) not in wrong


def test_tokens_are_the_text_and_their_logprobs_the_probability_of_the_turn(episodes):
    for _, steps, _ in episodes[::29]:
        context = 0
        for step in steps:
            if step["source"] == "environment":
                continue
            ids = list(step["token_ids"])
            if step["source"] == "agent":
                call = step.get("tool_calls", [None])[0]
                text = step["message"] + (f"\n{call['name']} {json.dumps(call['arguments'])}" if call else "")
                assert ids == [*encode(text), END_OF_TURN]
                assert len(step["logprobs"]) == len(ids) == step["completion_tokens"]
                assert step["loss_mask"] == [1] * len(ids)
                assert step["prompt_tokens"] == context
                assert step["logprobs"].dtype == np.float32
                assert step["logprobs"].max() <= 0.0
            else:
                assert bytes(ids).decode() == step.get("message", step.get("tool_results", [{}])[0].get("content"))
                assert step["loss_mask"] == [0] * len(ids)
            context += len(ids)


def test_logprobs_of_all_turns_are_a_distribution():
    turns = [("look at A", 0.5), ("look at B", 0.2), ("look", 0.2), ("stop", 0.1)]
    tokens = [([*encode(text), END_OF_TURN], p) for text, p in turns]
    for chosen, probability in tokens:
        logprobs = turn_logprobs(chosen, tokens)
        assert np.exp(logprobs.sum()) == pytest.approx(probability, rel=1e-5)
