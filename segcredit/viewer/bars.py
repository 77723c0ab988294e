"""Credit drawn as bars: green to the right of zero, red to its left."""

from rich.text import Text

from segcredit.viewer.palette import GAIN, LOSS


class Bars:
    """The bars of one table, all to one scale; a side that nothing needs takes no room."""

    def __init__(self, advantages: list[float], length: int) -> None:
        self._length = length
        self._limit = max(map(abs, advantages)) or 1.0
        self._left = length if min(advantages) < 0 else 0
        self._right = length if max(advantages) > 0 else 0

    def draw(self, advantage: float) -> Text:
        """One bar, to the nearest half column."""
        full, half = divmod(round(2 * self._length * abs(advantage) / self._limit), 2)
        left = "╺" * half + "━" * full if advantage < 0 else ""
        right = "━" * full + "╸" * half if advantage > 0 else ""
        return Text.assemble(
            (left.rjust(self._left), LOSS),
            ("│", "dim"),
            (right.ljust(self._right), GAIN),
        )
