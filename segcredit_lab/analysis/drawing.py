"""Style of all figures, output as SVG and PNG, and drawing of each analysis."""

import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from segcredit.printable import number_text
from segcredit.runlog.files import write_bytes_atomically
from segcredit_lab.analysis.reading import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from segcredit_lab.analysis.compare import Curve
    from segcredit_lab.analysis.lift import JumpStage, LiftCurves
    from segcredit_lab.analysis.ratio_bias import RatioBias
    from segcredit_lab.analysis.segments import WithinSegments

INK = "#333a45"
"""Color of all text, axes, grids and reference lines; a page may replace it by its own."""
COLORS = ("#3b6fd4", "#e07b39", "#2c9c79", "#a14fb5", "#b8902a", "#5aa7d6", "#c2486f")
"""Blue, orange, teal, purple, ochre, sky, rose; safe for color-blind readers."""
LINES = ("-", "--", "-.", ":")
"""Line styles, one per cycle through the colors."""
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
    "legend.handlelength": 3.0,  # long enough to show dashes
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,  # a run's name may contain dollar signs
    "xtick.color": INK,
    "xtick.labelsize": 8,
    "ytick.color": INK,
    "ytick.labelsize": 8,
}
REFERENCE: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": (0, (4, 3)), "alpha": 0.7}
"""Style of reference lines."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def line_of(number: int) -> dict[str, Any]:
    """Color and line style of the n-th curve."""
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": LINES[number // len(COLORS) % len(LINES)],
    }


def band(axis: Any, x: Any, ends: Any, color: str) -> None:
    """Draw an interval around a curve."""
    axis.fill_between(x, ends[0], ends[1], color=color, alpha=0.16, linewidth=0)


def powers_of_ten(axis: Any, *, x: bool = True, y: bool = True) -> None:
    """Make axes logarithmic, with labels without math markup."""
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
    return f"10{str(round(log10(x))).translate(_RAISED)}" if x > 0 else ""


def integer_steps(axis: Any) -> None:
    """Use integer ticks on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(
        MaxNLocator(nbins=6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    )


_HEAD = re.compile(r"\A.*?(?=<svg\b)", re.DOTALL)
_PARTS = re.compile(r"<metadata>.*?</metadata>\s*|<style\b.*?</style>\s*", re.DOTALL)
_GROUP_IDS = re.compile(r'(<g) id="[^"]*"')
_STROKES = '<svg style="stroke-linejoin: round; stroke-linecap: butt" '
"""Line style that matplotlib puts into a style sheet, which would affect the whole page."""

LETTER = 0.092
"""Width in inches of a letter of the title; wrapping would parse dollar signs as math."""


def svg(analysis: Analysis) -> str:
    """Draw the figure as one transparent <svg> element for a page; text stays selectable.

    The same numbers give the same bytes. Ids are unique to this figure, and everything that is
    not data has the color ``INK``.
    """
    salt = json.dumps([analysis.name, *analysis.runs])
    with _figure(analysis, title=False, salt=salt) as figure:
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = _PARTS.sub("", _HEAD.sub("", file.getvalue()))
    return _GROUP_IDS.sub(r"\1", text).replace("<svg ", _STROKES, 1)


def png(analysis: Analysis) -> bytes:
    """Draw the figure as PNG, with its title."""
    with _figure(analysis, title=True) as figure:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write NAME.png, NAME.svg and NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "name": analysis.name,
        "title": analysis.title,
        "runs": list(analysis.runs),
        "note": analysis.note,
        "numbers": analysis.numbers,
    }
    contents = {
        "png": png(analysis),
        "svg": ('<?xml version="1.0" encoding="utf-8"?>\n' + svg(analysis)).encode(),
        "json": (json.dumps(record, indent=1, allow_nan=False) + "\n").encode(),
    }
    made = []
    for kind, data in contents.items():
        made.append(folder / f"{analysis.name}.{kind}")
        write_bytes_atomically(made[-1], data)
    return made


