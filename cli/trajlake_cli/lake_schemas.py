"""The Arrow schemas that a lake's tables were made with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from trajlake import Lake


def stored_schemas(lake: Lake) -> dict[str, pa.Schema]:
    """One schema a table, as its newest version has it."""
    import pyarrow as pa

    from trajlake.table.tables import open_table
    from trajlake_schemas import TABLES

    return {name: pa.schema(open_table(lake.store, name).schema().to_arrow()) for name in TABLES}
