"""Histograms of segments: their lengths, their ends, their number."""

from typing import Any

import numpy as np

from segcredit.analysis.drawing.style import COLOURS, integer_steps


def draw_shapes(
    lengths: dict[str, Any],
    places: np.ndarray,
    counts: dict[str, Any],
    figure: Any,
) -> None:
    """Three panels."""
    left, middle, right = figure.subplots(1, 3)
    _bars(left, lengths, COLOURS[0])
    left.set(title="Segment length", xlabel="tokens", ylabel="share of segments (%)")
    _places(middle, places)
    middle.set(
        title="Where segments end",
        xlabel="position in the response (0 start, 1 end)",
        ylabel="share of inner ends (%)",
        xlim=(0, 1),
    )
    _bars(right, counts, COLOURS[2])
    right.set(title="Segments per response", xlabel="segments", ylabel="share of responses (%)")
    for axis in (left, middle, right):
        axis.grid(False, axis="x")


def _places(axis: Any, places: np.ndarray) -> None:
    if not places.any():
        text = "every response is one segment"
        axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
        axis.set_yticks([])
        return
    middle = (np.arange(len(places)) + 0.5) / len(places)
    share = 100 * places / places.sum()
    axis.bar(middle, share, width=0.9 / len(places), color=COLOURS[1])


def _bars(axis: Any, bars: dict[str, Any], colour: str) -> None:
    start, width, count = bars["from"], bars["width"], bars["count"]
    axis.bar(start + (width - 1) / 2, 100 * count / count.sum(), width=0.9 * width, color=colour)
    axis.set_xlim(start[0] - width, start[-1] + 2 * width - 1)
    integer_steps(axis)
