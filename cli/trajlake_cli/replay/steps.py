"""One step of a trajectory: who acted, what was said, called, returned and rewarded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from trajlake_cli.replay.json_view import pretty_json
from trajlake_cli.replay.page import BAD, GOOD, QUIET, Page
from trajlake_cli.replay.tensors import describe
from trajlake_cli.text import one_line
from trajlake_cli.values import cell, number

Step = Mapping[str, Any]

COLOURS = {"system": "bright_black", "user": "cyan", "agent": "green", "tool": "yellow", "environment": "magenta"}
_MARGIN = 6
_SPOKEN = ("message", "reasoning", "tool_calls", "tool_results", "content_parts", "error")


def tool_names(steps: Iterable[Step]) -> dict[str, str]:
    """Which tool each call id stands for, because a result names the call only. Sources use an id again, so a step
    is to be shown with the names of the steps up to it; the last call counts."""
    return {
        call["id"]: call["name"]
        for step in steps
        for call in step.get("tool_calls") or []
        if call.get("id") and call.get("name")
    }


def add_step(page: Page, step: Step, names: Mapping[str, str]) -> None:
    """Add the step's title and, behind a bar in its source's colour, everything that it holds."""
    source = str(step.get("source") or "?")
    colour = COLOURS.get(source, "white")
    gutter = Text(" " * (_MARGIN - 2)) + Text("│ ", style=colour)
    talks = any(step.get(key) for key in _SPOKEN)
    if talks:
        page.gap()
    results = step.get("tool_results") or []
    title = Text(f"{step['step_index']:>{_MARGIN - 3}}  ", style="bold") + Text(
        one_line(source), style=f"bold {colour}"
    )
    if facts := _facts(step):
        title.append("  " + facts, style=QUIET)
    titled = len(results) == 1 and not step.get("message")  # then the title says which tool answered
    if titled:
        title.append_text(Text("  ") + _result_title(results[0], names))
    page.spread(title, _outcome(step))
    text_style = QUIET if source == "system" else ""
    if step.get("reasoning"):
        page.add_text(step["reasoning"], f"{QUIET} italic", gutter)
    if step.get("message"):
        page.add_text(step["message"], text_style, gutter)
    elif step.get("message") == "" and talks:
        page.add(("(empty message)", QUIET), gutter=gutter)
    _add_parts(page, step.get("content_parts") or [], gutter)
    _add_tensors(page, step.get("tensors") or [], gutter)
    for call in step.get("tool_calls") or []:
        _add_call(page, call, gutter)
    for result in results:
        if not titled:
            page.lines.append(gutter + _result_title(result, names))
        if result.get("content") is not None or not step.get("content_parts"):  # else the parts are what came back
            _add_result(page, result, gutter, 0 if titled else 2)
    if step.get("error"):
        page.add_text(f"error: {step['error']}", BAD, gutter)


def searchable(step: Step) -> str:
    """All text of a step, for a search through it."""
    parts = [step.get("message"), step.get("reasoning"), step.get("error")]
    parts += [part.get("text") for part in step.get("content_parts") or []]
    for call in step.get("tool_calls") or []:
        parts += [call.get("name"), call.get("arguments")]
    parts += [result.get("content") for result in step.get("tool_results") or []]
    return "\n".join(part for part in parts if part)


def summary(step: Step) -> str:
    """What the step is about in one line: its message, else its calls, results, tensors or parts."""
    if step.get("message"):
        return str(step["message"])
    if calls := step.get("tool_calls"):
        return " ".join(f"→ {call.get('name')} {call.get('arguments') or ''}" for call in calls)
    if results := step.get("tool_results"):
        parts = " ".join(part["text"] for part in step.get("content_parts") or [] if part.get("text"))
        return " ".join(f"← {result.get('content') or parts}" for result in results)
    if tensors := step.get("tensors"):
        return "  ".join(f"{tensor.get('name')} {' '.join(describe(tensor)[1:])}" for tensor in tensors)
    if said := step.get("content_parts"):
        return " ".join(part.get("text") or f"[{part.get('type') or 'part'}]" for part in said)
    return str(step.get("reasoning") or step.get("error") or "")


def _facts(step: Step) -> str:
    facts = [one_line(str(step["model"]))] if step.get("model") else []
    if step.get("policy_version") is not None:
        facts.append(f"@{cell(step['policy_version'])}")
    if step.get("latency_ms") is not None:
        facts.append(f"{step['latency_ms'] / 1000:,.2f} s")
    tokens = step.get("completion_tokens")
    if tokens is None and step.get("token_ids") is not None:
        tokens = len(step["token_ids"])
    if tokens is not None:
        facts.append(f"{tokens:,} token{'' if tokens == 1 else 's'}")
    parent = step.get("parent_step")
    if parent is not None and parent != step["step_index"] - 1:
        facts.append("follows no step" if parent < 0 else f"follows step {parent}")
    if step.get("is_copied_context"):
        facts.append("copied context")
    return " · ".join(facts)


def _outcome(step: Step) -> Text:
    """`reward 1` and the flags that the environment gave, for the right end of the title."""
    parts = Text()
    reward = step.get("reward")
    if reward is not None:
        style = GOOD if reward > 0 else "red" if reward < 0 else QUIET if reward == 0 else "yellow"
        parts.append(f"reward {number(reward)}", style=style)
    for flag in ("terminated", "truncated"):
        if step.get(flag):
            parts.append(("  " if parts.plain else "") + flag, style="bold yellow")
    return parts


def _add_parts(page: Page, parts: Sequence[Mapping[str, Any]], gutter: Text) -> None:
    for part in parts:
        if part.get("text"):
            page.add_text(part["text"], "", gutter)
            continue
        where = part.get("uri") or ""
        size = f"{len(part['data']):,} bytes" if part.get("data") is not None else ""
        facts = ", ".join(filter(None, [part.get("media_type"), size, where[:200]]))
        page.add((f"[{part.get('type') or 'part'}] {facts}", QUIET), gutter=gutter)


def _add_tensors(page: Page, tensors: Sequence[Mapping[str, Any]], gutter: Text) -> None:
    described = [(cell(tensor.get("name")), *describe(tensor)) for tensor in tensors]
    widths = [max((len(row[at]) for row in described), default=0) for at in range(2)]
    for name, kind, values in described:
        page.add(name.ljust(widths[0]) + "  ", (kind.ljust(widths[1]) + "  ", QUIET), values, gutter=gutter)


def _add_call(page: Page, call: Mapping[str, Any], gutter: Text) -> None:
    name, arguments = one_line(str(call.get("name") or "?")), call.get("arguments") or ""
    room = page.width - _MARGIN - 2
    shown = pretty_json(arguments, room)
    if shown is None and call.get("arguments_kind") == "string" and arguments.lstrip()[:1] in ("{", "["):
        page.add(("→ ", "bold"), (name, "bold"), ("  (arguments are not valid JSON)", "yellow"), gutter=gutter)
        page.add_text(arguments, "", gutter, indent=2)
        return
    shown = arguments if shown is None else shown
    if "\n" not in shown and len(name) + len(shown) + 3 <= room:
        page.add(("→ ", "bold"), (name, "bold"), "" if shown in ("", "{}") else f" {shown}", gutter=gutter)
        return
    page.add(("→ ", "bold"), (name, "bold"), gutter=gutter)
    page.add_text(shown, "", gutter, indent=2)


def _result_title(result: Mapping[str, Any], names: Mapping[str, str]) -> Text:
    call_id = str(result.get("call_id") or "")
    title = Text("← ", style="bold") + Text(one_line(names.get(call_id) or call_id or "result")[:80], style="bold")
    return title + Text("  error", style=BAD) if result.get("is_error") else title


def _add_result(page: Page, result: Mapping[str, Any], gutter: Text, indent: int) -> None:
    content = result.get("content")
    if not content:
        page.add(("(nothing returned)" if content is None else "(empty text)", QUIET), gutter=gutter, indent=indent)
        return
    shown = pretty_json(content, page.width - _MARGIN - indent)
    page.add_text(content if shown is None else shown, "red" if result.get("is_error") else "", gutter, indent)
