"""A chain of thought word by word: which words would be right where, and where one was not."""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["plain", "style", "decision"]
BOX_OPENS, BOX_CLOSES = "\\boxed{", "}"


class Slot(NamedTuple):
    """One place in a line."""

    right: tuple[str, ...]
    """Words that do no harm here."""
    kind: Kind = "plain"
    """style: any of several words serves. decision: what follows depends on this word."""


class Word(NamedTuple):
    """One word of a text, and where it begins."""

    text: str
    start: int


class Mark(NamedTuple):
    """A word of a text that is a decision, or mere style."""

    kind: Kind
    start: int
    end: int


_WORD = re.compile(r"\\boxed\{|\}|\n|[^\s{}\\]+|\\")


def plain(*words: str) -> list[Slot]:
    """Words that must be these."""
    return [Slot((word,)) for word in words]


def lines_of(text: str) -> list[list[Word]]:
    """The words of each line; a line that has just been opened is an empty one."""
    lines: list[list[Word]] = [[]]
    for found in _WORD.finditer(text):
        if found[0] == "\n":
            lines.append([])
        else:
            lines[-1].append(Word(found[0], found.start()))
    return lines


def differs_at(words: Sequence[Word], slots: Sequence[Slot]) -> int | None:
    """The first place at which a word is not right; words that are not written yet are none."""
    for place, word in enumerate(words):
        if place >= len(slots) or word.text not in slots[place].right:
            return place
    return None
