"""JSON text of what a rollout holds."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from enum import Enum
from typing import Any
from uuid import UUID

import numpy as np
import orjson

from trajlake.errors import UsageError


def json_text(value: Any) -> str:
    """`value` as compact JSON text, with NaN and infinities as Python spells them; where it holds lone surrogates, in
    ASCII only, so that they survive as escapes. Raises UsageError."""
    try:
        data = orjson.dumps(value, option=_AS_JSON_DOES)
        # A null may have been a NaN, which orjson writes so.
        if b"null" not in data or orjson.loads(data) == value:
            return data.decode()
    except (TypeError, ValueError):  # as orjson's own errors are
        pass
    try:
        return _JSON.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot be written as JSON: {error}") from error


def _json_default(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        return value.tolist()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    raise TypeError(f"a {type(value).__name__} has no JSON form")


_JSON = json.JSONEncoder(separators=(",", ":"), default=_json_default)
_AS_JSON_DOES = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
