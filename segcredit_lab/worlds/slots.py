"""Check a response word by word: the words allowed at each position, and the first wrong one."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["plain", "style", "decision"]
BOX_OPENS, BOX_CLOSES = "\\boxed{", "}"


class Slot(NamedTuple):
    """One word position in a line."""

    right: tuple[str, ...]
    """Words allowed here."""
    kind: Kind = "plain"
    """style: any of several words is right; decision: the rest depends on this word."""


class Word(NamedTuple):
    """One word of a text and its position."""

    text: str
    start: int


class Mark(NamedTuple):
    """A word of a text that is a decision or style."""

    kind: Kind
    start: int
    end: int


_WORD = re.compile(r"\\boxed\{|\}|\n|[^\s{}\\]+|\\")


def plain(*words: str) -> list[Slot]:
    """Make slots with one allowed word each."""
    return [Slot((word,)) for word in words]


def lines_of(text: str) -> list[list[Word]]:
    """Split a text into lines of words; a line that was just started is empty."""
    lines: list[list[Word]] = [[]]
    for found in _WORD.finditer(text):
        if found[0] == "\n":
            lines.append([])
        else:
            lines[-1].append(Word(found[0], found.start()))
    return lines


def differs_at(words: Sequence[Word], slots: Sequence[Slot]) -> int | None:
    """Index of the first wrong word; words that are not written yet are not wrong."""
    for place, word in enumerate(words):
        if place >= len(slots) or word.text not in slots[place].right:
            return place
    return None
