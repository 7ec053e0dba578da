"""Takes of which something is missing: what is, in words, and how a row says that it was sealed."""

from __future__ import annotations

import polars as pl

from trajlake.ingest.event_queue import STEPS_DROPPED

NO_END = "no end was recorded"
_BEGINNING = "its beginning"
_NOT_HERE = "did not arrive"
_SEALED = (
    rf"^({NO_END}|{_BEGINNING} {_NOT_HERE}(, and {NO_END})?|({_BEGINNING} and )?\d+ of \d+ steps {_NOT_HERE}"
    r"|\d+ steps arrived and its end says \d+)$"
)


def what_is_missing(*, begun: bool, ended: bool, steps: int, said: int | None) -> str:
    """What a take lacks of which a begin, an end and so many steps arrived; empty where it is complete. An episode that
    is sealed has it as `stop_reason`.

    `said` is how many steps there are by its end (by its ends together, where a writer recorded one attempt twice);
    None where a writer of an older version did not say.
    """
    if not ended:
        return NO_END if begun else f"{_BEGINNING} {_NOT_HERE}, and {NO_END}"
    if said is not None and steps < said:
        return f"{'' if begun else f'{_BEGINNING} and '}{said - steps} of {said} steps {_NOT_HERE}"
    if not begun:
        return f"{_BEGINNING} {_NOT_HERE}"
    return "" if said is None or steps == said else f"{steps} steps arrived and its end says {said}"


def is_sealed() -> pl.Expr:
    """Whether a row of `episodes` is of an episode that was sealed: the whole takes its place if it comes after all."""
    return pl.col("stop_reason").str.contains(_SEALED).fill_null(False)


def lacks_its_beginning() -> pl.Expr:
    """Whether it was sealed without its beginning."""
    return is_sealed() & pl.col("stop_reason").str.starts_with(_BEGINNING).fill_null(False)


def lacks_steps() -> pl.Expr:
    """Whether the episode ended as it says, and not all of its steps are here: they were lost or dropped on the way."""
    reason = pl.col("stop_reason")
    return ((is_sealed() & (reason != NO_END)) | (reason == STEPS_DROPPED)).fill_null(False)
