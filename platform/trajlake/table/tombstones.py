"""What remains of episodes that were retracted for good: a name that says nothing, and why."""

from __future__ import annotations

import hashlib
import json

from trajlake.errors import ObjectMissing
from trajlake.storage import ObjectStore

TOMBSTONES = "retracted"


def tombstone_key(episode_id: str) -> str:
    """Where the tombstone of an episode lies; its name says nothing about the episode."""
    return f"{TOMBSTONES}/{hashlib.sha256(episode_id.encode('utf-8', 'surrogatepass')).hexdigest()}.json"


def why_removed(store: ObjectStore, episode_id: str) -> str | None:
    """The reason that was given when the episode was retracted for good; None where it was not. Raises StoreError."""
    try:
        return str(json.loads(store.get(tombstone_key(episode_id)))["reason"])
    except ObjectMissing:
        return None
