"""What an analysis hands over: numbers, a sentence on what they mean, and how to draw them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from segcredit.printable import number_text

DIGITS = 6
"""Of written numbers: no more than the rollouts have."""


@dataclass(frozen=True)
class Table:
    """The few numbers one looks at first."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Analysis:
    """One analysis of one run, or of several side by side."""

    name: str
    """What its files are called."""
    title: str
    runs: tuple[str, ...]
    """The names of the runs it is about, to be shown as they are."""
    numbers: Mapping[str, Any]
    """Everything that is drawn, ready for JSON; what is not finite is None."""
    table: Table
    note: str
    """What the numbers can say, and what they cannot."""
    draw: Callable[[Any], None]
    """Draws on a matplotlib figure."""
    size: tuple[float, float] = (8.8, 3.2)
    """Of the figure, inches."""
    compares: bool = False
    """Whether it is about all runs together."""

    @property
    def heading(self) -> str:
        """The title, and of which run; a comparison names its runs itself."""
        return self.title if self.compares else f"{self.title}: {', '.join(self.runs)}"


@dataclass(frozen=True)
class Skipped:
    """An analysis that could not be made, and why."""

    name: str
    run: str
    reason: str


class CannotAnalyseError(ValueError):
    """One sentence on what a run lacks for an analysis."""


def plain(x: Any) -> Any:
    """As JSON has it: lists, mappings, numbers of few digits, None for what is not finite."""
    if isinstance(x, Mapping):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, np.ndarray | np.generic):
        x = x.tolist()
    if isinstance(x, list | tuple):
        return [plain(item) for item in x]
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None
    return x


def interval_text(ends: Float[np.ndarray, " 2"], form: str = ".2f") -> str:
    """Both ends, or a dash where there is no interval."""
    if not np.isfinite(ends).all():
        return "–"
    return " … ".join(number_text(float(x), form) for x in ends)
