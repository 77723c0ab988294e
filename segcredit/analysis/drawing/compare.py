"""Training curves of several runs on one axis."""

from typing import TYPE_CHECKING, Any

from segcredit.analysis.drawing.style import band, integer_steps, line_of

if TYPE_CHECKING:
    from segcredit.analysis.compare import Curve


def draw_compared(curves: "list[Curve]", label: str, window: int, figure: Any) -> None:
    """A smooth curve for each group of runs; what was measured shines through."""
    axis = figure.subplots()
    for number, curve in enumerate(curves):
        line = line_of(number)
        pale = {"color": line["color"], "alpha": 0.22, "linewidth": 0.7}
        for each in curve.each if window > 1 or curve.num_runs > 1 else ():
            axis.plot(curve.step, each, **pale)
        if curve.num_runs > 1:
            band(axis, curve.step, curve.interval, line["color"])
        marker = "." if len(curve.step) < 8 else None
        axis.plot(curve.step, curve.mean, label=curve.label, marker=marker, **line)
    axis.set_xlabel("optimisation step")
    axis.set_ylabel(label)
    axis.margins(x=0.01)
    axis.set_ylim(bottom=max(0.0, axis.get_ylim()[0]))  # none of them can be below
    integer_steps(axis)
    # below the axis: names can be long, and curves run everywhere
    longest = max(len(curve.label) for curve in curves)
    figure.legend(loc="outside lower left", ncols=min(4, len(curves), max(1, 90 // longest)))
