"""Lift by stage of training with its intervals, and its trend over the steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from segcredit.analysis.bootstrap import lift_over_responses, mean_over_steps, percentile_interval
from segcredit.analysis.drawing.lift import draw_lift
from segcredit.analysis.lift import Pool, lift, make_pool, stage_slices
from segcredit.analysis.method import method_of
from segcredit.analysis.reading import Step, require_column
from segcredit.analysis.result import (
    Analysis,
    CannotAnalyseError,
    Table,
    interval_text,
    plain,
)
from segcredit.analysis.segment_shapes import unit_lengths, unit_of
from segcredit.analysis.settings import QUANTILES, Settings
from segcredit.analysis.trend import slope, slope_over_steps, smooth, spearman
from segcredit.printable import number_text
from segcredit.runlog import Run

SHOWN = (0.7, 0.9, 0.95)
"""Quantiles that the table shows."""
BOUNDARY_CRITIC = (
    "This run's segments are longer than one token, and a critic that is trained at segment "
    "boundaries alone is arbitrary between them: ΔV inside segments, and so this Lift, has no "
    "meaning. Measure it with a value that is fitted at every token: --probe."
)
READING = (
    "Above 1, large jumps of V are commoner among tokens of high entropy than among all tokens; "
    "it is an association, and says nothing about causes."
)


@dataclass(frozen=True)
class StageCurve:
    """Lift(q) averaged over the steps of one stage, for every threshold d."""

    name: str
    num_steps: int
    lift: Float[np.ndarray, "D Q"]
    over_responses: Float[np.ndarray, "2 D Q"]
    over_steps: Float[np.ndarray, "2 D Q"]
    """NaN where the stage has one step only."""


@dataclass(frozen=True)
class LiftTrend:
    """The mean over q of each step's Lift, for the chosen threshold, against the step."""

    step: Float[np.ndarray, " S"]
    lift: Float[np.ndarray, " S"]
    smoothed: Float[np.ndarray, " S"]
    window: int
    spearman: float
    """Of the smoothed curve."""
    spearman_raw: float
    slope: float
    """Of the curve as measured, per step."""
    slope_over_responses: Float[np.ndarray, " 2"]
    slope_over_steps: Float[np.ndarray, " 2"]


@dataclass(frozen=True)
class LiftCurves:
    """All that is reported of Lift."""

    quantiles: Float[np.ndarray, " Q"]
    thresholds: Float[np.ndarray, " D"]
    """The chosen one first."""
    stages: tuple[StageCurve, ...]
    trend: LiftTrend
    cut: float | None
    """The quantile above which the run's method cuts segments, if it cuts by entropy."""


def measure(
    pools: Sequence[Pool], steps: Sequence[int], settings: Settings, cut: float | None = None
) -> LiftCurves:
    """Every curve and interval from the pools of the recorded steps, in order."""
    quantiles, thresholds = np.array(QUANTILES), np.array(settings.thresholds)
    points = np.stack([lift(pool, quantiles, thresholds) for pool in pools])
    drawn = lift_over_responses(pools, quantiles, thresholds, settings.resamples, settings.seed)
    stages = []
    for number, (name, part) in enumerate(stage_slices(len(pools)).items()):
        num = len(points[part])
        again = mean_over_steps(points[part], settings.resamples, settings.seed + number)
        interval = percentile_interval(again)
        stages.append(
            StageCurve(
                name,
                num,
                points[part].mean(axis=0),
                percentile_interval(drawn[part].mean(axis=0)),
                interval if num > 1 else np.full_like(interval, np.nan),
            )
        )
    trend = _trend(np.array(steps, dtype=np.float64), points[:, 0], drawn[:, :, 0], settings)
    return LiftCurves(quantiles, thresholds, tuple(stages), trend, cut)


def _trend(
    step: Float[np.ndarray, " S"],
    points: Float[np.ndarray, "S Q"],
    drawn: Float[np.ndarray, "S B Q"],
    settings: Settings,
) -> LiftTrend:
    mean, drawn_mean = points.mean(axis=1), drawn.mean(axis=2).T
    smoothed = smooth(mean, settings.window)
    once = np.ones_like(mean)
    return LiftTrend(
        step,
        mean,
        smoothed,
        settings.window,
        spearman(step, smoothed),
        spearman(step, mean),
        float(slope(step, mean, once)),
        percentile_interval(slope(step, drawn_mean, np.ones_like(drawn_mean))),
        percentile_interval(slope_over_steps(step, mean, settings.resamples, settings.seed)),
    )


def pools_of(steps: Sequence[Step]) -> tuple[list[Pool], list[int]]:
    """The pools of the steps that have one, and which they are."""
    made = [make_pool(x.owner, x.entropy, x.value, x.num_responses) for x in steps]
    kept = [(pool, x.step) for pool, x in zip(made, steps, strict=True) if len(pool.owner)]
    if not kept:
        raise CannotAnalyseError(
            "no recorded token has a finite entropy, and finite values before and after it."
        )
    return [pool for pool, _ in kept], [step for _, step in kept]


