"""How a schema may change: nullable columns may be added, types may widen; anything else is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from trajlake_schemas.column import type_name
from trajlake_schemas.errors import SchemaError

_WIDENS = {
    "int8": {"int16", "int32", "int64"},
    "int16": {"int32", "int64"},
    "int32": {"int64"},
    "float": {"double"},
}


@dataclass(frozen=True)
class Change:
    """One difference between two schemas. `column` is a dotted path; `refusal` is None where it is allowed."""

    column: str
    change: str
    refusal: str | None = None


def diff(old: pa.Schema | pa.StructType, new: pa.Schema | pa.StructType, prefix: str = "") -> list[Change]:
    """Every difference, in the order of `old` and then of what `new` adds."""
    before = {field.name: field for field in old}
    after = {field.name: field for field in new}
    changes: list[Change] = []
    for name, field in before.items():
        path = prefix + name
        if name not in after:
            changes.append(Change(path, "removed", "rows already stored hold it, and readers ask for it"))
            continue
        changes += _diff_types(field.type, after[name].type, path)
        if field.nullable and not after[name].nullable:
            changes.append(Change(path, "made required", "rows already stored may hold null"))
        elif not field.nullable and after[name].nullable:
            changes.append(Change(path, "made nullable", "readers rely on a value being there"))
    for name, field in after.items():
        if name not in before:
            refusal = None if field.nullable else "rows already stored have no value for it: make it nullable"
            changes.append(Change(prefix + name, f"added as {type_name(field.type)}", refusal))
    return changes


def _diff_types(old: pa.DataType, new: pa.DataType, path: str) -> list[Change]:
    if old == new:
        return []
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        return diff(old, new, path + ".")
    if pa.types.is_list(old) and pa.types.is_list(new):
        return _diff_types(old.value_type, new.value_type, path + "[]")
    if str(new) in _WIDENS.get(str(old), set()):
        return [Change(path, f"widened from {type_name(old)} to {type_name(new)}")]
    reason = "only int8 to int16 to int32 to int64, and float to double, keep every stored value"
    return [Change(path, f"changed from {type_name(old)} to {type_name(new)}", reason)]


def check_evolution(old: pa.Schema, new: pa.Schema, table: str) -> list[Change]:
    """The changes, all of them allowed. Raises SchemaError that names the first refused one and the reason."""
    changes = diff(old, new)
    for change in changes:
        if change.refusal:
            raise SchemaError(f"table {table}: column {change.column} {change.change}: {change.refusal}")
    return changes
