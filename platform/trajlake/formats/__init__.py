"""Foreign formats: one module each, told apart by content."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from trajlake.errors import FormatError, NoTrajectories, UsageError
from trajlake.formats.archive import is_archive, open_archive
from trajlake.formats.base import Format, Record, Refused
from trajlake.formats.foreign import explain
from trajlake.formats.source import Source, open_source

__all__ = ["FORMATS", "Format", "Record", "Refused", "Source", "detect", "detect_source", "format_named", "open_source"]

FORMATS: dict[str, str] = {
    "tau-bench": "trajlake.formats.tau_bench",
    "tau2-bench": "trajlake.formats.tau2_bench",
    "intercode": "trajlake.formats.intercode",
    "verifiers": "trajlake.formats.verifiers",
    "swe-agent": "trajlake.formats.swe_agent",
    "mini-swe-agent": "trajlake.formats.mini_swe_agent",
    "openhands": "trajlake.formats.openhands",
    "inspect": "trajlake.formats.inspect_log",
    "atif": "trajlake.formats.atif",
    "nemo-gym": "trajlake.formats.nemo_gym",
    "verl": "trajlake.formats.verl",
    "kaggle": "trajlake.formats.kaggle",
    "monitor-csv": "trajlake.formats.monitor_csv",
    "minari": "trajlake.formats.minari",
    # Last, because many other formats hold chat messages too.
    "openai-chat": "trajlake.formats.openai_chat",
}
"""Name to module, in the order in which they are tried. A module is imported when it is needed, and holds `FORMAT`."""


def format_named(name: str) -> Format:
    """Raises UsageError that lists the names there are."""
    if name not in FORMATS:
        raise UsageError(f"no format is called {name!r}; known are {', '.join(FORMATS)}")
    found = import_module(FORMATS[name]).FORMAT
    assert isinstance(found, Format)
    return found


def detect(path: str | Path) -> Format:
    """The format of a file, by its content. Raises FormatError that says what the file is instead."""
    return detect_source(open_source(path))


def detect_source(source: Source) -> Format:
    """As `detect`, for a file that is open already."""
    for name in FORMATS:
        candidate = format_named(name)
        if candidate.detect(source):
            return candidate
    if is_archive(source):
        with open_archive(source):
            pass  # says what is wrong with it
    if (words := explain(source)) is not None:
        raise NoTrajectories(f"{source.path}: not imported: {words}")
    names = ", ".join(FORMATS)
    advice = (
        f"Known are {names}"
        if source.kind
        else f"Name the format if it is one of {names}; describe it with a mapping file (--mapping), or write it as "
        'JSON Lines of {"messages": […]}'
    )
    raise FormatError(f"{source.path}: not a format that is known: {source.appearance}. {advice}")
