"""Tensors in a line: dtype, shape, and the values where they are few."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trajlake_cli.values import number

_DTYPE = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bool|complex(64|128)")
_FEW = 8


def describe(tensor: Mapping[str, Any]) -> tuple[str, str]:
    """(`float32[4]`, `0.027 -0.006 0.031 0.032`); of many values their range and mean, of unknown ones the bytes."""
    dtype = str(tensor.get("dtype") or "?")
    shape = list(tensor.get("shape") or [])
    kind = f"{dtype}[{','.join(map(str, shape))}]" if shape else dtype
    data = tensor.get("data")
    if data is None:
        return kind, "no data"
    if not _DTYPE.fullmatch(dtype):
        return kind, f"{len(data):,} bytes"
    import numpy as np

    element = np.dtype(dtype).newbyteorder("<")
    if len(data) != element.itemsize * int(np.prod(shape, dtype=object)):
        return kind, f"{len(data):,} bytes, which do not fill this shape"
    values = np.frombuffer(data, dtype=element)
    if not values.size:
        return kind, "empty"
    if values.size <= _FEW:
        return kind, " ".join(map(_value, values.tolist()))
    if values.dtype.kind == "c":
        return kind, f"{values.size:,} values"
    if values.dtype.kind == "b":
        return kind, f"{int(values.sum()):,} of {values.size:,} true"
    wide = values.astype("float64")
    with np.errstate(all="ignore"):
        low, high, mean = wide.min(), wide.max(), wide.mean()
    return kind, f"{number(float(low))} … {number(float(high))}, mean {number(float(mean))}"


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
