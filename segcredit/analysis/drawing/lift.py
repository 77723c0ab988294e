"""Lift against q by stage, with both kinds of interval, and against the step."""

from typing import TYPE_CHECKING, Any

from segcredit.analysis.drawing.style import COLOURS, INK, REFERENCE, band, integer_steps
from segcredit.printable import number_text

if TYPE_CHECKING:
    from segcredit.analysis.lift_curves import LiftCurves


def draw_lift(curves: "LiftCurves", figure: Any) -> None:
    """Three panels; what the lines are stands below them, where no curve runs."""
    over_responses, over_steps, trend = figure.subplots(1, 3, width_ratios=(1, 1, 1.05))
    over_steps.sharey(over_responses)
    _by_stage(over_responses, curves, "over_responses", "95 % interval over responses")
    _by_stage(over_steps, curves, "over_steps", "95 % interval over steps")
    over_responses.set_ylabel(f"Lift (large ΔV: top {100 * (1 - curves.thresholds[0]):.3g} %)")
    _over_time(trend, curves)
    lines, labels = over_responses.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower left", ncols=len(lines))


def _by_stage(axis: Any, curves: "LiftCurves", interval: str, title: str) -> None:
    for colour, stage in zip(COLOURS, curves.stages, strict=False):
        band(axis, curves.quantiles, getattr(stage, interval)[:, 0], colour)
        steps = f"{stage.num_steps} step" + ("s" if stage.num_steps > 1 else "")
        label = f"{stage.name} ({steps})"
        axis.plot(curves.quantiles, stage.lift[0], color=colour, marker=".", label=label)
    axis.axhline(1.0, label="no association", **REFERENCE)
    if curves.cut is not None and curves.quantiles[0] <= curves.cut <= curves.quantiles[-1]:
        label = f"the method cuts the top {100 * (1 - curves.cut):.3g} %"
        axis.axvline(curves.cut, color=INK, linewidth=1.0, linestyle=":", label=label)
    axis.set_title(title)
    axis.set_xlabel("entropy quantile q")


def _over_time(axis: Any, curves: "LiftCurves") -> None:
    trend = curves.trend
    axis.plot(trend.step, trend.lift, ".", color=COLOURS[3], markersize=4, alpha=0.5)
    axis.plot(trend.step, trend.smoothed, color=COLOURS[3])
    axis.axhline(1.0, **REFERENCE)
    axis.set_title(f"Mean over q, Spearman ρ = {number_text(trend.spearman, '+.2f')}")
    axis.set_xlabel(f"training step (line: {trend.window} recorded steps averaged)")
    integer_steps(axis)
