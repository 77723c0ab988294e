"""What appears on the terminal: each row under each strategy, then a legend."""

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from segcredit.viewer.cut import Cut, partition_settings
from segcredit.viewer.palette import Palette
from segcredit.viewer.response_text import BAR, response_text
from segcredit.viewer.rows import Row
from segcredit.viewer.settings import Settings, ValueAt
from segcredit.viewer.shorten import shorten
from segcredit.viewer.table import NUMBERS, known_numbers, segment_table
from segcredit.viewer.visible import EMPTY, NEWLINE, one_line

INDENT = 2


class Page:
    """Writes rows to a console, and remembers what the legend must explain."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        many_colours = console.color_system in ("256", "truecolor") and not console.no_color
        self._palette = Palette(colour=many_colours)
        self._explain: set[str] = set()

    def row(self, row: Row, label: str, cuts: list[Cut]) -> None:
        """A row's heading, then each of its cuts."""
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
        """What the colours, symbols and columns mean."""
        grid = Table.grid(padding=(0, 2))
        for name in NUMBERS:
            if name in self._explain:
                grid.add_row(Text(name, "dim"), Text(_meaning(name, self._settings), "dim"))
        self._console.print(Rule(style="dim"))
        self._print(self._swatch())
        self._print(grid)
        self._console.print()

    def _swatch(self) -> Text:
        """A small response, cut in two."""
        return Text.assemble(
            ("one segment, its", self._palette.body(0)),
            (" end", self._palette.last(0)),
            "" if self._palette.colour else BAR,
            (" the next", self._palette.body(1)),
            (f"   {NEWLINE} line break   {EMPTY} token without text", "dim"),
        )

    def note(self, text: str) -> None:
        """A remark of our own."""
        self._print(Text(text, "dim"))
        self._console.print()

    def _print(self, content: Text | Table) -> None:
        self._console.print(Padding(content, (0, INDENT), expand=False))


def _heading(cut: Cut) -> Text:
    settings = ", ".join(f"{k}={v}" for k, v in partition_settings(cut.partition).items())
    outside = len(cut.index) - cut.num_tokens
    return Text.assemble(
        (f"{type(cut.partition).__name__}({settings})", "bold cyan"),
        f"  {_count(len(cut.segments), 'segment')} · {_count(cut.num_tokens, 'token')}",
        (f" · {outside} off the mask" if outside else "", "dim"),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _meaning(name: str, settings: Settings) -> str:
    token = "first" if settings.value_at is ValueAt.START else "last"
    return {
        "H": "entropy at the segment's last token: how open the choice was",
        "V": f"value of all that comes before the segment's {token} token",
        "Â": f"advantage: how much better it went than V (γ={settings.gamma:g}, "
        f"λ={settings.lam:g})",
        "R̂": "Â + V: what the critic should have said",
    }[name]
