"""Which files a run has imported whole, so that an import that was stopped goes on where it was."""

from __future__ import annotations

import json
from functools import cached_property

from trajlake.errors import ObjectMissing
from trajlake.storage import ObjectStore

_FOLDER = "imports"


class Ledger:
    """One object a file, `imports/<run>/<sha256>.json`, made when every episode of the file is durable.

    It says `format`, `episodes`, `steps` and `refused` of the file. `again` is for an import that repeats what was
    imported: nothing is known then, and files are put down all the same.
    """

    def __init__(self, store: ObjectStore, run: str, *, again: bool = False) -> None:
        self._store = store
        self._prefix = f"{_FOLDER}/{run}/"
        self._again = again

    @cached_property
    def _names(self) -> set[str]:
        return {info.key[len(self._prefix) :] for info in self._store.list(self._prefix)}

    def find(self, sha256: str) -> dict[str, str | int] | None:
        """What was put down of a file with this hash; None where it was not imported whole."""
        name = f"{sha256}.json"
        if self._again or name not in self._names:
            return None
        try:
            found = json.loads(self._store.get(self._prefix + name))
        except (ObjectMissing, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def put(self, sha256: str, format: str, episodes: int, steps: int, refused: int) -> None:
        """Put a file down. What it says of a file never changes, so that the first of two may win."""
        said = {"format": format, "episodes": episodes, "steps": steps, "refused": refused}
        self._store.put_if_absent(f"{self._prefix}{sha256}.json", json.dumps(said).encode())
