"""The Delta log of a table as objects: which versions it can still give, and which of its records may go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile

from trajlake.storage import ObjectInfo

_RECORD = re.compile(r"[^/]+/_delta_log/(\d{20})\.(json|checkpoint\.parquet)")


@dataclass(frozen=True)
class Log:
    """The records of a log by their versions: a version is read from the last checkpoint up to it and the commits
    that follow."""

    commits: dict[int, ObjectInfo]
    checkpoints: dict[int, ObjectInfo]

    @classmethod
    def of(cls, objects: Iterable[ObjectInfo]) -> Log:
        """The log among the objects of a table's folder."""
        log = cls({}, {})
        for info in objects:
            if match := _RECORD.fullmatch(info.key):
                (log.commits if match[2] == "json" else log.checkpoints)[int(match[1])] = info
        return log

    @property
    def oldest(self) -> int:
        """The oldest version that can be read."""
        return 0 if 0 in self.commits else min(self.checkpoints, default=0)

    def version_at(self, moment: datetime) -> int:
        """The version that was the newest at `moment`, or the oldest where the log does not reach back so far."""
        commits = sorted(self.commits.items())
        before = [version for version, _ in takewhile(lambda commit: commit[1].modified_at <= moment, commits)]
        return max(self.oldest, before[-1] if before else 0)

    def not_needed_from(self, version: int) -> list[ObjectInfo]:
        """The records without which `version` and all later ones can be read, oldest first: whoever removes them in
        this order and stops on the way leaves a log that is whole."""
        start = max((checkpoint for checkpoint in self.checkpoints if checkpoint <= version), default=0)
        records = [*self.commits.items(), *self.checkpoints.items()]
        return [info for number, info in sorted(records, key=lambda record: record[0]) if number < start]