@contextmanager
def _figure(analysis: Analysis, title: bool, salt: str = "") -> Iterator["Figure"]:
    """Draw in our style, regardless of the caller's matplotlib settings."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parameters: Any = matplotlib.rcParams
    with matplotlib.rc_context(), warnings.catch_warnings():
        # letters that the font lacks are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        parameters.update({**STYLE, "svg.hashsalt": salt})
        figure = Figure(figsize=analysis.size, layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            fits = analysis.size[0] / (LETTER * len(analysis.heading))
            figure.suptitle(analysis.heading, fontsize=11 * min(1.0, fits))
        analysis.draw(figure)
        yield figure


def draw_compared(curves: "list[Curve]", label: str, window: int, figure: Any) -> None:
    """Draw a smoothed curve for each group of runs over the pale recorded values."""
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
    axis.set_xlabel("optimization step")
    axis.set_ylabel(label)
    axis.margins(x=0.01)
    axis.set_ylim(bottom=max(0.0, axis.get_ylim()[0]))  # none of these metrics is negative
    integer_steps(axis)
    # below the axis, since names can be long
    longest = max(len(curve.label) for curve in curves)
    figure.legend(loc="outside lower left", ncols=min(4, len(curves), max(1, 90 // longest)))


def draw_lift(curves: "LiftCurves", figure: Any) -> None:
    """Draw Lift over responses and over steps, and its trend, in three panels."""
    over_responses, over_steps, trend = figure.subplots(1, 3, width_ratios=(1, 1, 1.05))
    over_steps.sharey(over_responses)
    _by_stage(over_responses, curves, "over_responses", "95 % interval over responses")
    _by_stage(over_steps, curves, "over_steps", "95 % interval over steps")
    over_responses.set_ylabel(f"Lift (large ΔV: top {100 * (1 - curves.thresholds[0]):.3g} %)")
    _over_time(trend, curves)
    lines, labels = over_responses.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower left", ncols=len(lines))


def _by_stage(axis: Any, curves: "LiftCurves", interval: str, title: str) -> None:
    for color, stage in zip(COLORS, curves.stages, strict=False):
        band(axis, curves.quantiles, getattr(stage, interval)[:, 0], color)
        steps = f"{stage.num_steps} step" + ("s" if stage.num_steps > 1 else "")
        label = f"{stage.name} ({steps})"
        axis.plot(curves.quantiles, stage.mean[0], color=color, marker=".", label=label)
    axis.axhline(1.0, label="no association", **REFERENCE)
    if curves.cut is not None and curves.quantiles[0] <= curves.cut <= curves.quantiles[-1]:
        _mark_cut(axis, curves.cut)
    axis.set_title(title)
    axis.set_xlabel("entropy quantile q")


def _mark_cut(axis: Any, cut: float) -> None:
    label = f"the method cuts the top {100 * (1 - cut):.3g} %"
    axis.axvline(cut, color=INK, linewidth=1.0, linestyle=":", label=label)


def _over_time(axis: Any, curves: "LiftCurves") -> None:
    trend = curves.trend
    axis.plot(trend.step, trend.lift, ".", color=COLORS[3], markersize=4, alpha=0.5)
    axis.plot(trend.step, trend.smoothed, color=COLORS[3])
    axis.axhline(1.0, **REFERENCE)
    axis.set_title(f"Mean over q, Spearman ρ = {number_text(trend.spearman, '+.2f')}")
    axis.set_xlabel(f"training step (line: {trend.window} recorded steps averaged)")
    integer_steps(axis)


SMALLEST, LARGEST = -12.0, 6.0
"""Smallest and largest power of ten drawn; values beyond are drawn at the edge."""
POINTS = 800
"""Number of units drawn, evenly spaced by the size of the gap."""


def draw_ratio_bias(bias: "RatioBias", by_length: list[dict[str, Any]], figure: Any) -> None:
    """Draw the ratio's gap against its bound, and the clip fraction by unit length."""
    left, right = figure.subplots(1, 2)
    _gap(left, bias, by_length)
    _clipped(right, by_length)
    bars = right.get_legend_handles_labels()
    figure.legend(*bars, loc="outside lower right", ncols=2)


def _gap(axis: Any, bias: "RatioBias", by_length: list[dict[str, Any]]) -> None:
    from segcredit_lab.analysis.ratio_bias import log_bound, log_gap

    gap, bound = (f(bias.length, bias.mean) / np.log(10) for f in (log_gap, log_bound))
    order = np.argsort(gap, kind="stable")
    order = order[np.isfinite(gap[order])]
    order = order[np.linspace(0, len(order) - 1, min(POINTS, len(order))).round().astype(int)]
    gap, bound = (10 ** np.clip(x[order], SMALLEST, LARGEST) for x in (gap, bound))
    axis.set_title("Gap under its bound")
    axis.set_xlabel("bound  exp(L|μ|) (L − 1) |μ|")
    axis.set_ylabel("gap  |exp(Lμ) − exp(μ)|")
    if not len(gap):
        axis.text(0.5, 0.5, "all ratios are 1", ha="center", transform=axis.transAxes)
        return
    longer = [x for x in by_length if x["to"] > 1]
    for color, bucket in zip(COLORS, longer, strict=False):
        length = bias.length[order]
        here = (length >= bucket["from"]) & (length <= bucket["to"])
        label = f"L = {_span(bucket)}"
        axis.plot(bound[here], gap[here], "o", color=color, markersize=3, mew=0, label=label)
    powers_of_ten(axis)
    ends = [min(gap.min(), bound.min()), max(gap.max(), bound.max())]
    axis.plot(ends, ends, label="gap = bound", zorder=3, **REFERENCE)
    axis.legend(loc="upper left", handlelength=1.4, labelspacing=0.3)


