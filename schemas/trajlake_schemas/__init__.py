"""Trajlake's Arrow schemas: what landing and the tables hold, column by column. Imports nothing of ours."""

from trajlake_schemas.column import Column, TableSchema
from trajlake_schemas.episodes import EPISODES
from trajlake_schemas.errors import SchemaError
from trajlake_schemas.events import EVENTS
from trajlake_schemas.evolution import Change, check_evolution, diff
from trajlake_schemas.segments import SEGMENTS
from trajlake_schemas.steps import STEPS

TABLES: dict[str, TableSchema] = {table.name: table for table in (EPISODES, STEPS, SEGMENTS)}
SCHEMAS: dict[str, TableSchema] = {**TABLES, EVENTS.name: EVENTS}

__all__ = [
    "EPISODES",
    "EVENTS",
    "SCHEMAS",
    "SEGMENTS",
    "STEPS",
    "TABLES",
    "Change",
    "Column",
    "SchemaError",
    "TableSchema",
    "check_evolution",
    "diff",
]
