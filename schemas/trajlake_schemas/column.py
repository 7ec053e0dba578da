"""A table's columns with their meaning: the one place that types, checks and the reference page come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """One column. `meaning` is a sentence; `null` says what an absent value means; `unit` only where there is one.

    `flat` columns can stand in the portable export profile as they are (no lists, maps or structs).
    """

    name: str
    type: pa.DataType
    meaning: str
    null: str = "the source did not say"
    unit: str = ""
    required: bool = False

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=not self.required)

    @property
    def flat(self) -> bool:
        return not pa.types.is_nested(self.type)


@dataclass(frozen=True)
class TableSchema:
    """A named, versioned list of columns."""

    name: str
    version: int
    row: str
    columns: tuple[Column, ...]

    @property
    def arrow(self) -> pa.Schema:
        """The Arrow schema, columns in their order, without metadata."""
        return pa.schema([column.field for column in self.columns])

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def names(self) -> list[str]:
        return [column.name for column in self.columns]


def struct_of(columns: tuple[Column, ...]) -> pa.StructType:
    """An Arrow struct with one nullable field a column (a struct that is null holds no required value)."""
    return pa.struct([pa.field(column.name, column.type) for column in columns])


def type_name(data_type: pa.DataType) -> str:
    """The type as the reference page spells it, e.g. `list<struct<id: string, name: string>>`."""
    if pa.types.is_map(data_type):
        return f"map<{type_name(data_type.key_type)}, {type_name(data_type.item_type)}>"
    if pa.types.is_list(data_type):
        return f"list<{type_name(data_type.value_type)}>"
    if pa.types.is_struct(data_type):
        return f"struct<{', '.join(f'{field.name}: {type_name(field.type)}' for field in data_type)}>"
    return str(data_type)
