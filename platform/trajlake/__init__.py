"""Trajlake keeps what reinforcement-learning agents did.

    import trajlake

    lake = trajlake.connect("s3://bucket/lake")
    with lake.writer(run="grpo-7", worker="w3") as writer:
        with writer.episode(task_id="airline/17", seed=3) as episode:
            episode.step(source="agent", message="…")
            episode.end(reward=1.0, success=True)
    snapshot = lake.snapshot()
    snapshot.query("SELECT task_family, avg(reward) FROM episodes GROUP BY 1")

Names are loaded when they are first used, so that importing this is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajlake import errors, gym
    from trajlake.ingest.episode import Episode
    from trajlake.ingest.writer import Writer
    from trajlake.lake import Lake, connect, create
    from trajlake.read.sampler import Sampler
    from trajlake.read.snapshot import Snapshot
    from trajlake.read.trajectory import Trajectory

    __version__: str

__all__ = [
    "Episode",
    "Lake",
    "Sampler",
    "Snapshot",
    "Trajectory",
    "Writer",
    "__version__",
    "connect",
    "create",
    "errors",
    "gym",
]

_MODULES = ("errors", "gym")

_HOMES = {
    "Episode": "trajlake.ingest.episode",
    "Lake": "trajlake.lake",
    "Sampler": "trajlake.read.sampler",
    "Snapshot": "trajlake.read.snapshot",
    "Trajectory": "trajlake.read.trajectory",
    "Writer": "trajlake.ingest.writer",
    "connect": "trajlake.lake",
    "create": "trajlake.lake",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("trajlake")
    if name in _MODULES:
        return import_module(f"trajlake.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trajlake' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
