"""Show segments in the terminal: colored text, a table of numbers, bars of credit."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from segcredit.partition import Partition
from segcredit.printable import EMPTY, NEWLINE, one_line, visible
from segcredit.report.responses import (
    EXAMPLE,
    STDIN,
    CreditSettings,
    InputError,
    Row,
    ValueAt,
    filled_lines,
    open_lines,
    parse_row,
    rollouts_of,
)
from segcredit.report.segments import (
    FIELDS,
    Cut,
    SegmentNumbers,
    choose,
    column_names,
    cut_row,
)

_INK = "#1c2128"
_CYCLE = [  # (a segment, its last token); also distinct in the 256-color palette
    ("#bfdbfc", "#7fb0f5"),  # blue
    ("#fdebb8", "#f5cf56"),  # amber
    ("#e3d8fb", "#b898f0"),  # violet
    ("#c9eee7", "#72cdbd"),  # teal
    ("#fcdccb", "#f4a27c"),  # peach
]

GAIN, LOSS = "green", "red"
HOLE = Style(dim=True, italic=True)


@dataclass(frozen=True)
class Palette:
    """Styles of segments; they set text and background color, so any terminal theme works."""

    color: bool
    """Whether the terminal has many colors; without them, bars separate the segments."""

    def body(self, segment: int) -> Style:
        """Style of a segment's tokens."""
        return self._style(segment, 0) if self.color else Style.null()

    def last(self, segment: int) -> Style:
        """Style of a segment's last token."""
        bold = Style(bold=True)
        return self._style(segment, 1) + bold if self.color else bold

    def _style(self, segment: int, strength: int) -> Style:
        return Style(color=_INK, bgcolor=_CYCLE[segment % len(_CYCLE)][strength])


BAR = "┃"
HOLE_OPENS, HOLE_CLOSES = "⟦", "⟧"


def response_text(row: Row, cut: Cut, palette: Palette) -> Text:
    """Return the response's text, with line breaks kept and marked ↵, and holes in ⟦ ⟧."""
    text = Text()
    in_hole = [False, *(m < 0 for m in cut.index), False]  # with a neighbor at either end
    for t, (piece, m) in enumerate(zip(row.pieces, cut.index, strict=True)):
        if m < 0:
            opens = "" if in_hole[t] else HOLE_OPENS
            closes = "" if in_hole[t + 2] else HOLE_CLOSES
            _append(text, opens, visible(piece), closes, HOLE)
        elif t < cut.segments[m].end:
            _append(text, "", visible(piece) or EMPTY, "", palette.body(m))
        else:
            bar = BAR if not palette.color and m + 1 < len(cut.segments) else ""
            _append(text, "", visible(piece) or EMPTY, bar, palette.last(m))
    return text


def _append(text: Text, before: str, piece: str, after: str, style: Style) -> None:
    """Append one token; put ``after`` before a final line break, so that it stays on the line."""
    marked = piece.replace("\n", NEWLINE + "\n")
    line, broken = marked.removesuffix("\n"), marked.endswith("\n")
    text.append(before + line + after, style)
    if broken:
        text.append("\n")


_LEAST = 8
"""Minimum width of a text cell, in columns."""


