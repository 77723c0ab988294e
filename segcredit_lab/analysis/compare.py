"""Compare one metric of several runs over training, averaged over seeds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Float

from segcredit.printable import number_text, printable
from segcredit.runlog import Run
from segcredit.runlog.reader import step_in
from segcredit_lab.analysis.drawing import draw_compared
from segcredit_lab.analysis.reading import (
    Analysis,
    AnalysisSettings,
    CannotAnalyzeError,
    Table,
    interval_text,
    plain,
    smooth,
)

STAGE = "optimize"
LARGEST = 1e150
"""Larger numbers are a gap in the curve, since their squares overflow."""
ENDS = 0.1
"""Share of steps at each end of a curve that the table averages."""
FLUCTUATION = (
    "First and last: means over that share of the steps. Fluctuation: RMS deviation from the "
    "smoothed curve in the second half."
)
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""97.5 % quantile of Student's t at 1, 2, …, 30 degrees of freedom."""


@dataclass(frozen=True)
class Comparison:
    """One metric to compare."""

    name: str
    key: str
    title: str
    label: str
    """Axis label with unit."""
    note: str


COMPARISONS = (
    Comparison(
        "value_loss",
        "value_loss",
        "Value loss",
        "value loss (squared error of V)",
        "Losses of different methods are not comparable: targets, factors and clips differ, and a "
        "smaller λ makes targets easier. Compare critics by explained_variance.",
    ),
    Comparison(
        "entropy",
        "entropy",
        "Entropy",
        "entropy (nats per token)",
        "Mean H of π_old over the step's tokens. Near 0 the policy no longer explores.",
    ),
    Comparison(
        "length",
        "response_length",
        "Response length",
        "response length (tokens)",
        "Mean over the step's responses, which are truncated at the run's limit.",
    ),
)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration with different seeds."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Curve:
    """One metric of a group of runs."""

    label: str
    runs: tuple[str, ...]
    """Paths of the runs."""
    step: Float[np.ndarray, " S"]
    """Steps from the start of optimization, since warm starts differ."""
    each: Float[np.ndarray, "R S"]
    """Recorded values, one row per run."""
    mean: Float[np.ndarray, " S"]
    """Mean over the smoothed runs."""
    interval: Float[np.ndarray, "2 S"]
    """95 % interval by Student's t over seeds; NaN for a single run."""

    @property
    def num_runs(self) -> int:
        return len(self.runs)


def group_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Group]:
    """Group runs whose configs differ only in seed, name and version; one run per seed."""
    found: dict[str, dict[str, tuple[Run, str]]] = {}
    for run, name in zip(runs, names, strict=True):
        rest = {key: x for key, x in run.config.items() if key not in ("seed", "name", "version")}
        key = json.dumps(rest, sort_keys=True, default=str)
        found.setdefault(key, {}).setdefault(json.dumps(run.config.get("seed")), (run, name))
    groups = [list(group.values()) for group in found.values()]
    methods = [_method(group[0][0]) for group in groups if len(group) > 1]
    made = []
    for group in groups:
        label = group[0][1]
        if len(group) > 1:
            method = _method(group[0][0])
            which = method if methods.count(method) == 1 else f"{method} ({label}, …)"
            label = f"{which}, {len(group)} seeds"
        made.append(Group(label, tuple(run for run, _ in group)))
    return made


def _method(run: Run) -> str:
    spec = run.config.get("algorithm")
    return printable(str(spec.get("name") if isinstance(spec, dict) else spec), 40)


def curve_of(group: Group, key: str, window: int) -> Curve | None:
    """Make the curve of runs with the metric, over their common steps; None if no run has it."""
    series = {str(run.path): x for run in group.runs if (x := _series(run, key))}
    shared = sorted(set.intersection(*({*x} for x in series.values()))) if series else []
    if not shared:
        return None
    each = np.array([[x[step] for step in shared] for x in series.values()])
    smoothed = np.stack([smooth(x, window) for x in each])
    step = np.array(shared, dtype=np.float64)
    mean, interval = t_interval(smoothed)
    return Curve(group.label, tuple(series), step, each, mean, interval)


