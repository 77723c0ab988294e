"""Colours, lines and axes that all figures share."""

from typing import Any

INK = "#333a45"
"""All text, axes, grids and reference lines: to follow a page's text, replace it alone."""
COLOURS = ("#3b6fd4", "#e07b39", "#2c9c79", "#a14fb5", "#b8902a", "#5aa7d6", "#c2486f")
"""Blue, orange, teal, purple, ochre, sky, rose: told apart by the colour-blind as well."""
LINES = ("-", "--", "-.", ":")
"""Once more around the colours, another stroke."""
STYLE: dict[str, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "font.family": ["DejaVu Sans"],
    "grid.alpha": 0.14,
    "grid.color": INK,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 3.0,  # dashes can be told
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a run's name may hold dollar signs
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8,
}
REFERENCE: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 3)), "alpha": 0.7}
"""A line to compare with."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def line_of(number: int) -> dict[str, Any]:
    """Colour and stroke of the n-th curve."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
    }


def band(axis: Any, x: Any, ends: Any, colour: str) -> None:
    """An interval around a curve."""
    axis.fill_between(x, ends[0], ends[1], color=colour, alpha=0.16, linewidth=0)


def powers_of_ten(axis: Any, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes, labelled without mathematical markup."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for wanted, side in ((x, "x"), (y, "y")):
        if wanted:
            getattr(axis, f"set_{side}scale")("log")
            ticks = getattr(axis, f"{side}axis")
            ticks.set_major_locator(LogLocator(numticks=6))
            ticks.set_major_formatter(FuncFormatter(_power))
            ticks.set_minor_locator(NullLocator())
            ticks.set_minor_formatter(NullFormatter())


def _power(x: float, _: object = None) -> str:
    from math import log10

    return f"10{str(round(log10(x))).translate(_RAISED)}" if x > 0 else ""


def integer_steps(axis: Any) -> None:
    """No half steps below the axis."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(
        MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )
