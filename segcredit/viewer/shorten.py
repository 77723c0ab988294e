"""Text cut short in the middle, counted in terminal columns: a Chinese character takes two."""

from collections.abc import Iterator
from itertools import accumulate, takewhile

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.segment import Segment

_LEAST = 8
"""Columns below which nothing can be recognised."""


def shorten(text: str, width: int) -> str:
    """At most ``width`` columns of the text, with … for what was taken out of its middle."""
    if cell_len(text) <= width:
        return text
    room = max(width - 1, 0)
    head = _fitting(text, (room + 1) // 2)
    tail = _fitting(text[::-1], room // 2)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def _fitting(text: str, width: int) -> int:
    """How many characters fit into ``width`` columns."""
    ends = accumulate(map(cell_len, text))
    return sum(1 for _ in takewhile(lambda end: end <= width, ends))


class Shortened:
    """A table cell that shortens its text to whatever room the table leaves it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(self.text)
        return Measurement(min(width, _LEAST), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield Segment(shorten(self.text, options.max_width))
