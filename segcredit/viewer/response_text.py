"""The response itself, its segments told apart by colour, or by bars where there is none."""

from rich.style import Style
from rich.text import Text

from segcredit.viewer.cut import Cut
from segcredit.viewer.palette import HOLE, Palette
from segcredit.viewer.rows import Row
from segcredit.viewer.visible import EMPTY, NEWLINE, visible

BAR = "┃"
HOLE_OPENS, HOLE_CLOSES = "⟦", "⟧"


def response_text(row: Row, cut: Cut, palette: Palette) -> Text:
    """The text as it was written, line breaks kept and marked ↵, holes in ⟦ ⟧."""
    text = Text()
    in_hole = [False, *(m < 0 for m in cut.index), False]  # with a neighbour at either end
    for t, (piece, m) in enumerate(zip(row.pieces, cut.index, strict=True)):
        if m < 0:
            opens = "" if in_hole[t] else HOLE_OPENS
            closes = "" if in_hole[t + 2] else HOLE_CLOSES
            _append(text, opens, visible(piece), closes, HOLE)
        elif t < cut.segments[m].end:
            _append(text, "", visible(piece) or EMPTY, "", palette.body(m))
        else:
            bar = BAR if not palette.colour and m + 1 < len(cut.segments) else ""
            _append(text, "", visible(piece) or EMPTY, bar, palette.last(m))
    return text


def _append(text: Text, before: str, piece: str, after: str, style: Style) -> None:
    """One token; what comes after it stays on its line, before a final line break."""
    marked = piece.replace("\n", NEWLINE + "\n")
    line, broken = marked.removesuffix("\n"), marked.endswith("\n")
    text.append(before + line + after, style)
    if broken:
        text.append("\n")
