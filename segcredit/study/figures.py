"""A study's figures: learning curves, paired differences, a sweep, metrics of the runs, Lift."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segcredit.analysis import Analysis, Settings, write
from segcredit.analysis.compare import COMPARISONS, Curve, Group, curve_of, t_interval
from segcredit.analysis.lift_curves import SHOWN
from segcredit.analysis.result import (
    CannotAnalyseError,
    Table,
    interval_text,
    plain,
)
from segcredit.printable import number_text
from segcredit.runlog import read_run
from segcredit.study.drawing import (
    Lifts,
    draw_curves,
    draw_differences,
    draw_lift_over_seeds,
    draw_sweep,
)
from segcredit.study.summary import ArmSummary, Estimate, Summary

METRICS: dict[str, tuple[str, str, str]] = {
    **{x.name: (x.key, x.title, x.label) for x in COMPARISONS},
    "explained_variance": (
        "explained_variance",
        "Explained variance of the critic",
        "1 − Var(r − V) / Var(r)",
    ),
    "clip_fraction": ("clip_fraction", "Clipped", "share of tokens that the clip stops"),
}
SIZE = (6.4, 3.9)
WINDOW = 5
"""Steps that are averaged into a smooth curve."""


def figures(summary: Summary, watch: Callable[[str], None]) -> tuple[list[Analysis], list[str]]:
    """Those that the study asks for and its runs allow; and why not, for the others."""
    made, lacking = [], []
    makers: dict[str, Callable[[Summary], Analysis]] = {
        "curves": learning_curves,
        "differences": differences,
        "sweep": sweep,
        "lift": lift,
        **{name: partial(metric, name) for name in METRICS},
    }
    for name in summary.study.figures:
        watch(name)
        try:
            made.append(makers[name](summary))
        except CannotAnalyseError as error:
            lacking.append(f"no figure {name}: {error}")
    return made, lacking


def learning_curves(summary: Summary) -> Analysis:
    """Held-out accuracy against the step, with bands over seeds."""
    curves = [_accuracy(arm) for arm in _done(summary)]
    return _figure(
        "curves",
        f"{summary.study.title}: held-out {summary.measure}",
        summary,
        {"curves": [_numbers(curve) for curve in curves]},
        partial(draw_curves, curves, summary.scale_of_measure, 1),
        SIZE,
    )


def differences(summary: Summary) -> Analysis:
    """Every arm's difference to the reference, of both measures."""
    others = [arm for arm in _done(summary) if arm.name != summary.study.reference]
    if not others or not summary.reference.runs:
        raise CannotAnalyseError("there are no two arms with finished runs to compare.")
    rows: list[tuple[str, Estimate, Estimate]] = [
        (
            arm.label,
            arm.against(summary.reference, lambda run: 100 * run.area),
            arm.against(summary.reference, lambda run: 100 * run.final),
        )
        for arm in others
    ]
    return _figure(
        "differences",
        f"{summary.study.title}: differences, paired by seed",
        summary,
        {"differences": {label: [vars(area), vars(final)] for label, area, final in rows}},
        partial(draw_differences, rows, summary.reference.label, summary.measure),
        (6.8, 1.5 + 0.45 * len(rows)),
    )


def sweep(summary: Summary) -> Analysis:
    """Both measures against where the arms stand on the axis, and the paper's numbers."""
    arms = [arm for arm in _done(summary) if summary.study.arms[arm.name].at is not None]
    if not arms:
        raise CannotAnalyseError("no arm of the sweep has a finished run.")
    at = {arm.name: float(summary.study.arms[arm.name].at or 0.0) for arm in arms}
    arms.sort(key=lambda arm: at[arm.name])
    x = [at[arm.name] for arm in arms]
    area = [arm.of(lambda run: 100 * run.area) for arm in arms]
    final = [arm.of(lambda run: 100 * run.final) for arm in arms]
    published = summary.study.published
    paper = {
        name: [numbers.get(arm.name, np.nan) for arm in arms]
        for name, numbers in (published.columns if published else {}).items()
    }
    return _figure(
        "sweep",
        summary.study.title,
        summary,
        {"at": x, "area": [vars(e) for e in area], "final": [vars(e) for e in final]},
        partial(draw_sweep, x, area, final, paper, summary.study.axis, summary.scale_of_measure),
        SIZE,
    )


def metric(name: str, summary: Summary) -> Analysis:
    """One of the runs' metrics against the step."""
    key, title, label = METRICS[name]
    found = []
    for arm in _done(summary):
        group = Group(arm.label, tuple(read_run(folder) for folder in arm.folders.values()))
        found.append(curve_of(group, key, WINDOW))
    curves = [curve for curve in found if curve is not None]
    if not curves:
        raise CannotAnalyseError(f"no run has recorded {key}.")
    return _figure(
        name,
        f"{summary.study.title}: {title.lower()}" if title not in summary.study.title else title,
        summary,
        {"metric": key, "window": WINDOW, "curves": [_numbers(curve) for curve in curves]},
        partial(draw_curves, curves, label, WINDOW),
        SIZE,
    )


