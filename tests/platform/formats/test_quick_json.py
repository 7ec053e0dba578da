"""What the quick reader says is what the standard library reads: it may leave anything unsaid, and nothing wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trajlake.formats.json_rows import MAX_DEPTH, loads
from trajlake.formats.quick_json import DOUBTFUL, own_loads, quick_loads

pytestmark = pytest.mark.unit

_NUMBERS = st.one_of(
    st.integers().map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.sampled_from(["1e400", "-0", "-0.0", "1e-400", str(2**63), str(2**64), str(-(2**63) - 1), "01", "1.", "NaN"]),
)
_PIECES = st.one_of(
    st.text(max_size=3).map(json.dumps),
    st.text(st.characters(codec=None), max_size=3).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(
        ['"', "\\", '\\"', '"\\u0022"', '"\\\\u0022"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\0"']
    ),
    _NUMBERS,
    st.sampled_from(
        ["true", "false", "null", "Infinity", "-Infinity", "\ufeff", " ", "\n", "\f", ",", ":", "[]", "{}"]
    ),
)
_KEYS = st.sampled_from(['"a"', '"b"', '"\\u0061"', '"\\""', '"\\u0022"', '""'])


def _nested(inside: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(_KEYS, inside).map(":".join), max_size=3)
    return st.lists(inside, max_size=3).map(lambda items: f"[{','.join(items)}]") | pairs.map(
        lambda items: f"{{{', '.join(items)}}}"
    )


_TEXTS = st.recursive(_PIECES, _nested, max_leaves=8)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


@given(_TEXTS)
@example('{"a": 1, "a": 1}')
@example('{"a": "\\"\\"", "b": {"c": 1, "c": "\\u0022\\u0022"}}')
@example("18446744073709551616")
def test_it_gives_the_value_and_type_of_the_standard_library_or_nothing(text: str) -> None:
    found = quick_loads(text, MAX_DEPTH)
    if found is not DOUBTFUL:
        assert repr(found) == repr(json.loads(text, object_pairs_hook=_pairs))
    assert repr(quick_loads(text.encode("utf-8", "surrogatepass"), MAX_DEPTH)) == repr(found)


@given(_TEXTS | _NUMBERS, st.sampled_from([1 << 13, 1 << 17, 1 << 18]), st.integers(-30, 5))
@example(f"{2**64}", 1 << 17, -10)
@example('{"a": 1, "a": 1}', 1 << 17, 0)
def test_so_it_does_at_any_place_of_a_long_text(text: str, place: int, before: int) -> None:
    text = f'["{"x" * (place + before)}",{text}]'
    found = quick_loads(text, MAX_DEPTH)
    if found is not DOUBTFUL:
        assert repr(found) == repr(json.loads(text, object_pairs_hook=_pairs))


@given(_TEXTS)
def test_a_text_is_read_or_refused_as_if_there_were_no_quick_way(text: str) -> None:
    try:
        wanted = repr(json.loads(text, object_pairs_hook=_pairs))
    except ValueError:
        with pytest.raises(ValueError):
            loads(text)
    else:
        assert repr(loads(text)) == wanted


@given(_TEXTS)
@example('{"a": 1, "a": 2}')
@example('{"a": -9223372036854775809}')
def test_stored_text_is_read_as_the_standard_library_reads_it(text: str) -> None:
    try:
        wanted = repr(json.loads(text))
    except ValueError:
        with pytest.raises(ValueError):
            own_loads(text)
    else:
        assert repr(own_loads(text)) == wanted


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("inside", ["", "0"])
def test_its_depth_is_exact(opening: str, inside: str) -> None:
    closing = "]" if opening == "[" else "}"

    def nested(levels: int) -> str:
        last = f"[{inside}]"
        return opening * (levels - 1) + last + closing * (levels - 1)

    for depth in (1, 50, MAX_DEPTH, 254):
        assert quick_loads(nested(depth), depth) == json.loads(nested(depth))
        assert quick_loads(nested(depth + 1), depth) is DOUBTFUL


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '[{"b": [0.1, -1e-7, 0.0035475000000000003, 123456789012345678]}]', '"\\\\ é \\n"', "null"]
)
@pytest.mark.parametrize("beside", [0, 200_000])
def test_usual_json_takes_the_quick_way(text: str, beside: int) -> None:
    text = f'["{"x" * beside}", {text}]'
    assert repr(quick_loads(text, MAX_DEPTH)) == repr(json.loads(text))