def _span(bucket: dict[str, Any]) -> str:
    first, last = bucket["from"], bucket["to"]
    return f"{first}" if first == last else f"{first}–{last}"


def _clipped(axis: Any, by_length: list[dict[str, Any]]) -> None:
    at = np.arange(len(by_length))
    for shift, key, label, color in (
        (-0.2, "mean_clipped", "mean ratio exp(μ)", COLORS[0]),
        (0.2, "product_clipped", "product exp(Lμ)", COLORS[1]),
    ):
        share = [100 * x[key] for x in by_length]
        axis.bar(at + shift, share, width=0.38, color=color, label=label)
    axis.set_xticks(at, [_span(x) for x in by_length])
    axis.set_title("Outside the clip range")
    axis.set_xlabel("tokens in the segment, L")
    axis.set_ylabel("share of segments (%)")
    axis.set_ylim(bottom=0)
    axis.grid(False, axis="x")


def draw_shapes(
    lengths: dict[str, Any],
    places: np.ndarray,
    counts: dict[str, Any],
    figure: Any,
) -> None:
    """Draw lengths, end positions and counts of segments."""
    left, middle, right = figure.subplots(1, 3)
    _bars(left, lengths, COLORS[0])
    left.set(title="Segment length", xlabel="tokens", ylabel="share of segments (%)")
    _places(middle, places)
    middle.set(
        title="Where segments end",
        xlabel="position in the response (0 start, 1 end)",
        ylabel="share of inner ends (%)",
        xlim=(0, 1),
    )
    _bars(right, counts, COLORS[2])
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
    axis.bar(middle, share, width=0.9 / len(places), color=COLORS[1])


def _bars(axis: Any, bars: dict[str, Any], color: str) -> None:
    start, width, count = bars["from"], bars["width"], bars["count"]
    axis.bar(start + (width - 1) / 2, 100 * count / count.sum(), width=0.9 * width, color=color)
    axis.set_xlim(start[0] - width, start[-1] + 2 * width - 1)
    integer_steps(axis)


def draw_within(found: "WithinSegments", figure: Any) -> None:
    """Draw the share of variance within segments over training."""
    axis = figure.subplots()
    axis.plot(found.step, 100 * found.share, ".", color=COLORS[0], markersize=4, alpha=0.45)
    axis.plot(found.step, 100 * found.smoothed, color=COLORS[0], label="the run's segments")
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


def draw_jumps(
    quantiles: np.ndarray, stages: "Sequence[JumpStage]", cut: float | None, figure: Any
) -> None:
    """Draw the mean jump above each quantile, and its ratio to the mean of all tokens."""
    left, right = figure.subplots(1, 2)
    for color, stage in zip(COLORS, stages, strict=False):
        left.plot(quantiles, stage.above, color=color, marker=".", label=stage.ratio.name)
        left.axhline(stage.overall, color=color, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.7)
        band(right, quantiles, stage.ratio.over_responses, color)
        right.plot(quantiles, stage.ratio.mean, color=color, marker=".")
    right.axhline(1.0, **REFERENCE)
    for axis in (left, right):
        axis.set_xlabel("entropy quantile q")
        if cut is not None:
            _mark_cut(axis, cut)
    left.plot([], [], label="mean of all tokens", **REFERENCE)
    left.set(title="Tokens above q", ylabel="mean |ΔV|")
    left.set_ylim(bottom=0)
    right.set(title="Divided by the mean of all tokens", ylabel="ratio (Eq. 14: above 1)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=5)


def draw_targets(fixed: list[dict[str, Any]], recorded: list[dict[str, Any]], figure: Any) -> None:
    """Draw the variance of targets by segment length, against the 1 / L of Eq. 16."""
    panels = [("Equal pieces", fixed), *([("Recorded segments", recorded)] if recorded else [])]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, rows) in zip(axes, panels, strict=True):
        at = np.arange(len(rows))
        for color, marker, key, label in (
            (COLORS[0], "o", "mean_ratio", "mean of token targets"),
            (COLORS[1], "D", "target_ratio", "segment-level target"),
        ):
            values = [x[key] for x in rows]
            band(axis, at, [[x[f"{key}_{end}"] for x in rows] for end in ("low", "high")], color)
            axis.plot(at, values, color=color, marker=marker, markersize=4, label=label)
        claimed = [x["claimed"] for x in rows]
        axis.plot(at, claimed, marker=".", label="Eq. 16: 1 / L", **REFERENCE)
        axis.set_xticks(at, [x["length"] for x in rows])
        axis.set(title=title, xlabel="tokens in the segment, L")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("variance / variance of token targets")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