def shorten(text: str, width: int) -> str:
    """Shorten a text to ``width`` columns, with … in its middle."""
    if cell_len(text) <= width:
        return text
    room = max(width - 1, 0)
    head = _fitting(text, (room + 1) // 2)
    tail = _fitting(text[::-1], room // 2)
    return f"{text[:head]}…{text[len(text) - tail :]}"


def _fitting(text: str, width: int) -> int:
    """Return the number of characters that fit into ``width`` columns."""
    ends = accumulate(map(cell_len, text))
    return sum(1 for _ in takewhile(lambda end: end <= width, ends))


class ShortText:
    """A table cell that shortens its text to the width it gets."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(self.text)
        return Measurement(min(width, _LEAST), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield Segment(shorten(self.text, options.max_width))


class Bars:
    """The bars of one table, all to the same scale; a side without bars takes no space."""

    def __init__(self, advantages: list[float], length: int) -> None:
        self._length = length
        self._limit = max(map(abs, advantages)) or 1.0
        self._left = length if min(advantages) < 0 else 0
        self._right = length if max(advantages) > 0 else 0

    def draw(self, advantage: float) -> Text:
        """Draw one bar, to the nearest half column."""
        full, half = divmod(round(2 * self._length * abs(advantage) / self._limit), 2)
        left = "╺" * half + "━" * full if advantage < 0 else ""
        right = "━" * full + "╸" * half if advantage > 0 else ""
        return Text.assemble(
            (left.rjust(self._left), LOSS),
            ("│", "dim"),
            (right.ljust(self._right), GAIN),
        )


LEAST_FOR_ALL, LEAST_FOR_BARS, LEAST_FOR_LONG_BARS = 60, 72, 110
"""Minimum terminal widths for all numbers, for bars of credit, and for long bars."""
BAR_WIDTH, LONG_BAR_WIDTH = 8, 16
"""Length of the longest bar, in columns."""
SHOWN_FIRST, SHOWN_LAST = 30, 10
"""Rows shown of a long table; --json lists all."""

NUMBERS = {"H": "entropy_at_end", "V": "value", "Â": "advantage", "R̂": "value_target"}
"""Heading → field."""


def known_numbers(cut: Cut, width: int) -> list[str]:
    """List the columns with known numbers; a narrow terminal leaves out R̂ = Â + V."""
    first = cut.segments[0]
    known = [name for name, field in NUMBERS.items() if getattr(first, field) is not None]
    return known if width >= LEAST_FOR_ALL else [name for name in known if name != "R̂"]


def segment_table(cut: Cut, width: int, palette: Palette) -> Table:
    """Make a table with one row per segment; a very long table leaves out its middle."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("text")  # takes the remaining width
    columns = ["tokens"] if width >= LEAST_FOR_ALL else []
    columns += known_numbers(cut, width)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    bars = None
    if cut.segments[0].advantage is not None and width >= LEAST_FOR_BARS:
        table.add_column(no_wrap=True)
        length = LONG_BAR_WIDTH if width >= LEAST_FOR_LONG_BARS else BAR_WIDTH
        bars = Bars([segment.advantage or 0.0 for segment in cut.segments], length)

    hidden = range(SHOWN_FIRST, len(cut.segments) - SHOWN_LAST)
    if len(hidden) == 1:  # the row that reports it would take as much space
        hidden = range(0)
    for m, segment in enumerate(cut.segments):
        if m not in hidden:
            drawn = [bars.draw(segment.advantage or 0.0)] if bars else []
            cells = [_cell(name, segment) for name in columns]
            number = Text(f" {m + 1} ", palette.body(m))
            text = one_line(segment.text).strip(" ") or ("␣" if segment.text else EMPTY)
            table.add_row(number, ShortText(text), *cells, *drawn)
        elif m == hidden.start:
            table.add_row("⋮", Text(f"{len(hidden)} more (--json lists all)", "dim"))
    return table


def _cell(name: str, segment: SegmentNumbers) -> Text:
    if name == "tokens":
        return Text(str(segment.num_tokens), "dim")
    number: float = getattr(segment, NUMBERS[name])
    if name == "Â":
        return Text(_number(number, "+"), GAIN if number > 0 else LOSS if number < 0 else "dim")
    return Text(_number(number), "dim" if name == "R̂" else "")


def _number(x: float, plus: str = "-") -> str:
    return f"{x:{plus}.2f}" if abs(x) < 1000 else f"{x:{plus}.3g}"


INDENT = 2


class Page:
    """Writes rows to a console, and collects the headings for the legend."""

    def __init__(self, console: Console, credit: CreditSettings) -> None:
        self._console = console
        self._credit = credit
        many_colors = console.color_system in ("256", "truecolor") and not console.no_color
        self._palette = Palette(color=many_colors)
        self._explain: set[str] = set()

    def row(self, row: Row, label: str, cuts: list[Cut]) -> None:
        """Print a row's heading, then each of its cuts."""
        title = Text(shorten(one_line(label), self._console.width // 2), "bold")
        if row.reward is not None:
            title.append("  reward ", "not bold dim").append(f"{row.reward:g}", "bold")
        self._console.print(Rule(title, align="left", characters="━", style="dim"))
        if row.prompt:
            two_lines = 2 * (self._console.width - 2 * INDENT) - 8
            self._print(Text(shorten(one_line(row.prompt), two_lines), "italic dim"))
        for cut in cuts:
            self._cut(row, cut)

    def _cut(self, row: Row, cut: Cut) -> None:
        self._explain.update(known_numbers(cut, self._console.width))
        self._console.print()
        self._print(_heading(cut))
        self._console.print()
        self._print(response_text(row, cut, self._palette))
        self._console.print()
        self._print(segment_table(cut, self._console.width, self._palette))
        lacking = [name for name in ("value", "reward") if getattr(row, name) is None]
        if lacking:
            self._print(Text(f"no Â: this row has no {' and no '.join(lacking)}", "dim italic"))
        self._console.print()

    def legend(self) -> None:
        """Explain the colors, symbols and columns."""
        grid = Table.grid(padding=(0, 2))
        for name in NUMBERS:
            if name in self._explain:
                grid.add_row(Text(name, "dim"), Text(_meaning(name, self._credit), "dim"))
        self._console.print(Rule(style="dim"))
        self._print(self._swatch())
        self._print(grid)
        self._console.print()

    def _swatch(self) -> Text:
        """Return a small sample of two segments."""
        return Text.assemble(
            ("one segment, its", self._palette.body(0)),
            (" end", self._palette.last(0)),
            "" if self._palette.color else BAR,
            (" the next", self._palette.body(1)),
            (f"   {NEWLINE} line break   {EMPTY} token without text", "dim"),
        )

    def note(self, text: str) -> None:
        """Print a remark."""
        self._print(Text(text, "dim"))
        self._console.print()

    def _print(self, content: Text | Table) -> None:
        self._console.print(Padding(content, (0, INDENT), expand=False))


def _heading(cut: Cut) -> Text:
    outside = len(cut.index) - cut.num_tokens
    return Text.assemble(
        (f"{type(cut.partition).__name__}({_settings(cut.partition)})", "bold cyan"),
        f"  {_count(len(cut.segments), 'segment')} · {_count(cut.num_tokens, 'token')}",
        (f" · {outside} off the mask" if outside else "", "dim"),
    )


def _settings(partition: Partition) -> str:
    return ", ".join(f"{name}={x}" for name, x in partition.settings().items())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _meaning(name: str, credit: CreditSettings) -> str:
    token = "first" if credit.value_at is ValueAt.START else "last"
    return {
        "H": "entropy at the segment's last token: how uncertain the policy was",
        "V": f"value of the text before the segment's {token} token",
        "Â": f"advantage: how much better the result was than V (γ={credit.gamma:g}, "
        f"λ={credit.lam:g})",
        "R̂": "Â + V: target of the critic",
    }[name]


def show_partitions(partitions: Mapping[str, Partition], width: int | None) -> None:
    """Print partitions with their settings and the fields of a row that they need."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in ("partition", "description", "settings", "needs"):
        table.add_column(heading, no_wrap=heading == "partition")
    for name, partition in partitions.items():
        needs = [" or ".join(FIELDS.get(x, (x,))) for x in column_names(partition)]
        cells = (partition.description(), _settings(partition), ", ".join(filter(None, needs)))
        table.add_row(Text(name, "cyan"), *map(Text, cells))
    console = Console(width=width, highlight=False)
    console.print(table)
    console.print("\nall: each of these for which the row has the fields it needs")
    console.print("your own: -s my_partitions.py:Name (docs/extending.md)")


@dataclass(frozen=True)
class Viewer:
    """Shows the responses of a file under partitions, in the terminal or as JSON."""

    path: str
    strategies: Sequence[str]
    """Names as typed; empty: entropy or newline, whichever fits the row."""
    partitions: Mapping[str, Partition]
    credit: CreditSettings
    limit: int | None
    """Maximum number of rows; None: all."""

    def to_terminal(self, width: int | None) -> None:
        """Print each row with its cuts, a legend, and the number of rows left out."""
        page = Page(Console(width=width, highlight=False), self.credit)
        if self.path == EXAMPLE:
            page.note("Hand-written responses; the numbers are made up to illustrate.")
        file = rollouts_of(self.path)
        if file != self.path:
            relative = one_line(os.path.relpath(file, self.path))
            page.note(f"The last rollouts of this run: {relative}")
        left_out = self._show(page.row)
        page.legend()
        if self.path == EXAMPLE:
            page.note("Next: segcredit segment --example -s all, then a file of yours (--help).")
        if left_out:
            page.note(left_out)

    def to_json(self) -> None:
        """Print one line of JSON per row and strategy, and nothing else, to standard output."""

        def show(row: Row, label: str, cuts: list[Cut]) -> None:
            for cut in cuts:
                print(cut.to_json(label, self.credit))

        if left_out := self._show(show):
            print(left_out, file=sys.stderr)

    def _show(self, show: Callable[[Row, str, list[Cut]], None]) -> str:
        """Show the first rows, each with its cuts; return a remark on the rows left out."""
        path = rollouts_of(self.path)
        name = "stdin" if path == STDIN else path
        left_out = 0
        with open_lines(path) as lines:
            for position, (number, line) in enumerate(filled_lines(name, lines)):
                if self.limit is not None and position >= self.limit:
                    left_out += 1
                    continue
                try:
                    row = parse_row(line)
                    chosen = choose(self.strategies, row, self.partitions)
                    cuts = [cut_row(row, x, self.partitions[x], self.credit) for x in chosen]
                except InputError as error:
                    raise InputError(f"{name}:{number}: {error}") from None
                show(row, row.id or f"line {number}", cuts)
        rows = "row was" if left_out == 1 else "rows were"
        return f"{left_out} more {rows} left out; --limit 0: all." if left_out else ""
