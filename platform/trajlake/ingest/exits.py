"""How writers meet the end of a process, and its forks: one place for what is global."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from multiprocessing import util
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajlake.ingest.writer import Writer

_writers: dict[int, Writer] = {}  # those that are open; one that is forgotten is closed at the end all the same
_has_hooks = False
_finalizer_of = 0  # the process that has registered with multiprocessing
_EXIT_CODE = 128 + signal.SIGTERM


def watch(writer: Writer) -> None:
    """Close `writer` when the interpreter ends, and tell it when it finds itself in a forked child."""
    global _has_hooks, _finalizer_of
    _writers[id(writer)] = writer
    if not _has_hooks:
        _has_hooks = True
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_after_fork)
    # Children of multiprocessing do not run what `atexit` knows, but they do run this. A child forgets what its
    # parent has registered here, so each process does it for itself.
    if _finalizer_of != os.getpid():
        _finalizer_of = os.getpid()
        util.Finalize(None, _close_all, exitpriority=100)


def unwatch(writer: Writer) -> None:
    """The writer is closed. SIGTERM does again what it did before, when it was the last."""
    _writers.pop(id(writer), None)
    if (
        not _writers
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is _raise_exit
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_on_sigterm() -> bool:
    """Make SIGTERM raise SystemExit(143) in the main thread, so that `with` blocks end and writers are closed.

    Only where nobody else handles SIGTERM. A second SIGTERM ends the process at once. False where it cannot be done:
    another handler is there, or this is not the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return signal.getsignal(signal.SIGTERM) is _raise_exit
    signal.signal(signal.SIGTERM, _raise_exit)
    return True


def _raise_exit(number: int, frame: FrameType | None) -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(_EXIT_CODE)


def _close_all() -> None:
    for writer in list(_writers.values()):
        writer.close_at_exit()


def _after_fork() -> None:
    for writer in list(_writers.values()):
        writer.after_fork()
