"""One episode of the desk as steps: what the agent said and called, what tools returned, what the verifier found."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Generator
from typing import Any

import numpy as np

from trajlake.demo.assignment import Assignment
from trajlake.demo.desk import tools
from trajlake.demo.desk.agent import POLICIES, Agent, Turn
from trajlake.demo.desk.tasks import DOMAINS, Task, Verdict, make_task, verify
from trajlake.demo.desk.tokens import encode
from trajlake.demo.desk.world import ToolError, World
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields

DAMAGE = 0.04  # of the episodes start in a world with a damaged record
ENV_VERSION = "1"

Steps = Generator[StepFields, None, EndFields]


def assignments(tasks: int, trials: int, *, share: int = 0, shares: int = 1, pause: float = 0.0) -> list[Assignment]:
    """Every task of every domain, `trials` times with each policy version; `share` of `shares` takes its tasks.

    `pause` is the seconds that the agent thinks at each turn, so that a rollout lasts as long as one does.
    """
    made = [make_task(domain, number) for number in range(tasks) for domain in DOMAINS]
    return [
        assignment(task, version, trial, pause=pause)
        for task in made[share::shares]
        for trial in range(trials)
        for version in POLICIES
    ]


def assignment(task: Task, version: str, trial: int, *, pause: float = 0.0) -> Assignment:
    """One trial of one task with one policy version."""
    seed = zlib.crc32(f"{task.task_id}/{version}/{trial}".encode())
    begin: EpisodeFields = {
        "task_id": task.task_id,
        "task_family": "desk",
        "domain": task.domain,
        "difficulty": task.difficulty,
        "group_id": f"{task.task_id}@{version}",
        "trial": trial,
        "seed": seed,
        "env_name": "desk",
        "env_version": ENV_VERSION,
        "policy_name": "scripted",
        "policy_version": version,
        "agent_name": "desk-agent",
    }
    return Assignment(begin, lambda: play(task, version, seed, pause=pause))


def play(task: Task, version: str, seed: int, *, pause: float = 0.0) -> Steps:
    """Play the task. Everything but the measured latencies follows from the arguments."""
    rng = np.random.default_rng(seed)
    world = task.world(_damaged(task, rng))
    agent = Agent(task, POLICIES[version][task.domain], rng)
    context = 0
    for source, message in (("system", _rules(task.domain)), ("user", task.prompt)):
        ids = encode(message)
        context += len(ids)
        yield {"source": source, "message": message, "token_ids": ids, "loss_mask": [0] * len(ids)}
    for number in range(task.budget):
        began = time.perf_counter()
        turn = agent.turn()
        time.sleep(pause)
        yield _agent_step(turn, number, context, _milliseconds_since(began))
        context += len(turn.token_ids)
        if turn.move.call is None:
            return (yield from _judge(task, world, agent, gave_up=turn.move.kind == "give_up"))
        began = time.perf_counter()
        try:
            content, is_error = _use(world, turn)
        except ValueError as error:  # a damaged record: nobody's fault but the world's
            detail = f"{type(error).__name__}: {error}"
            yield {"source": "environment", "error": detail, "latency_ms": _milliseconds_since(began)}
            return {
                "status": "failed",
                "stop_reason": type(error).__name__,
                "failure_stage": "environment",
                "failure_detail": f"the world broke in {turn.move.call.name}: {detail}",
            }
        ids = encode(content)
        context += len(ids)
        yield {
            "source": "tool",
            "tool_results": [{"call_id": f"call-{number}", "content": content, "is_error": is_error}],
            "token_ids": ids,
            "loss_mask": [0] * len(ids),
            "latency_ms": _milliseconds_since(began),
        }
        agent.observe(turn.move, None if is_error else json.loads(content), is_error)
    return (yield from _judge(task, world, agent, out_of_turns=True))


def _damaged(task: Task, rng: np.random.Generator) -> str | None:
    keys = sorted(key for key in task.records if not key.startswith("person/"))
    damage, key = rng.random(), str(rng.choice(keys))
    return key if damage < DAMAGE else None


def _rules(domain: str) -> str:
    lines = ["You work at a desk. Use the tools; do what is asked, in the order in which it is asked."]
    for name in (*tools.DOMAIN_TOOLS[domain], *tools.SHARED_TOOLS):
        tool = tools.TOOLS[name]
        lines.append(f"- {name}({', '.join(tool.parameters)}): {tool.does}")
    return "\n".join(lines)


def _agent_step(turn: Turn, number: int, context: int, latency_ms: float) -> StepFields:
    step: StepFields = {
        "source": "agent",
        "message": turn.move.message,
        "token_ids": turn.token_ids,
        "loss_mask": [1] * len(turn.token_ids),
        "logprobs": turn.logprobs,
        "prompt_tokens": context,
        "completion_tokens": len(turn.token_ids),
        "latency_ms": latency_ms,
    }
    if turn.move.call is not None:
        call = turn.move.call
        step["tool_calls"] = [{"id": f"call-{number}", "name": call.name, "arguments": call.arguments}]
    return step


def _use(world: World, turn: Turn) -> tuple[str, bool]:
    """What the tool returned as JSON text, or its refusal, and whether it is one."""
    assert turn.move.call is not None
    try:
        return json.dumps(tools.call(world, turn.move.call.name, turn.move.call.arguments)), False
    except ToolError as error:
        return str(error), True


def _judge(task: Task, world: World, agent: Agent, *, gave_up: bool = False, out_of_turns: bool = False) -> Steps:
    """The verifier's step and the outcome."""
    began = time.perf_counter()
    verdict = verify(task, world)
    found = "; ".join(verdict.findings)
    yield {
        "source": "environment",
        "message": "verified: as it should be" if verdict.success else f"verified: {found}",
        "reward": verdict.reward,
        "terminated": not out_of_turns,
        "truncated": out_of_turns,
        "latency_ms": _milliseconds_since(began),
    }
    outcome: EndFields = {"success": verdict.success, "reward": verdict.reward, "rewards": _components(verdict)}
    if out_of_turns:
        outcome["stop_reason"] = "budget"
    else:
        outcome["stop_reason"] = "gave up" if gave_up else "done"
    if not verdict.success:
        if out_of_turns:
            stage, why = "budget", f"{task.budget} turns were not enough"
        elif not gave_up:
            stage, why = "validation", "it said that everything was done"
        elif agent.errors:
            stage, why = "tool_call", f"it gave up, tool errors in a row: {agent.errors}"
        else:
            stage, why = "planning", "it gave up"
        outcome["failure_stage"] = stage
        outcome["failure_detail"] = f"{why}; {found}"
    return outcome


def _components(verdict: Verdict) -> list[dict[str, Any]]:
    return [
        {"name": name, "value": float(passed), "kind": "verifiable"}
        for name, passed in (("state", verdict.state), ("order", verdict.order), ("notice", verdict.notice))
    ]


def _milliseconds_since(began: float) -> float:
    return (time.perf_counter() - began) * 1000
