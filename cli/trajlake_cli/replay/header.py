"""What stands above a replayed episode: how it ended, and who did what with which policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from trajlake_cli.replay.page import BAD, GOOD, QUIET, Page
from trajlake_cli.text import one_line
from trajlake_cli.values import cell, number

_NAMES = 11  # the width of the fields' names


def add_header(page: Page, episode: Mapping[str, Any], place: str = "") -> None:
    """The header; `place` is something like `2 of 17`."""
    mark, style = verdict(episode)
    page.rule(style, "━")
    title = Text(f"{mark}  ", style=style) + Text(task(episode), style="bold")
    page.spread(title, Text(place, style=QUIET))
    _field(page, "episode", cell(episode["episode_id"]))
    _pairs(page, ("run", _name(episode, "run_id")), ("policy", policy(episode)), ("agent", _agent(episode)))
    _pairs(page, ("reward", reward_of(episode)), ("status", _status(episode)), ("size", _size(episode)))
    failure = ": ".join(one_line(str(episode[key])) for key in ("failure_stage", "failure_detail") if episode.get(key))
    if failure:
        _field(page, "failure", failure, BAD)
    if episode.get("retracted"):
        _field(page, "retracted", f"because: {cell(episode['retracted'])}", BAD)
    if episode.get("duplicate_of"):
        _field(page, "repeats", cell(episode["duplicate_of"]))
    if episode.get("token_audit"):
        _field(page, "tokens", cell(episode["token_audit"]), "yellow")
    page.rule(style, "━")


def verdict(episode: Mapping[str, Any]) -> tuple[str, str]:
    """(`✗ failed`, its style), as --failed means it. What nobody judged is neither solved nor failed."""
    status, success = episode.get("status"), episode.get("success")
    if status == "failed" or success is False:
        return "✗ failed", BAD
    if success is None:
        return f"○ {'aborted' if status == 'aborted' else 'not judged'}", "yellow"
    return "✓ solved", f"bold {GOOD}"


def task(episode: Mapping[str, Any]) -> str:
    """`tau-bench/airline/17 · trial 2`, from whatever of it is known."""
    path = ""
    for key in ("task_family", "domain", "task_id"):
        if episode.get(key) is not None:
            part = cell(episode[key])
            # Some sources repeat the family in the task's name.
            path = part if part == path or part.startswith(f"{path}/") else f"{path}/{part}" if path else part
    env = cell(episode["env_name"]) if episode.get("env_name") else ""
    parts = [path] if path else []
    if env and env not in path:
        parts.append(env)
    parts += [f"{key} {episode[key]}" for key in ("trial", "seed") if episode.get(key) is not None]
    return " · ".join(parts) or "no task named"


def policy(episode: Mapping[str, Any]) -> str:
    """`gpt-4o @1200`."""
    version = episode.get("policy_version")
    return " ".join(filter(None, [_name(episode, "policy_name"), f"@{cell(version)}" if version is not None else ""]))


def reward_of(episode: Mapping[str, Any]) -> str:
    """`0.5 (format 1, tests 0.25)`; `not scored` where there is none. Late scores that are the reward and the verdict
    themselves are not said twice."""
    reward = episode.get("reward")
    text = "not scored" if reward is None else number(reward)
    said = [("reward", reward), ("success", episode.get("success"))]
    components = [part for part in episode.get("rewards") or [] if (part.get("name"), part.get("value")) not in said]
    parts = [f"{cell(part.get('name'))} {cell(part.get('value'))}" for part in components]
    return f"{text} ({', '.join(parts)})" if parts else text


def _status(episode: Mapping[str, Any]) -> str:
    flags = [flag for flag in ("terminated", "truncated") if episode.get(flag)]
    reason = episode.get("stop_reason")
    return ", ".join([cell(episode.get("status")), *(flag for flag in flags if flag != episode.get("status"))]) + (
        f" ({cell(reason)})" if reason else ""
    )


def _size(episode: Mapping[str, Any]) -> str:
    steps, calls, errors = (episode.get(key) or 0 for key in ("n_steps", "n_tool_calls", "n_tool_errors"))
    parts = [_count(steps, "step")]
    if calls:
        parts.append(_count(calls, "tool call") + (f" ({_count(errors, 'error')})" if errors else ""))
    tokens = [episode.get(key) for key in ("prompt_tokens", "completion_tokens")]
    if any(value is not None for value in tokens):
        parts.append(_count(sum(value or 0 for value in tokens), "token"))
    if episode.get("cost_usd") is not None:
        parts.append(f"${episode['cost_usd']:,.4f}")
    if episode.get("wall_ms") is not None:
        parts.append(f"{episode['wall_ms'] / 1000:,.1f} s")
    return ", ".join(parts)


def _count(number_of: int, noun: str) -> str:
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def _agent(episode: Mapping[str, Any]) -> str:
    return " ".join(filter(None, [_name(episode, "agent_name"), _name(episode, "agent_version")]))


def _name(episode: Mapping[str, Any], key: str) -> str:
    value = episode.get(key)
    return "" if value is None else cell(value)


def _field(page: Page, name: str, value: str, style: str = "") -> None:
    page.add((value, style), gutter=Text(name.ljust(_NAMES), style=QUIET))


def _pairs(page: Page, *pairs: tuple[str, str]) -> None:
    """Several short fields in one line where they fit, else one below the other."""
    known = [(name, value) for name, value in pairs if value]
    if not known:
        return
    line = Text()
    for at, (name, value) in enumerate(known):
        line.append(name.ljust(_NAMES) if at == 0 else f"   {name} ", style=QUIET)
        line.append(value)
    if line.cell_len <= page.width:
        page.lines.append(line)
        return
    for name, value in known:
        _field(page, name, value)
