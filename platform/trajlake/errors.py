"""Every error that Trajlake raises on purpose. The command line prints their text as one line.

TrajlakeError
 ├─ UsageError               the caller asked for something that cannot be
 │   ├─ SchemaError          (trajlake_schemas) a value does not fit its column, or a change of schema is refused
 │   └─ QueryError           the SQL or the filter is wrong
 ├─ StoreError               the object store said no
 │   ├─ BucketMissing
 │   ├─ AccessRefused
 │   ├─ ObjectMissing
 │   ├─ StoreUnavailable     it did not answer, or answered 5xx until patience ran out
 │   └─ StoreUnsafe          it ignores If-None-Match
 ├─ LakeMissing / LakeExists / LakeTooNew
 ├─ EpisodeMissing
 │   ├─ EpisodeAmbiguous     the beginning of an id that several have
 │   └─ EpisodeRemoved       it was retracted for good
 ├─ CommitStateUnknown       a commit may or may not have landed
 ├─ SnapshotExpired          the files of an old snapshot were removed
 ├─ SegmentUnreadable        a landing segment is not what a Writer wrote
 ├─ FormatError              a file cannot be imported
 │   └─ NoTrajectories       and need not be: it is known to hold none
 ├─ WriterClosed / NotDurable
 └─ ExportError
"""

from trajlake_schemas.errors import SchemaError, TrajlakeError, UsageError

__all__ = [
    "AccessRefused",
    "BucketMissing",
    "CommitStateUnknown",
    "EpisodeAmbiguous",
    "EpisodeMissing",
    "EpisodeRemoved",
    "ExportError",
    "FormatError",
    "LakeExists",
    "LakeMissing",
    "LakeTooNew",
    "NoTrajectories",
    "NotDurable",
    "ObjectMissing",
    "QueryError",
    "SchemaError",
    "SegmentUnreadable",
    "SnapshotExpired",
    "StoreError",
    "StoreUnavailable",
    "StoreUnsafe",
    "TrajlakeError",
    "UsageError",
    "WriterClosed",
]


class QueryError(UsageError):
    """Correct the SQL, or the filter, as the text says."""


class StoreError(TrajlakeError):
    """The object store refused a request; the text says which and why."""


class BucketMissing(StoreError):
    """Create the bucket, or correct its name in the lake's address."""


class AccessRefused(StoreError):
    """Set credentials that may read and write this bucket."""


class ObjectMissing(StoreError):
    """No object has this key."""


class StoreUnavailable(StoreError):
    """Check that the server runs and can be reached, then repeat."""


class StoreUnsafe(StoreError):
    """Use a server that honours If-None-Match; on this one writers could overwrite each other."""


class LakeMissing(TrajlakeError):
    """Call `trajlake init` first, or correct the address."""


class LakeExists(TrajlakeError):
    """A lake is there already; just use it."""


class LakeTooNew(TrajlakeError):
    """A newer Trajlake made this lake: upgrade this one."""


class EpisodeMissing(TrajlakeError):
    """No episode of the snapshot has this id; `trajlake episodes` lists them."""


class EpisodeAmbiguous(EpisodeMissing):
    """Give more of the id. The lines below the first of the text are some of the episodes that begin so."""


class EpisodeRemoved(EpisodeMissing):
    """The episode was retracted for good; the text says why."""


class CommitStateUnknown(TrajlakeError):
    """The commit may have landed: run the same command again, it finds out. Nothing was deleted."""


class SnapshotExpired(TrajlakeError):
    """Files of this snapshot were removed after the retention period: take a newer snapshot."""


class SegmentUnreadable(TrajlakeError):
    """The segment is damaged; it is quarantined and everything else goes on."""


class FormatError(TrajlakeError):
    """The file, or one row of it, is not in a format that can be imported."""


class NoTrajectories(FormatError):
    """The file is of a kind that is known and holds no trajectories; the text says what to import instead."""


class WriterClosed(UsageError):
    """The writer, or the episode, has ended: nothing can be added."""


class NotDurable(TrajlakeError):
    """Time ran out before everything was durable; what remains is in the spool and is uploaded later."""


class ExportError(TrajlakeError):
    """A shard did not read back as it was written, or the destination cannot be used."""
