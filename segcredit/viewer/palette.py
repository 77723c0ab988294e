"""Colours: a cycle for neighbouring segments, and green and red for credit."""

from dataclasses import dataclass

from rich.style import Style

_INK = "#1c2128"
_CYCLE = [  # (a segment, its last token); distinct in the 256-colour palette too
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
    """The looks of segments. Ink and ground are both set, so they suit dark and light terminals."""

    colour: bool
    """Without it, segments are told apart by other means, and only boldness remains."""

    def body(self, segment: int) -> Style:
        """A segment's tokens."""
        return self._ground(segment, 0) if self.colour else Style.null()

    def last(self, segment: int) -> Style:
        """A segment's last token."""
        bold = Style(bold=True)
        return self._ground(segment, 1) + bold if self.colour else bold

    def _ground(self, segment: int, strength: int) -> Style:
        return Style(color=_INK, bgcolor=_CYCLE[segment % len(_CYCLE)][strength])


def sign(number: float) -> str:
    """Green above zero, red below."""
    return GAIN if number > 0 else LOSS if number < 0 else "dim"