def lift_of_critic(run: Run, name: str, steps: Sequence[Step], settings: Settings) -> Analysis:
    """Lift with the values that the run's critic gave."""
    require_column(steps, "entropy", "the method did not ask for it.")
    require_column(steps, "value", "the method has no critic. A probe has: --probe.")
    everywhere = learns_everywhere(run, steps)
    note = READING if everywhere else f"{BOUNDARY_CRITIC} {READING}"
    more = {"critic": {"at_every_token": everywhere, "r_squared": _explained(steps)}}
    return lift_analysis("lift", "Lift", run, name, steps, settings, note, more)


def learns_everywhere(run: Run, steps: Sequence[Step]) -> bool:
    """Whether a critic was trained at every token: each is a unit, or the method says so."""
    if not any(np.isfinite(x.value).any() for x in steps):
        return False
    if not any((unit_lengths(unit_of(x.owner, x.segment)) > 1).any() for x in steps):
        return True
    try:
        return bool(getattr(method_of(run).critic, "everywhere", False))
    except CannotAnalyseError:
        return False


def _explained(steps: Sequence[Step]) -> float:
    """1 − Var(R − V) / Var(R) over all recorded tokens."""
    value = np.concatenate([x.value for x in steps])
    reward = np.concatenate([x.reward[x.owner] for x in steps])
    known = np.isfinite(value) & np.isfinite(reward)
    spread = np.var(reward[known]) if known.any() else 0.0
    return float(1 - np.var((reward - value)[known]) / spread) if spread else float("nan")


def lift_analysis(
    name: str,
    title: str,
    run: Run,
    run_name: str,
    steps: Sequence[Step],
    settings: Settings,
    note: str,
    more: dict[str, Any] | None = None,
) -> Analysis:
    """The analysis for whatever stands in the steps' values."""
    pools, numbers = pools_of(steps)
    curves = measure(pools, numbers, settings, cut_of(run))
    return Analysis(
        name=name,
        title=title,
        runs=(run_name,),
        numbers=plain({**(more or {}), **_numbers(curves, pools, settings)}),
        table=_table(curves),
        note=f"{note} {_trend_text(curves.trend)}",
        draw=partial(draw_lift, curves),
        size=(11.0, 3.7),
    )


def cut_of(run: Run) -> float | None:
    """1 − k of a method that cuts after the share k of the tokens with the largest entropy."""
    try:
        fraction = getattr(method_of(run).credit.over, "fraction", None)
    except CannotAnalyseError:
        return None
    return 1.0 - fraction if isinstance(fraction, float) else None


def _numbers(curves: LiftCurves, pools: Sequence[Pool], settings: Settings) -> dict[str, Any]:
    trend = curves.trend
    return {
        "quantiles": curves.quantiles,
        "resamples": settings.resamples,
        "by_threshold": {
            f"{d:g}": {
                stage.name: {
                    "steps": stage.num_steps,
                    "lift": stage.lift[number],
                    "over_responses": _ends(stage.over_responses[:, number]),
                    "over_steps": _ends(stage.over_steps[:, number]),
                }
                for stage in curves.stages
            }
            for number, d in enumerate(curves.thresholds)
        },
        "trend": {
            "threshold": curves.thresholds[0],
            "window": trend.window,
            "spearman": trend.spearman,
            "spearman_without_smoothing": trend.spearman_raw,
            "slope_per_step": trend.slope,
            "slope_over_responses": _ends(trend.slope_over_responses),
            "slope_over_steps": _ends(trend.slope_over_steps),
        },
        "per_step": {
            "step": trend.step,
            "mean_lift": trend.lift,
            "smoothed": trend.smoothed,
            "responses": [pool.num_responses for pool in pools],
            "tokens": [len(pool.owner) for pool in pools],
        },
        "tokens_left_out": sum(pool.left_out for pool in pools),
    }


def _ends(interval: np.ndarray) -> dict[str, Any]:
    return {"low": interval[0], "high": interval[1]}


def _trend_text(trend: LiftTrend) -> str:
    ends = interval_text(100 * trend.slope_over_responses, "+.3f")
    over_steps = interval_text(100 * trend.slope_over_steps, "+.3f")
    return (
        f"Trend of the mean over q: Spearman {number_text(trend.spearman, '+.2f')} smoothed, "
        f"{number_text(trend.spearman_raw, '+.2f')} as measured; "
        f"slope {number_text(100 * trend.slope, '+.3f')} per 100 steps, "
        f"95 % interval over responses {ends}, over steps {over_steps}."
    )


def _table(curves: LiftCurves) -> Table:
    shown = [QUANTILES.index(q) for q in SHOWN]
    rows = []
    for number, d in enumerate(curves.thresholds):
        for stage in curves.stages:
            cells = [
                f"{stage.lift[number, at]:.2f} "
                f"({interval_text(stage.over_responses[:, number, at])})"
                for at in shown
            ]
            label = f"d = {d:g}" if stage is curves.stages[0] else ""
            rows.append((label, stage.name, *cells))
    columns = ("", "stage", *(f"q = {q:g}" for q in SHOWN))
    return Table(columns, tuple(rows))
