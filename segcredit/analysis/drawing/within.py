"""The share of variance within segments over training."""

from typing import TYPE_CHECKING, Any

from segcredit.analysis.drawing.style import COLOURS, INK, integer_steps

if TYPE_CHECKING:
    from segcredit.analysis.within import WithinSegments


def draw_within(found: "WithinSegments", figure: Any) -> None:
    """One panel."""
    axis = figure.subplots()
    axis.plot(found.step, 100 * found.share, ".", color=COLOURS[0], markersize=4, alpha=0.45)
    axis.plot(found.step, 100 * found.smoothed, color=COLOURS[0], label="the run's segments")
    axis.plot(
        found.step,
        100 * found.equal_cut_smoothed,
        color=INK,
        linestyle=(0, (4, 3)),
        linewidth=1.2,
        label="as many segments of equal length",
    )
    axis.set_ylim(bottom=0)
    axis.set_xlabel("training step")
    axis.set_ylabel("variance within segments (%)")
    integer_steps(axis)
    figure.legend(loc="outside lower left", ncols=2)
