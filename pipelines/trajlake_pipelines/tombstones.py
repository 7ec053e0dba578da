"""What remains of episodes that were retracted for good: a name that says nothing, so that they never come back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from trajlake.storage import ObjectStore

TOMBSTONES = "retracted"


def tombstone_key(episode_id: str) -> str:
    """Where the tombstone of an episode lies; its name says nothing about the episode."""
    return f"{TOMBSTONES}/{hashlib.sha256(episode_id.encode()).hexdigest()}.json"


def tombstones_among(store: ObjectStore, episode_ids: Iterable[str]) -> list[str]:
    """Those of these episodes (an id may stand there repeatedly) that were retracted for good."""
    keys = {info.key for info in store.list(f"{TOMBSTONES}/")}
    return sorted({episode for episode in episode_ids if tombstone_key(episode) in keys}) if keys else []
