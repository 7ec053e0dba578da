"""What remains of episodes that were retracted for good: a name that says nothing, so that they never come back."""

from __future__ import annotations

from collections.abc import Iterable

from trajlake.storage import ObjectStore
from trajlake.table.tombstones import TOMBSTONES, tombstone_key

__all__ = ["tombstone_key", "tombstones_among"]


def tombstones_among(store: ObjectStore, episode_ids: Iterable[str]) -> list[str]:
    """Those of these episodes (an id may stand there repeatedly) that were retracted for good."""
    keys = {info.key for info in store.list(f"{TOMBSTONES}/")}
    return sorted({episode for episode in episode_ids if tombstone_key(episode) in keys}) if keys else []
