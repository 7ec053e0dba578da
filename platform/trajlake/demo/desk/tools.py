"""The tools: plain functions on a World, found by name, with their arguments checked before they run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trajlake.demo.desk.world import ToolError, World

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST_EXPRESSION = 200  # characters


@dataclass(frozen=True)
class Tool:
    """One tool. `parameters` maps each argument, all of them required, to its type."""

    name: str
    does: str
    parameters: Mapping[str, type]
    function: Callable[..., Any]
    changes: bool


def call(world: World, name: str, arguments: Mapping[str, Any]) -> Any:
    """What the tool returns, as a JSON value. Raises ToolError with what is wrong with the call."""
    tool = TOOLS.get(name)
    if tool is None:
        raise ToolError(f"there is no tool {name!r}")
    for parameter, kind in tool.parameters.items():
        if parameter not in arguments:
            raise ToolError(f"{name}: argument {parameter!r} is missing")
        value = arguments[parameter]
        fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not fits:
            raise ToolError(f"{name}: {parameter!r} must be a {kind.__name__}, not {value!r}")
    if unknown := sorted(set(arguments) - set(tool.parameters)):
        raise ToolError(f"{name}: there is no argument {unknown[0]!r}")
    result = tool.function(world, **arguments)
    if tool.changes:
        world.changes.append(name)
    return result


# -- for every task ------------------------------------------------------------------------------------------------


def calculate(world: World, expression: str) -> float:
    """Arithmetic with + - * / and parentheses, to two decimals."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise ToolError(f"the expression is longer than {_LONGEST_EXPRESSION} characters")
    try:
        return round(_value(ast.parse(expression, mode="eval").body), 2)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ToolError(f"cannot calculate {expression!r}: {error.args[0]}") from error


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ToolError(f"cannot calculate a {type(node).__name__}: only numbers and + - * / ( )")


def send_message(world: World, to: str, text: str) -> str:
    """Send a message."""
    world.read("person", to)
    world.outbox.append({"to": to, "text": text})
    return "sent"


# -- orders --------------------------------------------------------------------------------------------------------


def find_orders(world: World, customer: str) -> list[str]:
    """The ids of a customer's orders."""
    world.read("person", customer)
    return [name for name in world.names("order") if world.read("order", name)["customer"] == customer]


def get_order(world: World, order_id: str) -> dict[str, Any]:
    """One order: customer, item, total, status."""
    return world.read("order", order_id)


def get_stock(world: World, item: str) -> int:
    """How many of an item are there."""
    return int(world.read("stock", item)["count"])


def cancel_order(world: World, order_id: str, reason: str) -> str:
    """Cancel an order that was not shipped."""
    order = world.read("order", order_id)
    if order["status"] != "pending":
        raise ToolError(f"order {order_id} is {order['status']} and cannot be cancelled")
    world.write("order", order_id, order | {"status": "cancelled", "reason": reason})
    return "cancelled"


def refund(world: World, order_id: str, amount: float) -> str:
    """Pay money back, at most what was paid."""
    order = world.read("order", order_id)
    if not 0 < amount <= order["total"] - order["refunded"]:
        raise ToolError(f"{amount} is more than was paid for order {order_id}, or nothing")
    world.write("order", order_id, order | {"refunded": round(order["refunded"] + amount, 2)})
    return "refunded"


def exchange_item(world: World, order_id: str, item: str) -> str:
    """Put another item into an order; the old one goes back into stock."""
    order = world.read("order", order_id)
    count = get_stock(world, item)
    if count < 1:
        raise ToolError(f"{item} is out of stock")
    world.write("stock", item, {"count": count - 1})
    world.write("stock", order["item"], {"count": get_stock(world, order["item"]) + 1})
    world.write("order", order_id, order | {"item": item})
    return "exchanged"


# -- ledger --------------------------------------------------------------------------------------------------------


def get_account(world: World, account: str) -> dict[str, Any]:
    """One account: owner, balance, state."""
    return world.read("account", account)


def list_entries(world: World, account: str) -> list[float]:
    """What was booked on an account and is not settled."""
    world.read("account", account)
    return list(world.read("entries", account)["amounts"])


def transfer(world: World, source: str, target: str, amount: float) -> str:
    """Move money between two open accounts; it may not be more than is there."""
    giver, taker = world.read("account", source), world.read("account", target)
    for name, account in ((source, giver), (target, taker)):
        if account["state"] != "open":
            raise ToolError(f"account {name} is {account['state']}")
    if not 0 < amount <= giver["balance"]:
        raise ToolError(f"{amount} is more than the {giver['balance']} on account {source}, or nothing")
    world.write("account", source, giver | {"balance": round(giver["balance"] - amount, 2)})
    world.write("account", target, taker | {"balance": round(taker["balance"] + amount, 2)})
    return "transferred"


def close_account(world: World, account: str) -> str:
    """Close an account, with whatever is on it."""
    world.write("account", account, world.read("account", account) | {"state": "closed"})
    return "closed"


# -- files ---------------------------------------------------------------------------------------------------------


def list_files(world: World, folder: str) -> list[str]:
    """The paths of the files in a folder."""
    found = world.names("file", f"{folder}/")
    if not found:
        raise ToolError(f"there is no folder {folder!r}")
    return found


def read_file(world: World, path: str) -> str:
    """The text of a file."""
    return str(world.read("file", path)["text"])


def write_file(world: World, path: str, text: str) -> str:
    """Write a file, in place of the one that is there."""
    world.write("file", path, {"text": text})
    return "written"


def move_file(world: World, path: str, folder: str) -> str:
    """Move a file into another folder."""
    content = world.read("file", path)
    world.remove("file", path)
    target = f"{folder}/{path.rpartition('/')[2]}"
    world.write("file", target, content)
    return target


def delete_file(world: World, path: str) -> str:
    """Delete a file."""
    world.remove("file", path)
    return "deleted"


def _tool(function: Callable[..., Any], *, changes: bool = False, **parameters: type) -> Tool:
    does = (function.__doc__ or "").split("\n")[0]
    return Tool(function.__name__, does, parameters, function, changes)


TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        _tool(calculate, expression=str),
        _tool(send_message, changes=True, to=str, text=str),
        _tool(find_orders, customer=str),
        _tool(get_order, order_id=str),
        _tool(get_stock, item=str),
        _tool(cancel_order, changes=True, order_id=str, reason=str),
        _tool(refund, changes=True, order_id=str, amount=float),
        _tool(exchange_item, changes=True, order_id=str, item=str),
        _tool(get_account, account=str),
        _tool(list_entries, account=str),
        _tool(transfer, changes=True, source=str, target=str, amount=float),
        _tool(close_account, changes=True, account=str),
        _tool(list_files, folder=str),
        _tool(read_file, path=str),
        _tool(write_file, changes=True, path=str, text=str),
        _tool(move_file, changes=True, path=str, folder=str),
        _tool(delete_file, changes=True, path=str),
    )
}
DOMAIN_TOOLS: dict[str, tuple[str, ...]] = {
    "orders": ("find_orders", "get_order", "get_stock", "cancel_order", "refund", "exchange_item"),
    "ledger": ("get_account", "list_entries", "transfer", "close_account"),
    "files": ("list_files", "read_file", "write_file", "move_file", "delete_file"),
}
SHARED_TOOLS = ("calculate", "send_message")
