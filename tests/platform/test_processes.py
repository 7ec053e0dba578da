"""Processes that work for this one."""

from __future__ import annotations

import os
import time

from trajlake.processes import process_pool

_kept: list[bytearray] = []


def hold(size: int) -> int:
    """Keep so many bytes of memory, in the process that this runs in."""
    _kept.append(bytearray(size))
    return os.getpid()


def test_a_process_that_comes_to_hold_much_memory_goes_on():
    with process_pool(1, os.getpid) as pool:
        first = pool.submit(hold, 0).result()
        for _ in range(3):
            time.sleep(0.6)  # what psutil says is looked at once a second
            assert pool.submit(hold, 400_000_000).result() == first
