"""Invisible characters of untrusted text are made visible."""

import unicodedata

from each import each
from hypothesis import given
from hypothesis import strategies as st

from segcredit.printable import one_line, visible

DIRECTION_MARKS = [*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C]


@each(
    ("text", "shown"),
    [
        ("\x1b[31m", "␛[31m"),
        ("a\rb", "a␍b"),
        ("a\bb", "a␈b"),
        ("\x00\x07\x7f", "␀␇␡"),
        ("\x9b", "‹U+009B›"),
        ("a\tb", "a⇥b"),
        ("a\nb", "a\nb"),
        ("角\u3000é\u00a0x", "角\u3000é\u00a0x"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("\U000e0041", "‹U+E0041›"),
        ("\ud800", "‹U+D800›"),
    ],
)
def test_what_cannot_be_seen_becomes_a_symbol(text, shown):
    assert visible(text) == shown


@each("code", DIRECTION_MARKS)
def test_direction_marks_are_shown_by_number(code):
    assert visible(chr(code)) == f"‹U+{code:04X}›"


@given(st.text())
def test_nothing_invisible_is_left(text):
    for character in one_line(text):
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert ord(character) not in DIRECTION_MARKS
