"""Geometric mean of the token ratios compared with their product, over recorded segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from segcredit.algorithms import PolicyGradient
from segcredit.algorithms.objective import RawRatio
from segcredit.runlog import Run
from segcredit.types import Rollouts
from segcredit_lab.analysis.drawing import draw_ratio_bias
from segcredit_lab.analysis.reading import (
    Analysis,
    CannotAnalyzeError,
    Step,
    Table,
    method_of,
    plain,
)
from segcredit_lab.analysis.segments import pad, unit_lengths, unit_of

BUCKETS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 64), (65, 10**9))
"""Ranges of segment lengths."""
ONE_NUMBER = 1e-5
"""Log-ratios closer than this are the same recorded number (rows have six digits)."""
LARGEST = 700.0
"""Exponent of the largest number that is written; float64 ends at e^709."""


def ratio_units(method: PolicyGradient, step: Step) -> Int[np.ndarray, " N"]:
    """Number the units of the ratio from 0, −1 outside; read from segments or recomputed."""
    over = method.ratio.over
    if over == method.credit.over and (step.segment >= 0).any():
        return unit_of(step.owner, step.segment)
    padded = pad(step.owner, step.num_responses)
    full = padded.mask.any(axis=1)
    mask = torch.from_numpy(padded.mask[full])
    if not len(mask):
        return np.full(len(step.owner), -1)
    rollouts = Rollouts.from_columns(
        mask,
        logp_old=torch.from_numpy(padded.spread(step.logp_old)[full]),
        entropy=torch.from_numpy(padded.spread(step.entropy)[full]),
    )
    try:
        segments = over(rollouts)
    except (ValueError, TypeError, AttributeError) as error:
        raise CannotAnalyzeError(
            f"the segments of the method's ratio cannot be recomputed from the rollouts: {error}"
        ) from None
    return unit_of(step.owner, segments.index.numpy()[padded.mask[full]])


def log_gap(
    length: Int[np.ndarray, " M"], mean: Float[np.ndarray, " M"]
) -> Float[np.ndarray, " M"]:
    """Compute ln |e^{Lμ} − e^μ| as μ + ln |e^{(L−1)μ} − 1|, since e^{Lμ} overflows."""
    exponent = (length - 1) * mean
    size = np.abs(exponent)
    with np.errstate(divide="ignore"):  # L = 1 or μ = 0: no gap
        return mean + np.maximum(exponent, 0.0) + np.log(-np.expm1(-size))


def log_bound(
    length: Int[np.ndarray, " M"], mean: Float[np.ndarray, " M"]
) -> Float[np.ndarray, " M"]:
    """Compute the logarithm of e^{L|μ|} (L − 1) |μ|, an upper bound of the gap."""
    with np.errstate(divide="ignore"):
        return length * np.abs(mean) + np.log((length - 1) * np.abs(mean))


def outside(log_ratio: Float[np.ndarray, " M"], low: float, high: float) -> Bool[np.ndarray, " M"]:
    """Whether a ratio is outside the clip range 1 − low … 1 + high."""
    with np.errstate(divide="ignore"):
        return (log_ratio < np.log(max(0.0, 1.0 - low))) | (log_ratio > np.log1p(high))


@dataclass(frozen=True)
class RatioBias:
    """Length and mean log-ratio of every recorded unit of the ratio."""

    length: Int[np.ndarray, " M"]
    mean: Float[np.ndarray, " M"]
    """μ, mean log-ratio of its tokens."""
    low: float
    high: float

    @property
    def mean_clipped(self) -> Bool[np.ndarray, " M"]:
        return outside(self.mean, self.low, self.high)

    @property
    def product_clipped(self) -> Bool[np.ndarray, " M"]:
        return outside(self.length * self.mean, self.low, self.high)


def units_of_step(
    unit: Int[np.ndarray, " N"], ratio: Float[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, " M"], Float[np.ndarray, " M"]]:
    """Return L and mean log-ratio μ of each unit whose recorded ratio is positive and constant."""
    inside = unit >= 0
    length = unit_lengths(unit)
    low, high = np.full(len(length), np.inf), np.full(len(length), -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.log(ratio[inside])
        np.minimum.at(low, unit[inside], x)
        np.maximum.at(high, unit[inside], x)
        good = np.isfinite(low) & np.isfinite(high) & (high - low < ONE_NUMBER)
    return length[good], ((low + high) / 2)[good]


def ratio_bias(run: Run, name: str, steps: Sequence[Step]) -> Analysis:
    """Analyze a run's recorded ratios."""
    method = method_of(run)
    clip = method.surrogate
    low, high = getattr(clip, "low", None), getattr(clip, "high", None)
    if not isinstance(low, float) or not isinstance(high, float):
        raise CannotAnalyzeError("the method does not clip its ratio.")
    units = [ratio_units(method, step) for step in steps]
    pairs = [units_of_step(unit, x.ratio) for unit, x in zip(units, steps, strict=True)]
    length = np.concatenate([x for x, _ in pairs])
    if not len(length):
        raise CannotAnalyzeError("no recorded unit has a constant positive ratio.")
    if (length == 1).all():
        raise CannotAnalyzeError(
            "every unit of the ratio is one token, so its mean and its product are equal."
        )
    log_ratio = np.concatenate([x for _, x in pairs])
    # a run records the method's own ratio, which for RLOO is the product
    mean = log_ratio / length if isinstance(method.ratio, RawRatio) else log_ratio
    bias = RatioBias(length, mean, low, high)
    left_out = sum(int(unit.max(initial=-1)) + 1 for unit in units) - len(length)
    numbers = _numbers(bias)
    return Analysis(
        name="ratio_bias",
        title="Segment ratio against product of token ratios",
        runs=(name,),
        numbers=plain({**numbers, "units_left_out": left_out}),
        table=_table(numbers),
        note=(
            f"The mean changes less than the product, so it is clipped later; ε is "
            f"{low:g} below and {high:g} above 1. Ratios are recorded after the step's last "
            f"update, with six digits."
        ),
        draw=partial(draw_ratio_bias, bias, numbers["by_length"]),
        size=(8.8, 3.6),
    )