def lift(summary: Summary) -> Analysis:
    """Lift of every run, averaged over seeds: by its critic, or by a probe (``_lift_of``)."""
    found: dict[str, list[dict[str, Any]]] = {}
    reasons = []
    for arm in _done(summary):
        for folder in arm.folders.values():
            try:
                measured = _lift_of(folder)
            except CannotAnalyseError as error:
                reasons.append(f"{folder.name}: {str(error).rstrip('.')}")
            else:
                found.setdefault(arm.label, []).append(measured)
    if not found:
        raise CannotAnalyseError("; ".join(reasons[:3]) or "no run is finished.")
    threshold = f"{Settings().threshold:g}"
    quantiles = np.array(next(iter(found.values()))[0]["quantiles"])
    over: Lifts = {}
    for label, runs in found.items():
        stages = dict.fromkeys(stage for run in runs for stage in run["by_threshold"][threshold])
        for stage in stages:
            each = [run["by_threshold"][threshold].get(stage) for run in runs]
            rows = np.array([x["lift"] for x in each if x is not None], dtype=np.float64)
            over.setdefault(label, {})[stage] = (*t_interval(rows), len(rows))
    r_squared = {label: [run["r_squared"] for run in runs] for label, runs in found.items()}
    by = {label: runs[0]["by"] for label, runs in found.items()}
    numbers = {
        "quantiles": quantiles,
        "threshold": threshold,
        "by": by,
        "r_squared": r_squared,
        "lift": {
            label: {
                stage: {"mean": mean, "low": ends[0], "high": ends[1], "seeds": num}
                for stage, (mean, ends, num) in stages.items()
            }
            for label, stages in over.items()
        },
        "left_out": reasons,
    }
    drawn = _figure(
        "lift",
        summary.study.title,
        summary,
        numbers,
        partial(draw_lift_over_seeds, quantiles, over),
        (4.4 * len(over) + 0.6, 3.9),
    )
    return replace(drawn, table=_lift_table(quantiles, over, r_squared, by))


def _lift_table(
    quantiles: np.ndarray, over: Lifts, r_squared: dict[str, list[float]], by: dict[str, str]
) -> Table:
    """Lift at the quantiles one asks for first, whose V it is, and how well that predicts rewards.

    A critic's R² is of the responses as they were drawn, a probe's of prompts it was not fitted on.
    """
    places = [int(np.argmin(np.abs(quantiles - q))) for q in SHOWN]
    rows = []
    for label, stages in over.items():
        for stage, (mean, ends, num) in stages.items():
            cells = [
                f"{number_text(mean[at], '.2f')} ({interval_text(ends[:, at])})" for at in places
            ]
            fit = number_text(float(np.nanmean(r_squared[label])), ".2f")
            rows.append((f"{label}, {stage}", str(num), by[label], fit, *cells))
    columns = ("", "seeds", "V", "R² of V", *(f"Lift, q = {q:g}" for q in SHOWN))
    return Table(columns, tuple(rows))


def _lift_of(folder: Path) -> dict[str, Any]:
    """One run's Lift, and how much of the rewards' variance its V explains; measured once.

    V is the critic's where that learns at every token, else a probe's.
    """
    place, settings = folder / "analysis", Settings(probe=True)
    for name, part in (("lift", "critic"), ("lift_probe", "probe")):
        kept = place / f"{name}.json"
        if kept.is_file():
            numbers: dict[str, Any] = json.loads(kept.read_bytes())["numbers"]
            whole = numbers.get("resamples") == settings.resamples
            if part in numbers and whole and numbers[part].get("at_every_token", True):
                fit = numbers[part]["r_squared"]
                return {**numbers, "by": part, "r_squared": float("nan") if fit is None else fit}
    from segcredit.analysis.lift_curves import learns_everywhere, lift_of_critic
    from segcredit.analysis.probe import lift_of_probe
    from segcredit.analysis.reading import read_steps

    run = read_run(folder)
    steps = read_steps(run, settings)
    by = lift_of_critic if learns_everywhere(run, steps) else lift_of_probe
    write(by(run, folder.name, steps, settings), place)
    return _lift_of(folder)


def _done(summary: Summary) -> list[ArmSummary]:
    done = list(summary.done)
    if not done:
        raise CannotAnalyseError("no run is finished.")
    return done


def _accuracy(arm: ArmSummary) -> Curve:
    shared = sorted(set.intersection(*({*run.steps} for run in arm.runs.values())))
    each = 100 * np.array(
        [[run.accuracy[run.steps.index(step)] for step in shared] for run in arm.runs.values()],
        dtype=np.float64,
    )
    mean, interval = t_interval(each)
    names = tuple(folder.name for folder in arm.folders.values())
    return Curve(arm.label, names, np.array(shared, dtype=np.float64), each, mean, interval)


def _numbers(curve: Curve) -> dict[str, Any]:
    return {
        "label": curve.label,
        "step": curve.step,
        "each": curve.each,
        "mean": curve.mean,
        "low": curve.interval[0],
        "high": curve.interval[1],
    }


def _figure(
    name: str,
    title: str,
    summary: Summary,
    numbers: dict[str, Any],
    draw: Callable[[Any], None],
    size: tuple[float, float],
) -> Analysis:
    return Analysis(
        name=name,
        title=title,
        runs=(summary.study.name, summary.scale),
        numbers=plain(numbers),
        table=Table((), ()),
        note=summary.study.note,
        draw=draw,
        size=size,
        compares=True,
    )
