"""Arrays as a rollout holds them (lists, numpy, torch) in the form of the schema, copied."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from trajlake.errors import UsageError

Row = dict[str, Any]

# What numpy has no type for: they are stored as they are, under the names that PyTorch and ml_dtypes give them.
NARROW = frozenset(("bfloat16", *(f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))))


def tensor(name: str, value: Any) -> Row:
    """One array in the form of `steps.tensors`. Raises UsageError for object and structured arrays."""
    if _is_narrow_tensor(value):
        return {"name": name, "dtype": _dtype_name(value), "shape": list(value.shape), "data": _bytes(value)}
    array = _array(value)
    if array.dtype.name in NARROW:
        return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind == "V":
        raise UsageError(
            f"tensor {name!r} has dtype {array.dtype}: only plain numbers, bools, text and times can be stored; "
            "record each field as a tensor of its own"
        )
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dtype = array.dtype.name if array.dtype.kind in "biufc" else array.dtype.str
    return {"name": name, "dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}


def tensor_rows(name: str, array: np.ndarray[Any, Any]) -> list[Row] | None:
    """What `tensor` makes of each item of an array of numbers, along its first axis, all checked at once; None for an
    array of anything else, whose items may differ."""
    if array.dtype.kind not in "biufc":
        return None
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    dtype, shape = array.dtype.name, list(array.shape[1:])
    size = len(data) // max(len(array), 1)
    return [
        {"name": name, "dtype": dtype, "shape": shape, "data": data[start : start + size]}
        for start in (range(0, len(data), size) if size else [0] * len(array))
    ]


def _array(value: Any) -> np.ndarray[Any, Any]:
    if hasattr(value, "mask") and np.ma.is_masked(value):  # numpy.ma loads when it is first named
        raise UsageError("has masked values, for which there is no place: fill them, or record the mask beside it")
    try:
        return np.asarray(to_numpy(value))
    except (TypeError, ValueError, RuntimeError) as error:  # rows of different lengths; tensors without dense values
        raise UsageError(f"is not an array: {error}") from error


def to_numpy(value: Any) -> Any:
    """A torch tensor as numpy, over the same memory where it can be; other values as they are. What numpy has no type
    for becomes float32, which holds the same numbers."""
    if not hasattr(value, "detach"):
        return value
    return (value.float() if _is_narrow_tensor(value) else value).numpy(force=True)


def plain(value: Any) -> Any:
    """A torch tensor or an array of one element as that element; other values as they are."""
    if hasattr(value, "detach") or type(value) is np.ndarray:
        array = _array(value)
        return array.item() if array.size == 1 else value
    return value


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _is_narrow_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and _dtype_name(value) in NARROW


def _bytes(value: Any) -> bytes:
    import torch

    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy(force=True).tobytes())


def element_type(name: str) -> np.dtype[Any]:
    """The numpy type of a stored `dtype`. Raises UsageError where that needs ml_dtypes and it is not installed."""
    if name not in NARROW:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise UsageError(f"numpy has no {name} by itself: pip install ml_dtypes") from error
    narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return narrow


def numbers(kind: type[np.generic]) -> Callable[[Any], np.ndarray[Any, Any]]:
    """What makes a flat array of one kind of number from lists, numpy and torch, and refuses what does not fit."""
    dtype = np.dtype(kind)
    limits = np.iinfo(dtype) if dtype.kind == "i" else None

    def convert(value: Any) -> np.ndarray[Any, Any]:
        if hasattr(value, "detach"):
            value = _array(value)
        if type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1:
            return value.copy()  # the caller may reuse its buffer
        if type(value) is list:
            if value and hasattr(value[0], "detach"):
                value = list(map(plain, value))
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
