"""Format values as text: short printable quotes of untrusted rows, consistently rounded numbers."""

import math
import unicodedata
from collections.abc import Iterable

_LIMIT = 60


def number_text(x: float, form: str) -> str:
    """Format a number with a true minus sign, or as a dash if it is not finite."""
    return f"{x:{form}}".replace("-", "−") if math.isfinite(x) else "–"


def change_texts(before: float, after: float, share: bool) -> tuple[str, str, str]:
    """Format two numbers and their difference, which is computed before rounding.

    A share in percent: 5.5 %, 28.5 %, +23.0 points. Any other number: 0.055, 0.285, +0.230.
    """
    scale, form, unit, step = (100, ".1f", " %", " points") if share else (1, ".3f", "", "")
    change = after - before
    return (
        number_text(scale * before, form) + unit * math.isfinite(before),
        number_text(scale * after, form) + unit * math.isfinite(after),
        number_text(scale * change, f"+{form}") + step * math.isfinite(change),
    )


def printable(text: str, limit: int | None = None) -> str:
    """The text on one line, control and direction characters made visible, cut at the limit."""
    if limit is not None and len(text) > limit:
        return printable(text[:limit]) + "…"
    return text if text.isprintable() else "".join(map(_symbol, text))


def shown(value: object) -> str:
    """What came, for a message: short texts and numbers as they are, the rest by kind and size."""
    match value:
        case None:
            return "nothing (null)"
        case str():
            return f"'{printable(value, _LIMIT)}'" if value else "an empty text"
        case bool() | float():
            return str(value)
        case int():
            return str(value) if abs(value) < 10**18 else "a huge number"
        case bytes() | bytearray():
            return f"{len(value)} bytes"
        case dict():
            return f"an object with the keys {listed(value)}" if value else "an object without keys"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"a {type(value).__name__}"


def named(path: object) -> str:
    """A path in quotes; of a very long one, the end."""
    name = str(path)
    return f"'{printable(name)}'" if len(name) <= 200 else f"'…{printable(name[-200:])}'"


def listed(names: Iterable[object], limit: int = 8) -> str:
    """The first few names, in quotes."""
    quoted = [f"'{printable(str(name), _LIMIT)}'" for name in names]
    return ", ".join(quoted[:limit]) + (", …" if len(quoted) > limit else "") or "none"


def _symbol(character: str) -> str:
    code = ord(character)
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    if character == "\n":
        return "↵"
    if code < 0x20:
        return chr(0x2400 + code)  # ␛ for an escape, ␀ for a NUL
    return f"‹U+{code:04X}›"


EMPTY = "∅"
"""Stands for a token without text, such as an end-of-sequence token."""


NEWLINE = "↵"


_JOINERS = "\u200c\u200d"  # shape Persian words and emoji; they move nothing


_DELETE = 0x7F


def visible(text: str) -> str:
    """The text with every character that is not plainly printable made visible.

    Escape, carriage return, backspace and their like become control pictures (␛ ␍ ␈), tabs ⇥;
    direction marks and other invisible characters their number, as in ‹U+202E›. Newlines stay.
    """
    return text if text.isprintable() else "".join(map(_visible_symbol, text))


def one_line(text: str) -> str:
    """The same on a single line, newlines shown as ↵."""
    return visible(text).replace("\n", NEWLINE)


def _visible_symbol(character: str) -> str:
    code = ord(character)
    if character == "\n" or character.isprintable() or character in _JOINERS:
        return character
    if unicodedata.category(character) == "Zs":  # a no-break or ideographic space is a space
        return character
    if character == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == _DELETE else f"‹U+{code:04X}›"
