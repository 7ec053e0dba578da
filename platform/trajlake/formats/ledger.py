"""Which files a run has imported whole, so that an import that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from trajlake.errors import ObjectMissing
from trajlake.storage import ObjectStore

_FOLDER = "imports"

Said = dict[str, Any]
"""Of one file: `format`, `episodes`, `steps`, `refused`; also, but not in older ones, `path`, which is absolute, and
`asked`, a digest of how it was to be read."""


class Ledger:
    """Objects `imports/<run>/<hash of the object>.json`, each made when every episode of some files is durable: what
    became of them, by the hash of the file.

    `again` is for an import that repeats what was imported: nothing is known then, and files are put down all the same.
    `mapping` is the text of the mapping file that files are read by, and `begin` what is said of all their episodes.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        *,
        again: bool = False,
        mapping: str | None = None,
        begin: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._prefix = f"{_FOLDER}/{run}/"
        self._again = again
        asked = json.dumps([mapping, begin or {}], sort_keys=True, default=repr)
        self._asked = hashlib.sha256(asked.encode()).hexdigest()[:32]

    @cached_property
    def _files(self) -> list[tuple[str, Said]]:
        files: list[tuple[str, Said]] = []
        for info in self._store.list(self._prefix):
            try:
                found = json.loads(self._store.get(info.key))
            except (ObjectMissing, ValueError):
                continue
            if isinstance(found, dict):
                files += ((sha256, said) for sha256, said in found.items() if isinstance(said, dict))
        return files

    @cached_property
    def _known(self) -> dict[str, Said]:
        return dict(self._files)

    @cached_property
    def _with_episodes(self) -> dict[str, set[str]]:
        """The hashes of what gave episodes, by the path that it was at."""
        hashes: dict[str, set[str]] = {}
        for sha256, said in self._files:
            if isinstance(path := said.get("path"), str) and said.get("episodes"):
                hashes.setdefault(path, set()).add(sha256)
        return hashes

    @property
    def is_empty(self) -> bool:
        """Whether the run has imported nothing yet."""
        return not self._files

    def find(self, sha256: str) -> Said | None:
        """What was put down of a file with this hash; None where it was not imported whole."""
        return None if self._again else self._known.get(sha256)

    def was_asked_otherwise(self, said: Said) -> bool:
        """Whether the file was imported by another mapping, or with other things said of its episodes."""
        return bool(said.get("asked", self._asked) != self._asked)

    def had_other_content(self, path: Path, sha256: str) -> bool:
        """Whether the run has episodes of a file that was at this path and had another hash. Also with `again`."""
        return bool(self._with_episodes.get(os.path.abspath(path), set()) - {sha256})

    def put(self, files: Mapping[str, Said]) -> None:
        """Put files down, by their hash. What it says of a file never changes, so that the first of two may win."""
        if files:
            told = {sha256: {**said, "asked": self._asked} for sha256, said in files.items()}
            data = json.dumps(told, sort_keys=True).encode()
            self._store.put_if_absent(f"{self._prefix}{hashlib.sha256(data).hexdigest()[:32]}.json", data)
