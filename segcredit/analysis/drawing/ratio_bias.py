"""The gap between mean and product ratio under its bound, and what is clipped by length."""

from typing import TYPE_CHECKING, Any

import numpy as np

from segcredit.analysis.drawing.style import COLOURS, REFERENCE, powers_of_ten

if TYPE_CHECKING:
    from segcredit.analysis.ratio_bias import RatioBias

SMALLEST, LARGEST = -12.0, 6.0
"""Powers of ten that are drawn; what lies beyond stands at the edge."""
POINTS = 800
"""Drawn of all units, evenly spread over the sizes of the gap."""


def draw_ratio_bias(bias: "RatioBias", by_length: list[dict[str, Any]], figure: Any) -> None:
    """Two panels."""
    left, right = figure.subplots(1, 2)
    _gap(left, bias, by_length)
    _clipped(right, by_length)
    bars = right.get_legend_handles_labels()
    figure.legend(*bars, loc="outside lower right", ncols=2)


def _gap(axis: Any, bias: "RatioBias", by_length: list[dict[str, Any]]) -> None:
    from segcredit.analysis.ratio_bias import log_bound, log_gap

    gap, bound = (f(bias.length, bias.mean) / np.log(10) for f in (log_gap, log_bound))
    order = np.argsort(gap, kind="stable")
    order = order[np.isfinite(gap[order])]
    order = order[np.linspace(0, len(order) - 1, min(POINTS, len(order))).round().astype(int)]
    gap, bound = (10 ** np.clip(x[order], SMALLEST, LARGEST) for x in (gap, bound))
    axis.set_title("Gap under its bound")
    axis.set_xlabel("bound  exp(L|μ|) (L − 1) |μ|")
    axis.set_ylabel("gap  |exp(Lμ) − exp(μ)|")
    if not len(gap):
        axis.text(0.5, 0.5, "no unit moved", ha="center", transform=axis.transAxes)
        return
    longer = [x for x in by_length if x["to"] > 1]
    for colour, bucket in zip(COLOURS, longer, strict=False):
        length = bias.length[order]
        here = (length >= bucket["from"]) & (length <= bucket["to"])
        label = f"L = {_span(bucket)}"
        axis.plot(bound[here], gap[here], "o", color=colour, markersize=3, mew=0, label=label)
    powers_of_ten(axis)
    ends = [min(gap.min(), bound.min()), max(gap.max(), bound.max())]
    axis.plot(ends, ends, label="gap = bound", zorder=3, **REFERENCE)
    axis.legend(loc="upper left", handlelength=1.4, labelspacing=0.3)


def _span(bucket: dict[str, Any]) -> str:
    first, last = bucket["from"], bucket["to"]
    return f"{first}" if first == last else f"{first}–{last}"


def _clipped(axis: Any, by_length: list[dict[str, Any]]) -> None:
    at = np.arange(len(by_length))
    for shift, key, label, colour in (
        (-0.2, "mean_clipped", "mean ratio exp(μ)", COLOURS[0]),
        (0.2, "product_clipped", "product exp(Lμ)", COLOURS[1]),
    ):
        share = [100 * x[key] for x in by_length]
        axis.bar(at + shift, share, width=0.38, color=colour, label=label)
    axis.set_xticks(at, [_span(x) for x in by_length])
    axis.set_title("Outside the clip range")
    axis.set_xlabel("tokens in the segment, L")
    axis.set_ylabel("share of segments (%)")
    axis.set_ylim(bottom=0)
    axis.grid(False, axis="x")
