"""The `segments` table: the ledger of what has been consumed from landing."""

import pyarrow as pa

from trajlake_schemas.column import Column, TableSchema
from trajlake_schemas.steps import TIMESTAMP

STATES = ("consumed", "pending", "quarantined")

SEGMENTS = TableSchema(
    "segments",
    1,
    "one landing segment, and what became of its events",
    (
        Column("path", pa.string(), "The segment's key below the lake's root.", null="never", required=True),
        Column("run_id", pa.string(), "The run that wrote it.", null="never", required=True),
        Column("worker_id", pa.string(), "The worker that wrote it.", null="never", required=True),
        Column("epoch", pa.int32(), "The worker's epoch.", null="never", required=True),
        Column("number", pa.int32(), "The segment's number in its epoch, from 0.", null="never", required=True),
        Column("bytes", pa.int64(), "The object's size.", null="never", unit="byte", required=True),
        Column(
            "modified_at",
            TIMESTAMP,
            "When it was written, by the server's clock.",
            null="never",
            required=True,
        ),
        Column(
            "state",
            pa.string(),
            "`consumed`: every event is accounted for; `pending`: some of its episodes are not complete; "
            "`quarantined`: it cannot be read.",
            null="never",
            required=True,
        ),
        Column("events", pa.int64(), "Events in it.", null="it cannot be read"),
        Column("pending_episodes", pa.list_(pa.string()), "Episodes in it that are not complete.", null="none"),
        Column("reason", pa.string(), "Why it is quarantined.", null="it is not"),
        Column(
            "compaction",
            pa.int64(),
            "The number of the compaction that consumed it last.",
            null="never",
            required=True,
        ),
    ),
)
