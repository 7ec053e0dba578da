"""Which task an episode tried: what trials are counted by, for pass rates as for difficulty.

A task is named by (task_family, env_name, domain, task_id), because benchmarks number the tasks of each domain anew;
an episode without task_id by its group_id.
"""

from __future__ import annotations

import polars as pl

TASK = ("task_family", "env_name", "domain", "task_id")
THE_TASK = pl.struct(*TASK, pl.when(pl.col("task_id").is_null()).then(pl.col("group_id")).alias("group"))
HAS_TASK = pl.col("task_id").is_not_null() | pl.col("group_id").is_not_null()
