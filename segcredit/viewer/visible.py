"""Model output is untrusted: what could drive a terminal is replaced by a symbol one can see."""

import unicodedata

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
    return text if text.isprintable() else "".join(map(_symbol, text))


def one_line(text: str) -> str:
    """The same on a single line, newlines shown as ↵."""
    return visible(text).replace("\n", NEWLINE)


def _symbol(character: str) -> str:
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
