"""The landing schema: an event log, one row an event. `kind` says which of the struct columns is set."""

import pyarrow as pa

from trajlake_schemas.column import Column, TableSchema, struct_of
from trajlake_schemas.episodes import BEGIN, OUTCOME, REWARD_COMPONENT
from trajlake_schemas.steps import STEP_CONTENT, TIMESTAMP

KINDS = ("begin", "step", "end", "score", "retract")

_OCCURRED = Column("occurred_at", TIMESTAMP, "When the source says it happened.", null="the source did not say")
_RESTORE = Column("restore", pa.string(), "As in the tables: column path to original value.", null="nothing to restore")
_REASON = Column("reason", pa.string(), "Why the episode must not be used.")

BEGIN_EVENT = (_OCCURRED, *BEGIN, _RESTORE)
END_EVENT = (
    _OCCURRED,
    *OUTCOME,
    Column(
        "n_steps",
        pa.int32(),
        "How many steps its writer recorded; where fewer arrived, the episode is not complete.",
        null="a writer of an older version, which did not say",
        unit="step",
    ),
    Column("extra", pa.string(), "JSON text, merged over the begin's.", null="nothing"),
    _RESTORE,
)
SCORE_EVENT = REWARD_COMPONENT
RETRACT_EVENT = (_REASON,)

EVENTS = TableSchema(
    "events",
    1,
    "one event of an episode, as a worker recorded it",
    (
        Column("kind", pa.string(), f"{', '.join(KINDS)}.", null="never", required=True),
        Column("episode_id", pa.string(), "The episode that the event belongs to.", null="never", required=True),
        Column(
            "attempt",
            pa.int32(),
            "Which sending of the episode this is, from 0.",
            null="never",
            required=True,
        ),
        Column(
            "sequence",
            pa.int64(),
            "0, 1, 2, … over all events of one writer epoch.",
            null="never",
            required=True,
        ),
        Column(
            "recorded_at",
            TIMESTAMP,
            "When the worker recorded it, by the worker's clock.",
            null="never",
            required=True,
        ),
        Column("begin", struct_of(BEGIN_EVENT), "Who, what, with which policy.", null="another kind of event"),
        Column(
            "step",
            struct_of(STEP_CONTENT),
            "One step; its index follows from the sequence.",
            null="another kind of event",
        ),
        Column("end", struct_of(END_EVENT), "The outcome.", null="another kind of event"),
        Column(
            "score",
            struct_of(SCORE_EVENT),
            "A reward that arrived after the end.",
            null="another kind of event",
        ),
        Column("retract", struct_of(RETRACT_EVENT), "The episode must not be used.", null="another kind of event"),
    ),
)
