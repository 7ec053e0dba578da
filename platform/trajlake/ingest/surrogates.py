"""Text that has no UTF-8 form: stored with replacement characters, and the original beside it."""

from __future__ import annotations

import base64
import json
from typing import Any

from trajlake.ingest.arrays import Row
from trajlake.ingest.json_text import json_text


def without_surrogates(row: Row) -> Row:
    """`row` with each lone surrogate replaced by U+FFFD, and the originals in its `restore` by column path.

    A path names struct fields and list positions: `tool_calls.0.arguments`. The original is kept as base64 of
    its UTF-8 with surrogates let through, because JSON escapes would join two halves of a pair.
    """
    originals: Row = {}

    def clean(value: Any, path: str) -> Any:
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                originals[path] = {"wtf8": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode("ascii")}
                return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in value)
            return value
        if isinstance(value, dict):
            return {name: clean(item, f"{path}.{name}" if path else name) for name, item in value.items()}
        if isinstance(value, list):
            return [clean(item, f"{path}.{position}") for position, item in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(clean(item, f"{path}.{position}") for position, item in enumerate(value))
        return value

    cleaned: Row = clean(row, "")
    if originals:
        known = json.loads(row["restore"]) if row.get("restore") else {}
        cleaned["restore"] = json_text({**originals, **known})
    return cleaned