def _numbers(bias: RatioBias) -> dict[str, Any]:
    gap, bound = log_gap(bias.length, bias.mean), log_bound(bias.length, bias.mean)
    some = np.isfinite(gap)
    differ = bias.mean_clipped != bias.product_clipped
    either = bias.mean_clipped | bias.product_clipped
    size = np.exp(np.minimum(gap[bias.length > 1], LARGEST))
    return {
        "units": len(bias.length),
        "one_token": float((bias.length == 1).mean()),
        "epsilon": {"low": bias.low, "high": bias.high},
        "gap": {
            "median": float(np.median(size)),
            "p95": float(np.quantile(size, 0.95)),
            "max": float(size.max()),
        },
        "above_bound": int((gap[some] > bound[some] + 1e-9).sum()),
        "mean_clipped": float(bias.mean_clipped.mean()),
        "product_clipped": float(bias.product_clipped.mean()),
        "decisions_differ": float(differ.mean()),
        "decisions_differ_where_either_clips": float(differ[either].mean())
        if either.any()
        else 0.0,
        "by_length": _by_length(bias),
    }


def _by_length(bias: RatioBias) -> list[dict[str, Any]]:
    found = []
    for first, last in BUCKETS:
        here = (bias.length >= first) & (bias.length <= last)
        if here.any():
            found.append(
                {
                    "from": first,
                    "to": min(last, int(bias.length.max())),
                    "units": int(here.sum()),
                    "mean_clipped": float(bias.mean_clipped[here].mean()),
                    "product_clipped": float(bias.product_clipped[here].mean()),
                }
            )
    return found


def _table(numbers: dict[str, Any]) -> Table:
    gap = numbers["gap"]
    rows = (
        ("units of the ratio", f"{numbers['units']}"),
        ("  of them single tokens", f"{numbers['one_token']:.1%}"),
        ("gap |e^(Lμ) − e^μ| of the others, median", f"{gap['median']:.3g}"),
        ("  95 % are below", f"{gap['p95']:.3g}"),
        ("  largest", f"{gap['max']:.3g}"),
        ("gaps above the bound", f"{numbers['above_bound']}"),
        ("outside the clip range: mean", f"{numbers['mean_clipped']:.2%}"),
        ("outside the clip range: product", f"{numbers['product_clipped']:.2%}"),
        ("the two decide differently", f"{numbers['decisions_differ']:.2%}"),
    )
    return Table(("", "value"), rows)
