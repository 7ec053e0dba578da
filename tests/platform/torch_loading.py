"""What loader workers of the tests run: apart from the tests, because every worker imports it."""

from __future__ import annotations

import torch

import trajlake
from trajlake.errors import StoreError
from trajlake.storage.wrappers import CountingStore


def sampler(lake: trajlake.Lake, **choices):
    return lake.snapshot().sampler("epochs", **{"epochs": 1, "seed": 5, **choices})


def loader(dataset, workers=0, method="forkserver", **choices):
    if workers:
        choices |= {"multiprocessing_context": method, "timeout": 200}
    return torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, **choices)


def names(batch):
    return [sample.episode_id for sample in batch.samples]


def by_worker(batch):
    worker = torch.utils.data.get_worker_info()
    return 0 if worker is None else worker.id, names(batch)


def refuse(batch):
    raise ValueError(f"no room for {len(batch)} episodes")


class Failing(CountingStore):
    """Reads the footers and not the rows."""

    def get_ranges(self, key, ranges):
        if self.calls["get_ranges"] > 0:
            raise StoreError("the disk is on fire")
        return super().get_ranges(key, ranges)
