"""Whether a number rises over training: smoothing, Spearman's ρ, and the slope of a line."""

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
    CannotAnalyseError,
    Settings,
    Table,
    interval_text,
    plain,
)
from segcredit_lab.analysis.statistics import smooth

STAGE = "optimize"
LARGEST = 1e150
"""Larger numbers are drawn as a gap in the curve: their squares would be infinite."""
ENDS = 0.1
"""Of a curve, the first and last share that the table averages."""
FLUCTUATION = (
    "First and last: means of that share of the steps. Fluctuation: deviation from the smooth "
    "curve in the second half."
)
T_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""Student's t: its 97.5 % quantile at 1, 2, …, 30 degrees of freedom."""


@dataclass(frozen=True)
class Comparison:
    """One metric of all runs."""

    name: str
    key: str
    title: str
    label: str
    """Of the axis, with the unit."""
    note: str


COMPARISONS = (
    Comparison(
        "value_loss",
        "value_loss",
        "Value loss",
        "value loss (squared error of V)",
        "Losses of different methods are not on one scale: targets, factors and clips differ, and "
        "a smaller λ makes targets that are easier to hit. Which critic knows more, "
        "explained_variance tells.",
    ),
    Comparison(
        "entropy",
        "entropy",
        "Entropy",
        "entropy (nats per token)",
        "Mean H of π_old over the step's tokens. Near 0 there is nothing left to explore.",
    ),
    Comparison(
        "length",
        "response_length",
        "Response length",
        "response length (tokens)",
        "Mean over the step's responses, cut off at the run's limit.",
    ),
)


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, with different seeds."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Curve:
    """One group's metric."""

    label: str
    runs: tuple[str, ...]
    """Where they lie."""
    step: Float[np.ndarray, " S"]
    """Counted from the first step of optimisation, since warm starts differ."""
    each: Float[np.ndarray, "R S"]
    """As measured, one row per run."""
    mean: Float[np.ndarray, " S"]
    """Over runs, each smoothed first."""
    interval: Float[np.ndarray, "2 S"]
    """Student's t over seeds; NaN for a single run."""

    @property
    def num_runs(self) -> int:
        return len(self.runs)


def group_runs(runs: Sequence[Run], names: Sequence[str]) -> list[Group]:
    """Runs whose configs differ only in seed, name and segcredit's version; one run per seed."""
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
    """The runs that have the metric, up to where the shortest ends; None if none has."""
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
    """The mean over rows and its 95 % interval by Student's t; NaN for a single row."""
    mean = x.mean(axis=0)
    if len(x) == 1:
        return mean, np.full((2, x.shape[1]), np.nan)
    error = t_quantile(len(x) - 1) * x.std(axis=0, ddof=1) / np.sqrt(len(x))
    return mean, np.stack([mean - error, mean + error])


def t_quantile(freedom: int) -> float:
    """97.5 % of Student's t; beyond 30 degrees of freedom by Cornish and Fisher's expansion."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def fluctuation(curve: Curve, window: int) -> float:
    """How unsteady a curve is in its second half: deviation from its smooth self, over runs."""
    off = np.stack([x - smooth(x, window) for x in curve.each])[:, curve.each.shape[1] // 2 :]
    return float(np.sqrt(np.nanmean(off**2))) if np.isfinite(off).any() else float("nan")


def compare(
    what: Comparison, runs: Sequence[Run], names: Sequence[str], settings: Settings
) -> Analysis:
    """One metric of all the runs that have it."""
    made = [curve_of(group, what.key, settings.window) for group in group_runs(runs, names)]
    curves = [curve for curve in made if curve is not None]
    if not curves:
        raise CannotAnalyseError(f"no run has measured {what.key} while it was optimised.")
    averaged = any(curve.num_runs > 1 for curve in curves)
    means = (
        " Runs that differ in seed and name alone are averaged; the interval is Student's t over "
        "seeds, 95 %."
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


def _numbers(what: Comparison, curves: list[Curve], settings: Settings) -> dict[str, Any]:
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
    """Of each row, over what is finite."""
    known = np.isfinite(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (np.where(known, x, 0.0).sum(axis=1) / known.sum(axis=1))[:, None]
