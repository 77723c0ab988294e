"""The table of segments: what each holds, and what it is worth."""

from rich.table import Table
from rich.text import Text

from segcredit.viewer.bars import Bars
from segcredit.viewer.cut import Cut, SegmentNumbers
from segcredit.viewer.palette import Palette, sign
from segcredit.viewer.shorten import Shortened
from segcredit.viewer.visible import EMPTY, one_line

LEAST_FOR_ALL, LEAST_FOR_BARS, LEAST_FOR_LONG_BARS = 60, 72, 110
"""Columns of terminal from which on there is room for every number, and for credit as bars."""
BAR, LONG_BAR = 8, 16
"""Columns of the longest bar."""
SHOWN_FIRST, SHOWN_LAST = 30, 10
"""Rows of a long table; --json lists all."""

NUMBERS = {"H": "entropy_at_end", "V": "value", "Â": "advantage", "R̂": "value_target"}
"""Heading → field."""


def known_numbers(cut: Cut, width: int) -> list[str]:
    """The headings for which the row has numbers; R̂ = Â + V is the first to give way."""
    first = cut.segments[0]
    known = [name for name, field in NUMBERS.items() if getattr(first, field) is not None]
    return known if width >= LEAST_FOR_ALL else [name for name in known if name != "R̂"]


def segment_table(cut: Cut, width: int, palette: Palette) -> Table:
    """One row per segment; in a very long table the middle is left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("text")  # takes the room that is left
    columns = ["tokens"] if width >= LEAST_FOR_ALL else []
    columns += known_numbers(cut, width)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    bars = None
    if cut.segments[0].advantage is not None and width >= LEAST_FOR_BARS:
        table.add_column(no_wrap=True)
        length = LONG_BAR if width >= LEAST_FOR_LONG_BARS else BAR
        bars = Bars([segment.advantage or 0.0 for segment in cut.segments], length)

    hidden = range(SHOWN_FIRST, len(cut.segments) - SHOWN_LAST)
    if len(hidden) == 1:  # the row that says so would take its place
        hidden = range(0)
    for m, segment in enumerate(cut.segments):
        if m not in hidden:
            drawn = [bars.draw(segment.advantage or 0.0)] if bars else []
            cells = [_cell(name, segment) for name in columns]
            number = Text(f" {m + 1} ", palette.body(m))
            table.add_row(number, Shortened(_on_one_line(segment.text)), *cells, *drawn)
        elif m == hidden.start:
            table.add_row("⋮", Text(f"{len(hidden)} more (--json lists all)", "dim"))
    return table


def _on_one_line(text: str) -> str:
    return one_line(text).strip(" ") or ("␣" if text else EMPTY)


def _cell(name: str, segment: SegmentNumbers) -> Text:
    if name == "tokens":
        return Text(str(segment.num_tokens), "dim")
    number: float = getattr(segment, NUMBERS[name])
    if name == "Â":
        return Text(_number(number, "+"), sign(number))
    return Text(_number(number), "dim" if name == "R̂" else "")


def _number(x: float, plus: str = "-") -> str:
    return f"{x:{plus}.2f}" if abs(x) < 1000 else f"{x:{plus}.3g}"
