"""A rollout that records while things go wrong, and what each step cost it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from trajlake.ingest.writer import Writer

MESSAGE = "The customer asks whether the booking can be changed to the later flight. " * 8


@dataclass(frozen=True)
class Load:
    """Seconds of each `step()`, the most bytes that the writer held, and how much the process grew."""

    seconds: list[float]
    held_bytes: int
    grown_bytes: int
    episodes: int

    def p99(self) -> float:
        return sorted(self.seconds)[len(self.seconds) * 99 // 100]

    def line(self, what: str) -> str:
        ordered = sorted(self.seconds)
        return (
            f"{what}: {len(ordered):,} steps, p50 {ordered[len(ordered) // 2] * 1e6:.0f} µs, "
            f"p99 {self.p99() * 1e6:.0f} µs, max {ordered[-1] * 1e3:.1f} ms; at most {self.held_bytes / 1e6:.1f} MB "
            f"in the writer, the process grew by {self.grown_bytes / 1e6:.0f} MB"
        )


def resident_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def record_for(
    writer: Writer, seconds: float, *, pause: float = 0.001, steps_each: int = 20, prefix: str = "l"
) -> Load:
    """Record episodes of `steps_each` steps for `seconds`, one step every `pause` or a little more."""
    spent: list[float] = []
    held = number = 0
    before = resident_bytes()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with writer.episode(episode_id=f"{prefix}{number:06d}", task_id="load") as episode:
            for step in range(steps_each):
                ids = list(range(64))
                began = time.perf_counter()
                episode.step(message=f"{step} {MESSAGE}", token_ids=ids, logprobs=[-0.5] * 64)
                spent.append(time.perf_counter() - began)
                time.sleep(pause)
        number += 1
        held = max(held, writer.stats.memory_bytes)
    return Load(spent, held, resident_bytes() - before, number)
