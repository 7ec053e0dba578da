"""Tasks of the desk: made from a domain and a number, each with a start, a plan and the state it must end in.

What a task expects is worked out from the numbers that it was made of, never by carrying out its plan.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajlake.demo.desk.world import World

DOMAINS = ("orders", "ledger", "files")
_PEOPLE = ("amara", "bruno", "chiara", "dmitri", "elif", "farid", "greta", "hiro")
_ITEMS = ("kettle", "lamp", "desk", "chair", "radio", "clock")


@dataclass(frozen=True)
class Call:
    """One call of a tool that an agent means to make, and what it says with it."""

    name: str
    arguments: dict[str, Any]
    message: str


Plan = Generator[Call, Any, list[Call]]
"""Yields calls that look something up, gets what they return, and returns the calls that change the world."""


@dataclass(frozen=True)
class Task:
    """`expected` maps records to what they must be in the end (None: gone); `order` names the changes in order."""

    task_id: str
    domain: str
    difficulty: str
    prompt: str
    records: dict[str, Any]
    plan: Callable[[], Plan]
    expected: dict[str, Any]
    order: tuple[str, ...]
    notify: str
    budget: int  # turns of the agent

    def world(self, damaged: str | None = None) -> World:
        """A new world to solve the task in; the text of record `damaged` is cut off, as after a bad write."""
        texts = {key: json.dumps(record) for key, record in self.records.items()}
        if damaged is not None:
            texts[damaged] = texts[damaged][: len(texts[damaged]) // 2]
        return World(texts)


@dataclass(frozen=True)
class Verdict:
    """What the verifier found. `reward` is 1.0 where everything is as it must be, else 0.0."""

    state: bool
    order: bool
    notice: bool
    findings: tuple[str, ...]

    @property
    def success(self) -> bool:
        return self.state and self.order and self.notice

    @property
    def reward(self) -> float:
        return float(self.success)


def verify(task: Task, world: World) -> Verdict:
    """Compare the world with what the task expects: the records, the order of changes, the message at the end."""
    wrong = [problem for key, value in task.expected.items() if (problem := _difference(world, key, value))]
    extra = sorted(set(world.records) - set(task.records) - set(task.expected))
    wrong += [f"{key} should not be there" for key in extra]
    order = [] if world.changes == list(task.order) else [_disorder(world.changes, task.order)]
    told = [message["to"] for message in world.outbox]
    notice = [] if told == [task.notify] else [f"messages went to {', '.join(told) or 'nobody'}, not to {task.notify}"]
    return Verdict(not wrong, not order, not notice, (*wrong, *order, *notice))


def _difference(world: World, key: str, expected: Any) -> str | None:
    kind, _, name = key.partition("/")
    text = world.records.get(key)
    if expected is None:
        return None if text is None else f"{kind} {name} is still there"
    if text is None:
        return f"{kind} {name} is gone"
    try:
        found = json.loads(text)
    except ValueError:
        return f"{kind} {name} is damaged"
    for field, value in expected.items():
        if found.get(field) != value:
            return f"{kind} {name}: {field} is {found.get(field)!r}, not {value!r}"
    return None


def _disorder(done: Sequence[str], wanted: Sequence[str]) -> str:
    missing = [name for name in wanted if name not in done]
    if missing:
        return f"{missing[0]} was never done"
    return f"done as {' > '.join(done)}, not as {' > '.join(wanted)}"


def make_task(domain: str, number: int) -> Task:
    """Task `number` of a domain; the same arguments give the same task everywhere."""
    rng = np.random.default_rng(zlib.crc32(f"{domain}/{number}".encode()))
    return _MAKERS[domain][number % len(_MAKERS[domain])](number, rng)


def _people(rng: np.random.Generator) -> tuple[str, str, dict[str, Any]]:
    one, other = (str(name) for name in rng.choice(_PEOPLE, 2, replace=False))
    return one, other, {f"person/{name}": {"name": name} for name in (one, other)}


def _order(customer: str, item: str, total: float, status: str = "pending") -> dict[str, Any]:
    return {"customer": customer, "item": item, "total": total, "refunded": 0, "status": status}


def _cancel(number: int, rng: np.random.Generator) -> Task:
    customer, other, records = _people(rng)
    order_id, item = f"A{1000 + number}", str(rng.choice(_ITEMS))
    total = int(rng.integers(20, 400))
    fee = int(rng.integers(1, 4)) * 5  # per cent
    paid_back = round(total * (100 - fee) / 100, 2)
    records |= {
        f"order/{order_id}": _order(customer, item, total),
        f"order/B{1000 + number}": _order(other, item, total + 1),
        f"stock/{item}": {"count": 3},
    }

    def plan() -> Plan:
        found = yield Call("find_orders", {"customer": customer}, f"I look for the orders of {customer}.")
        order = yield Call("get_order", {"order_id": found[0]}, "I read the order.")
        expression = f"{order['total']} * {100 - fee} / 100"
        amount = yield Call("calculate", {"expression": expression}, "I take the fee off.")
        return [
            Call("cancel_order", {"order_id": found[0], "reason": "customer"}, "I cancel the order."),
            Call("refund", {"order_id": found[0], "amount": amount}, f"I pay {amount} back."),
            Call("send_message", {"to": customer, "text": f"Cancelled; {amount} is on its way."}, "I tell them."),
        ]

    return Task(
        f"cancel-{number:02d}", "orders", "short",
        f"{customer} wants the {item} order cancelled. Pay back what was paid less a fee of {fee} per cent, "
        "cancel before you pay, and tell them when both are done.",
        records, plan,
        {f"order/{order_id}": {"status": "cancelled", "refunded": paid_back, "total": total},
         f"order/B{1000 + number}": {"status": "pending", "refunded": 0}},
        ("cancel_order", "refund", "send_message"), customer, 12,
    )  # fmt: skip


def _exchange(number: int, rng: np.random.Generator) -> Task:
    customer, _, records = _people(rng)
    order_id = f"A{1000 + number}"
    old, new = (str(item) for item in rng.choice(_ITEMS, 2, replace=False))
    total, discount = int(rng.integers(50, 300)), int(rng.integers(5, 40))
    count = int(rng.integers(1, 5))
    records |= {
        f"order/{order_id}": _order(customer, old, total),
        f"stock/{old}": {"count": 2},
        f"stock/{new}": {"count": count},
    }

    def plan() -> Plan:
        found = yield Call("find_orders", {"customer": customer}, f"I look for the orders of {customer}.")
        yield Call("get_order", {"order_id": found[0]}, "I read the order.")
        yield Call("get_stock", {"item": new}, f"Is a {new} there?")
        return [
            Call("exchange_item", {"order_id": found[0], "item": new}, f"I put the {new} in."),
            Call("refund", {"order_id": found[0], "amount": discount}, f"I pay the difference of {discount}."),
            Call("send_message", {"to": customer, "text": f"You get the {new}."}, "I tell them."),
        ]

    return Task(
        f"exchange-{number:02d}", "orders", "short",
        f"{customer} wants a {new} instead of the {old}, which is {discount} cheaper. Exchange it if there is one, "
        "then pay the difference back, then tell them.",
        records, plan,
        {f"order/{order_id}": {"item": new, "refunded": discount, "status": "pending"},
         f"stock/{new}": {"count": count - 1}, f"stock/{old}": {"count": 3}},
        ("exchange_item", "refund", "send_message"), customer, 12,
    )  # fmt: skip


def _settle(number: int, rng: np.random.Generator) -> Task:
    owner, other, records = _people(rng)
    source, target = f"L{200 + number}", f"L{300 + number}"
    amounts = [int(amount) for amount in rng.integers(3, 90, int(rng.integers(2, 5)))]
    balance = sum(amounts) + int(rng.integers(1, 50))
    records |= {
        f"account/{source}": {"owner": owner, "balance": balance, "state": "open"},
        f"account/{target}": {"owner": other, "balance": 10, "state": "open"},
        f"entries/{source}": {"amounts": amounts},
    }

    def plan() -> Plan:
        yield Call("get_account", {"account": source}, "I look at the account.")
        entries = yield Call("list_entries", {"account": source}, "What is not settled?")
        expression = " + ".join(map(str, entries))
        total = yield Call("calculate", {"expression": expression}, "I add it up.")
        return [
            Call("transfer", {"source": source, "target": target, "amount": total}, f"I settle {total}."),
            Call("close_account", {"account": source}, "I close the account."),
            Call("send_message", {"to": owner, "text": f"{source} is settled and closed."}, "I tell the owner."),
        ]

    return Task(
        f"settle-{number:02d}", "ledger", "short",
        f"Settle the open entries of {source} to {target}, then close {source} and tell its owner {owner}.",
        records, plan,
        {f"account/{source}": {"balance": balance - sum(amounts), "state": "closed"},
         f"account/{target}": {"balance": 10 + sum(amounts), "state": "open"}},
        ("transfer", "close_account", "send_message"), owner, 12,
    )  # fmt: skip


def _share(number: int, rng: np.random.Generator) -> Task:
    owner, _, records = _people(rng)
    source, first, second = (f"L{hundred + number}" for hundred in (200, 300, 400))
    balance = 4 * int(rng.integers(10, 200))
    records |= {
        f"account/{source}": {"owner": owner, "balance": balance, "state": "open"},
        f"account/{first}": {"owner": owner, "balance": 0, "state": "open"},
        f"account/{second}": {"owner": owner, "balance": 0, "state": "open"},
    }

    def plan() -> Plan:
        account = yield Call("get_account", {"account": source}, "I look at the account.")
        part = yield Call("calculate", {"expression": f"{account['balance']} / 4"}, "A quarter is …")
        return [
            Call("transfer", {"source": source, "target": first, "amount": part}, "The first quarter."),
            Call("transfer", {"source": source, "target": second, "amount": part}, "The second quarter."),
            Call(
                "send_message", {"to": owner, "text": f"{part} each is on {first} and {second}."}, "I tell the owner."
            ),
        ]

    return Task(
        f"share-{number:02d}", "ledger", "short",
        f"Move a quarter of {source} to {first} and a quarter to {second}, then tell the owner {owner}.",
        records, plan,
        {f"account/{source}": {"balance": balance / 2}, f"account/{first}": {"balance": balance / 4},
         f"account/{second}": {"balance": balance / 4}},
        ("transfer", "transfer", "send_message"), owner, 10,
    )  # fmt: skip


def _total(number: int, rng: np.random.Generator) -> Task:
    owner, _, records = _people(rng)
    folder = f"trip-{number}"
    amounts = {f"{folder}/bill-{at}.txt": int(rng.integers(5, 200)) for at in range(int(rng.integers(2, 5)))}
    records |= {f"file/{path}": {"text": str(amount)} for path, amount in amounts.items()}
    records[f"file/{folder}/draft.tmp"] = {"text": "not yet"}

    def plan() -> Plan:
        paths = yield Call("list_files", {"folder": folder}, "What is there?")
        texts = []
        for path in paths:
            if path.endswith(".txt"):
                text = yield Call("read_file", {"path": path}, f"I read {path}.")
                texts.append(text)
        total = yield Call("calculate", {"expression": " + ".join(texts)}, "I add it up.")
        return [
            Call("write_file", {"path": f"{folder}/total.txt", "text": str(total)}, f"I write down {total}."),
            Call("delete_file", {"path": f"{folder}/draft.tmp"}, "The draft can go."),
            Call("send_message", {"to": owner, "text": f"The total is {total}."}, f"I tell {owner}."),
        ]

    kept = {f"file/{path}": {"text": str(amount)} for path, amount in amounts.items()}
    return Task(
        f"total-{number:02d}", "files", "long",
        f"Add up the bills in {folder}, write the sum to {folder}/total.txt, then delete the draft and tell {owner}.",
        records, plan,
        kept | {f"file/{folder}/total.txt": {"text": str(sum(amounts.values()))}, f"file/{folder}/draft.tmp": None},
        ("write_file", "delete_file", "send_message"), owner, 14,
    )  # fmt: skip


def _archive(number: int, rng: np.random.Generator) -> Task:
    owner, _, records = _people(rng)
    folder = f"cases-{number}"
    closed = [bool(flag) for flag in rng.permutation([True, True, False])]
    paths = [f"{folder}/case-{at}.txt" for at in range(len(closed))]
    texts = ["closed" if flag else "open" for flag in closed]
    records |= {f"file/{path}": {"text": text} for path, text in zip(paths, texts, strict=True)}
    done = [path for path, flag in zip(paths, closed, strict=True) if flag]

    def plan() -> Plan:
        found = yield Call("list_files", {"folder": folder}, "What is there?")
        moves = []
        for path in found:
            state = yield Call("read_file", {"path": path}, f"Is {path} closed?")
            if state == "closed":
                moves.append(Call("move_file", {"path": path, "folder": "archive"}, f"{path} goes to the archive."))
        return [*moves, Call("send_message", {"to": owner, "text": f"{len(moves)} cases moved."}, f"I tell {owner}.")]

    expected: dict[str, Any] = {
        f"file/{path}": None if path in done else {"text": "open"} for path in paths
    } | {f"file/archive/{path.rpartition('/')[2]}": {"text": "closed"} for path in done}  # fmt: skip
    return Task(
        f"archive-{number:02d}", "files", "long",
        f"Move every closed case of {folder} to the folder archive, then tell {owner}.",
        records, plan, expected, ("move_file", "move_file", "send_message"), owner, 14,
    )  # fmt: skip


_MAKERS: dict[str, tuple[Callable[[int, np.random.Generator], Task], ...]] = {
    "orders": (_cancel, _exchange),
    "ledger": (_settle, _share),
    "files": (_total, _archive),
}
