"""Arrays as a rollout holds them (lists, numpy, torch) in the form of the schema, copied."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from trajlake.errors import UsageError

Row = dict[str, Any]


def tensor(name: str, value: Any) -> Row:
    """One array in the form of `steps.tensors`. Raises UsageError for object and structured arrays."""
    array = _array(value)
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind == "V":
        raise UsageError(
            f"tensor {name!r} has dtype {array.dtype}: only plain numbers, bools, text and times can be stored; "
            "record each field as a tensor of its own"
        )
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dtype = array.dtype.name if array.dtype.kind in "biufc" else array.dtype.str
    return {"name": name, "dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}


def _array(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(to_numpy(value))
    except (TypeError, ValueError) as error:  # e.g. rows of different lengths
        raise UsageError(f"is not an array: {error}") from error


def to_numpy(value: Any) -> Any:
    """A torch tensor (or anything that can detach) as numpy, without importing torch."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.numpy() if hasattr(value, "numpy") else value
    return value


def numbers(kind: type[np.generic]) -> Callable[[Any], np.ndarray[Any, Any]]:
    """What makes a flat array of one kind of number from lists, numpy and torch, and refuses what does not fit."""
    dtype = np.dtype(kind)
    limits = np.iinfo(dtype) if dtype.kind == "i" else None

    def convert(value: Any) -> np.ndarray[Any, Any]:
        if type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1:
            return value.copy()  # the caller may reuse its buffer
        if type(value) is list:
            # What inference servers give. This takes half of numpy's time and refuses whatever needs a closer look.
            try:
                return np.frombuffer(struct.pack(f"<{len(value)}{dtype.char}", *value), dtype)
            except (struct.error, OverflowError):
                pass
        given = _array(value)
        if given.ndim != 1:
            raise UsageError(f"must be a flat list, not of shape {given.shape}")
        if given.size == 0:
            return np.zeros(0, dtype)
        if given.dtype.kind not in "biuf":
            raise UsageError(f"must hold numbers, not {given.dtype}")
        if limits is not None:
            if given.dtype.kind == "f" and not np.array_equal(given, np.trunc(given)):
                raise UsageError("must hold whole numbers")
            if given.min() < limits.min or given.max() > limits.max:
                raise UsageError(f"must hold numbers from {limits.min} to {limits.max}")
        with np.errstate(over="ignore"):  # a sentinel like the lowest float64 becomes -inf, which it stands for
            return np.array(given, dtype=dtype)

    return convert
