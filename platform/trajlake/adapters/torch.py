"""PyTorch: an IterableDataset whose workers and ranks share one sequence, and collate functions that give tensors.

    sampler = snapshot.sampler("epochs", seed=7, normalize_reward="group_id")
    dataset = TrajectoryDataset(sampler, batch_size=64, rank=rank, world_size=world_size, collate=pad(max_tokens=4096))
    loader = DataLoader(dataset, batch_size=None, num_workers=4, multiprocessing_context="forkserver")

An iteration begins at the beginning, wherever the sampler is: one over `epochs` is endless and shuffles each epoch
anew.

Needs torch (`pip install 'trajlake[torch]'`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trajlake.adapters.opening import Opening
from trajlake.adapters.tokens import packed, padded, tokens_of
from trajlake.errors import UsageError
from trajlake.ingest.arrays import NARROW
from trajlake.read.batch import Batch
from trajlake.read.sampler import Sampler

if TYPE_CHECKING:
    _Base = object
else:
    try:
        from torch.utils.data import IterableDataset as _Base
    except ImportError as error:
        raise UsageError("this needs PyTorch: pip install 'trajlake[torch]'") from error

Collate = Callable[[Batch], Any]


class TrajectoryDataset(_Base):
    """Batches of a sampler. With N loader workers in each of `world_size` ranks there are N * world_size readers, each
    with its own part; their union is what one reader would draw.

    `collate` makes of a Batch what the loader gives (default: the Batch itself, which has Arrow and numpy). Give the
    loader `batch_size=None`, and where it has workers a `multiprocessing_context` of `forkserver` or `spawn`: a forked
    worker cannot read and says so. Errors of a worker reach the loader's caller.

    `rank` and `world_size` are given here and not to the sampler: one of another rank is refused with UsageError.

    Every iteration reads anew from the snapshot, so priorities are those of the table: to update them, draw in the
    trainer's own process (`sampler.batches`).
    """

    def __init__(
        self,
        sampler: Sampler,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        collate: Collate | None = None,
        prefetch: int | None = None,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if (sampler.rank, sampler.world_size) not in {(0, 1), (rank, world_size)}:
            raise UsageError(
                f"the sampler is reader {sampler.rank} of {sampler.world_size}: give rank and world_size to the dataset"
            )
        self._opening = Opening.of(sampler)
        self._batch_size = batch_size
        self._rank, self._world_size = rank, world_size
        self._collate = collate
        self._prefetch = prefetch
        self._drop_last = drop_last
        self._state: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        rank, readers = self._rank * count + number, self._world_size * count
        self._state, self._resume = self._resume, None
        return self._batches(self._opening.open(rank, readers, self._state))

    def _batches(self, sampler: Sampler) -> Iterator[Any]:
        with sampler.batches(self._batch_size, prefetch=self._prefetch, drop_last=self._drop_last) as batches:
            for batch in batches:
                self._state = batches.state_dict()
                yield batch if self._collate is None else self._collate(batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the reader of this process is. Loader workers are processes of their own: torchdata's
        StatefulDataLoader asks each of them."""
        return {"sampler": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there at the next iteration; later ones begin at the beginning again."""
        self._state = self._resume = state["sampler"]


def pad(*, max_tokens: int | None = None, pad_id: int = 0, multiple_of: int = 1) -> Collate:
    """Collate to a rectangle of tensors: see trajlake.adapters.tokens.padded."""
    return partial(_padded, max_tokens=max_tokens, pad_id=pad_id, multiple_of=multiple_of)


def _padded(batch: Batch, **choices: Any) -> dict[str, Any]:
    return to_tensors(padded(tokens_of(batch), **choices))


def pack(*, token_budget: int, pad_id: int = 0, pad: bool = True) -> Collate:
    """Collate to rows of `token_budget` tokens, a list with one dict of tensors a row: see
    trajlake.adapters.tokens.packed."""
    return partial(_packed, token_budget=token_budget, pad_id=pad_id, pad=pad)


def _packed(batch: Batch, **choices: Any) -> list[dict[str, Any]]:
    return [to_tensors(row) for row in packed(tokens_of(batch), **choices)]


def to_tensors(arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Arrays as tensors: see `to_tensor`."""
    return {name: to_tensor(array) for name, array in arrays.items()}


def to_tensor(array: np.ndarray[Any, Any]) -> Any:
    """An array as a tensor of the same dtype, also of `bfloat16` and the like; over the same memory, but for a
    read-only array (as those of a Trajectory are), which is copied: PyTorch has no read-only tensors."""
    import torch

    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name not in NARROW:
        return torch.from_numpy(array)
    bits = torch.from_numpy(array.view(np.dtype(f"u{array.dtype.itemsize}")))
    return bits.view(getattr(torch, array.dtype.name))
