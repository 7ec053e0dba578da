"""What `flush()` acknowledged, as a worker wrote it down right after: one line of JSON for each acknowledgement.

    {"events": 812, "episodes": [["0197…", 14, "completed"], ["0197…", 3, null]]}

`events` counts from the start of the process; `episodes` are those that the acknowledgement is news of: id, steps,
and the status where the end is acknowledged too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class EpisodeAck:
    """What is acknowledged of one episode."""

    episode_id: str
    steps: int = 0
    status: str | None = None


@dataclass
class Acknowledged:
    """What one process was promised: the first `events` of its events, and these episodes by id."""

    events: int = 0
    episodes: dict[str, EpisodeAck] = field(default_factory=dict)


class AckFile:
    """The file, for the process that writes it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, events: int, episodes: Iterable[EpisodeAck]) -> None:
        """Append one acknowledgement in one write."""
        rows = [[episode.episode_id, episode.steps, episode.status] for episode in episodes]
        line = json.dumps({"events": events, "episodes": rows}, separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Acknowledged:
    """All that the file acknowledges. A last line that was cut off by the death of its writer is left out."""
    found = Acknowledged()
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for line in lines[:-1]:
        body = json.loads(line)
        found.events = body["events"]
        found.episodes.update({row[0]: EpisodeAck(*row) for row in body["episodes"]})
    return found
