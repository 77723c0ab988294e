"""How a study's own figures look, in the style of the analyses."""

from dataclasses import replace
from typing import Any

import numpy as np

from segcredit.analysis.compare import Curve
from segcredit.analysis.drawing.compare import draw_compared
from segcredit.analysis.drawing.style import COLOURS, INK, REFERENCE, band, line_of
from segcredit.study.summary import Estimate

MANY = 5
"""Curves beyond which single runs and bands would hide the means."""
Lifts = dict[str, dict[str, tuple[np.ndarray, np.ndarray, int]]]
"""Arm → stage of training → Lift(q), its interval over seeds, how many they are."""


def draw_curves(curves: list[Curve], label: str, window: int, figure: Any) -> None:
    """Means; bands and single runs where there are few; what is below 0 is shown."""
    shown = curves if len(curves) <= MANY else [_mean_alone(curve) for curve in curves]
    draw_compared(shown, label, window, figure)
    lowest = min(float(np.nanmin([*x.each.ravel(), *x.mean, 0.0])) for x in shown)
    if lowest < 0:
        figure.axes[0].set_ylim(bottom=1.05 * lowest)


def _mean_alone(curve: Curve) -> Curve:
    return replace(curve, each=curve.each[:0], interval=np.full_like(curve.interval, np.nan))


def draw_differences(
    rows: list[tuple[str, Estimate, Estimate]], reference: str, measure: str, figure: Any
) -> None:
    """A forest plot: a point and its interval per arm, left of 0 where the reference is better."""
    axis = figure.subplots()
    for place, (_, area, final) in enumerate(rows):
        for shift, found, colour, marker in (
            (-0.14, area, COLOURS[0], "o"),
            (0.14, final, COLOURS[1], "D"),
        ):
            at = place + shift
            axis.plot([found.low, found.high], [at, at], color=colour, linewidth=1.6)
            axis.plot(found.mean, at, marker, color=colour, markersize=5)
    axis.axvline(0.0, **REFERENCE)
    axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(False, axis="y")
    # two lines: a reference may have a long name
    unit = "points of" if measure == "accuracy" else "100 ×"
    axis.set_xlabel(f"{unit} held-out {measure} above\n{reference}, 95 % interval over seeds")
    for colour, marker, label in (
        (COLOURS[0], "o", "mean over the curve"),
        (COLOURS[1], "D", "final"),
    ):
        axis.plot([], [], marker, color=colour, linestyle="-", label=label)
    figure.legend(loc="outside lower left", ncols=2)


def draw_sweep(
    x: list[float],
    area: list[Estimate],
    final: list[Estimate],
    paper: dict[str, list[float]],
    label: str,
    measure: str,
    figure: Any,
) -> None:
    """Both measures with their bands; the paper's numbers, of another task, as a thin line."""
    axis = figure.subplots()
    for colour, marker, name, found in (
        (COLOURS[0], "o", "mean over the curve", area),
        (COLOURS[1], "D", "final", final),
    ):
        ends = np.array([[e.low for e in found], [e.high for e in found]])
        band(axis, x, ends, colour)
        axis.plot(x, [e.mean for e in found], color=colour, marker=marker, ms=4, label=name)
    for name, numbers in paper.items():
        thin = {"color": INK, "linewidth": 1.0, "linestyle": ":", "marker": ".", "alpha": 0.7}
        axis.plot(x, numbers, label=f"paper: {name} (another task)", **thin)
    axis.set_xlabel(label)
    axis.set_ylabel(measure)
    figure.legend(loc="outside lower left", ncols=3)


def draw_lift_over_seeds(
    quantiles: np.ndarray,
    over: Lifts,
    figure: Any,
) -> None:
    """One panel per arm, one line per stage of training, bands over seeds."""
    panels = figure.subplots(1, len(over), sharey=True, squeeze=False)[0]
    for axis, (label, stages) in zip(panels, over.items(), strict=True):
        for number, (stage, (mean, ends, _)) in enumerate(stages.items()):
            line = line_of(number)
            band(axis, quantiles, ends, line["color"])
            axis.plot(quantiles, mean, marker=".", label=stage, **line)
        axis.axhline(1.0, label="no association", **REFERENCE)
        axis.axvline(0.7, color=INK, linewidth=1.0, linestyle=":", label="k = 30 %")
        axis.set_title(label)
        axis.set_xlabel("entropy quantile q")
    panels[0].set_ylabel("Lift")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=5)