def _series(run: Run, key: str) -> dict[int, float] | None:
    if key not in run.keys(STAGE):
        return None
    try:
        steps, values = run.series(key, STAGE)
    except ValueError:  # no line with this key has a step
        return None
    lines = [step_in(row) for row in run.metrics if row.get("stage") == STAGE]
    first = min(step for step in lines if step is not None)
    numbers = [x if abs(x) < LARGEST else np.nan for x in values]
    return {step - first + 1: x for step, x in zip(steps, numbers, strict=True)}


def t_interval(
    x: Float[np.ndarray, "R S"],
) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, "2 S"]]:
    """Compute the mean over rows and its 95 % interval by Student's t; NaN for a single row."""
    mean = x.mean(axis=0)
    if len(x) == 1:
        return mean, np.full((2, x.shape[1]), np.nan)
    error = t_quantile(len(x) - 1) * x.std(axis=0, ddof=1) / np.sqrt(len(x))
    return mean, np.stack([mean - error, mean + error])


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; above 30 degrees of freedom by Cornish–Fisher."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def fluctuation(curve: Curve, window: int) -> float:
    """Compute the RMS deviation from the smoothed curve over its second half, for all runs."""
    off = np.stack([x - smooth(x, window) for x in curve.each])[:, curve.each.shape[1] // 2 :]
    return float(np.sqrt(np.nanmean(off**2))) if np.isfinite(off).any() else float("nan")


def compare(
    what: Comparison, runs: Sequence[Run], names: Sequence[str], settings: AnalysisSettings
) -> Analysis:
    """Collect one metric of all the runs that have it."""
    made = [curve_of(group, what.key, settings.window) for group in group_runs(runs, names)]
    curves = [curve for curve in made if curve is not None]
    if not curves:
        raise CannotAnalyzeError(f"no run recorded {what.key} during optimization.")
    averaged = any(curve.num_runs > 1 for curve in curves)
    means = (
        " Runs that differ only in seed and name are averaged; the 95 % interval is Student's t "
        "over seeds."
        if averaged
        else ""
    )
    return Analysis(
        name=what.name,
        title=what.title,
        runs=tuple(names),
        numbers=plain(_numbers(what, curves, settings)),
        table=_table(curves, settings.window),
        note=f"{what.note}{means} {FLUCTUATION}",
        draw=partial(draw_compared, curves, what.label, settings.window),
        size=(6.4, 3.6),
        compares=True,
    )


def _numbers(what: Comparison, curves: list[Curve], settings: AnalysisSettings) -> dict[str, Any]:
    return {
        "metric": what.key,
        "window": settings.window,
        "interval": "95 %, Student's t over seeds, of the smoothed curves",
        "curves": [
            {
                "label": curve.label,
                "runs": list(curve.runs),
                "step": curve.step,
                "each": curve.each,
                "mean": curve.mean,
                "low": curve.interval[0],
                "high": curve.interval[1],
                "fluctuation": fluctuation(curve, settings.window),
            }
            for curve in curves
        ],
    }


def _table(curves: list[Curve], window: int) -> Table:
    rows = []
    for curve in curves:
        num = max(1, round(ENDS * len(curve.step)))
        first, last = (
            t_interval(_means(curve.each[:, part])) for part in (slice(0, num), slice(-num, None))
        )
        rows.append(
            (
                curve.label,
                str(curve.num_runs),
                number_text(float(first[0][0]), ".3g"),
                number_text(float(last[0][0]), ".3g"),
                interval_text(last[1][:, 0], ".3g"),
                number_text(fluctuation(curve, window), ".2g"),
            )
        )
    share = f"{ENDS:.0%}"
    columns = ("run", "seeds", f"first {share}", f"last {share}", "95 % interval", "fluctuation")
    return Table(columns, tuple(rows))


def _means(x: np.ndarray) -> np.ndarray:
    """Compute the mean of each row over finite values."""
    known = np.isfinite(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (np.where(known, x, 0.0).sum(axis=1) / known.sum(axis=1))[:, None]
