"""What may be chosen for a Writer. docs/writer.md shows what each choice promises, in one table."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from trajlake.errors import UsageError

Durability = Literal["remote", "spool", "memory"]
"""What `flush()` waits for: the object store has it; it is fsynced in the spool on local disk; nothing."""

OnFull = Literal["spill", "block", "drop_and_count"]
"""What happens when memory is full because neither disk nor store take events as fast as they come.

`spill`: what one place refuses goes to the other (from memory straight into the store, or from memory to the disk);
`step()` waits only while both refuse. `block`: `step()` waits for the one place that the durability names.
`drop_and_count`: `step()` never waits; steps are dropped, counted, logged, and their episode ends as aborted.
"""

DEFAULT_SPOOL_BYTES = 16 << 30


def default_spool() -> Path:
    """`TRAJLAKE_SPOOL`, else a folder in the user's state folder."""
    if folder := os.environ.get("TRAJLAKE_SPOOL"):
        return Path(folder)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "trajlake" / "spool"


@dataclass(frozen=True)
class WriterOptions:
    """How a Writer works. Sizes in bytes, times in seconds.

    `segment_bytes` and `segment_seconds` bound how much and how long events wait before they are uploaded, and
    `linger_seconds` how long what others wait for does: the end of an episode, a score, a retraction.
    `memory_bytes` bounds what is queued or waits in memory, `spool_bytes` what this writer has on disk. From
    `batch_bytes` on events become Arrow at once: larger batches take less time, and no other thread of Python runs
    while one is made.
    `log_seconds` is the time between two lines in the log (0: none). `exit_seconds` is how long the end of the
    interpreter waits for what is not durable yet.
    """

    durability: Durability = "remote"
    on_full: OnFull = "spill"
    spool: Path = field(default_factory=default_spool)
    segment_bytes: int = 4 << 20
    segment_seconds: float = 5.0
    linger_seconds: float = 2.0
    batch_bytes: int = 1 << 20
    memory_bytes: int = 64 << 20
    spool_bytes: int = DEFAULT_SPOOL_BYTES
    log_seconds: float = 60.0
    exit_seconds: float = 20.0
    exit_on_sigterm: bool = True

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("durability", self.durability, get_args(Durability)),
            ("on_full", self.on_full, get_args(OnFull)),
        ):
            if value not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        for name in (
            "segment_bytes",
            "segment_seconds",
            "linger_seconds",
            "batch_bytes",
            "memory_bytes",
            "spool_bytes",
        ):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be more than 0, not {getattr(self, name)!r}")

    @property
    def needs_disk(self) -> bool:
        """Whether a spool folder is made: only a writer that never goes to the disk does without one."""
        return self.durability != "memory" or self.on_full == "spill"
