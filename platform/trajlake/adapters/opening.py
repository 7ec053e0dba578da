"""What the adapters have in common: a sampler that is opened where it is used, in whichever process that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trajlake
from trajlake.errors import UsageError
from trajlake.read.sampler import Sampler
from trajlake.storage import ObjectStore


@dataclass(frozen=True)
class Opening:
    """How to open a sampler: a lake's store and id, a snapshot's token, and what `Snapshot.sampler` takes. It can be
    pickled; connections and footers are made anew in each process. Two that are equal give the same draws."""

    store: ObjectStore
    lake_id: str
    token: str
    choices: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sampler: Sampler) -> Opening:
        """How to open `sampler` again. Raises UsageError for one that reads no snapshot."""
        snapshot = getattr(sampler, "snapshot", None)
        if not isinstance(snapshot, trajlake.Snapshot):
            raise UsageError("only samplers of a snapshot can be opened by several workers")
        recipe = sampler.recipe
        choices = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
        return cls(snapshot.lake.store, snapshot.lake_id, snapshot.token, choices)

    def open(self, rank: int, world_size: int, state: dict[str, Any] | None = None) -> Sampler:
        """The sampler of one of `world_size` readers, at `state`. Raises UsageError where another lake is there now."""
        snapshot = trajlake.Lake(self.store).snapshot(self.token)
        if snapshot.lake_id != self.lake_id:
            raise UsageError(f"the lake at {snapshot.lake.uri} was made anew: make the sampler anew, too")
        sampler = snapshot.sampler(**self.choices, rank=rank, world_size=world_size)
        if state is not None:
            sampler.load_state_dict(state)
        return sampler
