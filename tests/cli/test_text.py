"""What a model wrote cannot steer the terminal, and is still the same in JSON."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajlake_cli.text import cut, escape_json, message_line, neutralise, one_line
from trajlake_cli.values import json_text

pytestmark = pytest.mark.unit

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[2J", "␛[2J"),
        ("a\x00b", "a␀b"),
        ("\x7f", "␡"),
        ("\x9b2J", "⟨U+009B⟩2J"),
        ("\u202egnp.exe", "⟨U+202E⟩gnp.exe"),
        ("\ud800", "⟨U+D800⟩"),
        ("a\r\nb", "a\nb"),
        ("over\rwrite", "over␍write"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
        ("👩\u200d🔬 می\u200cخواهم 日本", "👩\u200d🔬 می\u200cخواهم 日本"),
    ],
)
def test_neutralise(raw: str, shown: str) -> None:
    assert neutralise(raw) == shown


@given(ANY_TEXT)
def test_nothing_that_steers_is_left(raw: str) -> None:
    for character in neutralise(raw):
        assert character in "\n\t\u200c\u200d" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
    assert "\n" not in one_line(raw)
    assert "\n" not in message_line(raw)


@given(ANY_TEXT)
def test_json_keeps_the_value_and_is_harmless(raw: str) -> None:
    encoded = json_text({"text": raw})
    assert json.loads(encoded) == {"text": raw}
    assert neutralise(encoded) == encoded
    assert encoded.isascii() or escape_json(encoded) == encoded


def test_cut() -> None:
    assert cut("abcdef", 4) == ("abcd", 2)
    assert cut("abc", 4) == ("abc", 0)
    assert cut("abc", 0) == ("abc", 0)
