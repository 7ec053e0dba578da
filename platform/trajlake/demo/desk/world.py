"""The world's state: records as JSON text, as a small database would hold them, and the messages that were sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


class ToolError(Exception):
    """The tool refuses, and says why: whoever called it may correct itself."""


@dataclass
class World:
    """`records` maps `kind/name` to JSON text; `changes` names the tools that changed something, in order."""

    records: dict[str, str]
    outbox: list[dict[str, str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def read(self, kind: str, name: str) -> dict[str, Any]:
        """One record. Raises ToolError where there is none, and ValueError where its text is damaged: that is the
        world's fault, so no tool catches it."""
        text = self.records.get(f"{kind}/{name}")
        if text is None:
            raise ToolError(f"there is no {kind} {name!r}")
        record: dict[str, Any] = json.loads(text)
        return record

    def write(self, kind: str, name: str, record: dict[str, Any]) -> None:
        """Put a record in, in place of the one with this name."""
        self.records[f"{kind}/{name}"] = json.dumps(record)

    def remove(self, kind: str, name: str) -> None:
        """Take a record out. Raises ToolError where there is none."""
        if self.records.pop(f"{kind}/{name}", None) is None:
            raise ToolError(f"there is no {kind} {name!r}")

    def names(self, kind: str, beginning: str = "") -> list[str]:
        """Names of the records of one kind that begin so, sorted."""
        prefix = f"{kind}/"
        return sorted(key[len(prefix) :] for key in self.records if key.startswith(prefix + beginning))
