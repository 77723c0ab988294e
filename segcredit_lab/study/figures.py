"""Figures of a study, in the style of the analyses."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segcredit.printable import number_text, printable
from segcredit.runlog import read_run
from segcredit_lab.analysis import Analysis, AnalysisSettings, write
from segcredit_lab.analysis.compare import COMPARISONS, Curve, Group, curve_of, t_interval
from segcredit_lab.analysis.drawing import (
    COLORS,
    INK,
    REFERENCE,
    band,
    draw_compared,
    integer_steps,
    line_of,
)
from segcredit_lab.analysis.lift import SHOWN, lift_of_critic, trained_at_every_token
from segcredit_lab.analysis.probe import lift_of_probe
from segcredit_lab.analysis.reading import (
    CannotAnalyzeError,
    Table,
    plain,
    read_steps,
    with_interval,
)
from segcredit_lab.study.summary import ArmSummary, Estimate, Summary

MANY = 5
"""Maximum number of curves for which single runs and bands are drawn."""
Lifts = dict[str, dict[str, tuple[np.ndarray, np.ndarray, int]]]
"""Arm → stage of training → Lift(q), its interval over seeds, number of seeds."""


def draw_curves(curves: list[Curve], label: str, window: int, figure: Any) -> None:
    """Draw means, with bands and single runs if there are few curves."""
    shown = curves if len(curves) <= MANY else [_mean_alone(curve) for curve in curves]
    draw_compared(shown, label, window, figure)
    lowest = min(float(np.nanmin([*x.each.ravel(), *x.mean, 0.0])) for x in shown)
    if lowest < 0:
        figure.axes[0].set_ylim(bottom=1.05 * lowest)


def draw_panels(panels: dict[str, list[Curve]], label: str, figure: Any) -> None:
    """Draw the means of several sets of curves, one panel each."""
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for number, curve in enumerate(curves):
            line = line_of(number)
            if len(curves) <= MANY and curve.num_runs > 1:
                band(axis, curve.step, curve.interval, line["color"])
            axis.plot(curve.step, curve.mean, label=curve.label, marker=".", **line)
        axis.set_title(title)
        axis.set_xlabel("optimization step")
        integer_steps(axis)
    axes[0].set_ylabel(label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)


def _mean_alone(curve: Curve) -> Curve:
    return replace(curve, each=curve.each[:0], interval=np.full_like(curve.interval, np.nan))


def draw_differences(
    rows: list[tuple[str, Estimate, Estimate]], reference: str, measure: str, figure: Any
) -> None:
    """Draw a forest plot: differences with intervals; left of 0 the reference is better."""
    axis = figure.subplots()
    for place, (_, area, final) in enumerate(rows):
        for shift, found, color, marker in (
            (-0.14, area, COLORS[0], "o"),
            (0.14, final, COLORS[1], "D"),
        ):
            at = place + shift
            axis.plot([found.low, found.high], [at, at], color=color, linewidth=1.6)
            axis.plot(found.mean, at, marker, color=color, markersize=5)
    axis.axvline(0.0, **REFERENCE)
    axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(False, axis="y")
    # two lines, since a reference may have a long name
    unit = "points of" if measure == "accuracy" else "100 ×"
    axis.set_xlabel(f"{unit} held-out {measure} above\n{reference}, 95 % interval over seeds")
    for color, marker, label in (
        (COLORS[0], "o", "mean over the curve"),
        (COLORS[1], "D", "final"),
    ):
        axis.plot([], [], marker, color=color, linestyle="-", label=label)
    figure.legend(loc="outside lower left", ncols=2)


def draw_sweep(
    x: list[float],
    area: list[Estimate],
    final: list[Estimate],
    paper: dict[str, list[float]],
    label: str,
    measure: str,
    figure: Any,
) -> None:
    """Draw both measures with bands; the paper's numbers (another task) are a thin line."""
    axis = figure.subplots()
    for color, marker, name, found in (
        (COLORS[0], "o", "mean over the curve", area),
        (COLORS[1], "D", "final", final),
    ):
        ends = np.array([[e.low for e in found], [e.high for e in found]])
        band(axis, x, ends, color)
        axis.plot(x, [e.mean for e in found], color=color, marker=marker, ms=4, label=name)
    for name, numbers in paper.items():
        thin = {"color": INK, "linewidth": 1.0, "linestyle": ":", "marker": ".", "alpha": 0.7}
        axis.plot(x, numbers, label=f"paper: {name} (another task)", **thin)
    axis.set_xlabel(label)
    axis.set_ylabel(measure)
    figure.legend(loc="outside lower left", ncols=3)


def draw_lift_over_seeds(
    quantiles: np.ndarray,
    over: Lifts,
    figure: Any,
) -> None:
    """Draw one panel per arm with one line per stage of training and bands over seeds."""
    panels = figure.subplots(1, len(over), sharey=True, squeeze=False)[0]
    for axis, (label, stages) in zip(panels, over.items(), strict=True):
        for number, (stage, (mean, ends, _)) in enumerate(stages.items()):
            line = line_of(number)
            band(axis, quantiles, ends, line["color"])
            axis.plot(quantiles, mean, marker=".", label=stage, **line)
        axis.axhline(1.0, label="no association", **REFERENCE)
        axis.axvline(0.7, color=INK, linewidth=1.0, linestyle=":", label="k = 30 %")
        axis.set_title(label)
        axis.set_xlabel("entropy quantile q")
    panels[0].set_ylabel("Lift")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=5)


METRICS: dict[str, tuple[str, str, str]] = {
    **{x.name: (x.key, x.title, x.label) for x in COMPARISONS},
    "explained_variance": (
        "explained_variance",
        "Explained variance of the critic",
        "1 − Var(r − V) / Var(r)",
    ),
    "clip_fraction": ("clip_fraction", "Clipped", "share of clipped tokens"),
}
SIZE = (6.4, 3.9)
WINDOW = 5
"""Number of steps in the moving average."""


def figures(summary: Summary) -> tuple[list[Analysis], list[str]]:
    """Make the figures of a study; return them, and why others cannot be made."""
    made, lacking = [], []
    makers: dict[str, Callable[[Summary], Analysis]] = {
        "curves": learning_curves,
        "test_sets": curves_by_set,
        "differences": differences,
        "sweep": sweep,
        "lift": lift,
        **{name: partial(metric, name) for name in METRICS},
    }
    by_set = ["test_sets"] if summary.sets and "curves" in summary.study.figures else []
    for name in [*summary.study.figures, *by_set]:
        try:
            made.append(makers[name](summary))
        except CannotAnalyzeError as error:
            lacking.append(f"no figure {name}: {error}")
    return made, lacking


def learning_curves(summary: Summary) -> Analysis:
    """Make a figure of held-out accuracy over steps, with bands over seeds."""
    curves = [_accuracy(arm) for arm in _done(summary)]
    return _figure(
        "curves",
        f"{summary.study.title}: held-out {summary.measure}",
        summary,
        {"curves": [_numbers(curve) for curve in curves]},
        partial(draw_curves, curves, summary.scale_of_measure, 1),
        SIZE,
    )


def curves_by_set(summary: Summary) -> Analysis:
    """Make a figure of accuracy over steps with one panel per test set."""
    found = {
        printable(name, 60): [_accuracy(arm) for arm in _done(summary.of_set(name))]
        for name in summary.sets
    }
    return _figure(
        "test_sets",
        f"{summary.study.title}: held-out {summary.measure} by test set",
        summary,
        {name: [_numbers(curve) for curve in curves] for name, curves in found.items()},
        partial(draw_panels, found, summary.scale_of_measure),
        (4.6 * len(found) + 0.6, 4.2),
    )


def differences(summary: Summary) -> Analysis:
    """Make a figure of every arm's difference to the reference, for both measures."""
    others = [arm for arm in _done(summary) if arm.name != summary.study.reference]
    if not others or not summary.reference.runs:
        raise CannotAnalyzeError("fewer than two arms have finished runs.")
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
    """Make a figure of both measures over the swept setting, with the paper's numbers."""
    arms = [arm for arm in _done(summary) if summary.study.arms[arm.name].at is not None]
    if not arms:
        raise CannotAnalyzeError("no arm of the sweep has a finished run.")
    at = {arm.name: float(summary.study.arms[arm.name].at or 0.0) for arm in arms}
    arms.sort(key=lambda arm: at[arm.name])
    x = [at[arm.name] for arm in arms]
    area = [arm.of(lambda run: 100 * run.area) for arm in arms]
    final = [arm.of(lambda run: 100 * run.final) for arm in arms]
    paper = {
        name: [numbers.get(arm.name, np.nan) for arm in arms]
        for name, numbers in summary.study.paper_columns.items()
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
    """Make a figure of one metric of the runs over steps."""
    key, title, label = METRICS[name]
    found = []
    for arm in _done(summary):
        group = Group(arm.label, tuple(read_run(folder) for folder in arm.folders.values()))
        found.append(curve_of(group, key, WINDOW))
    curves = [curve for curve in found if curve is not None]
    if not curves:
        raise CannotAnalyzeError(f"no run recorded {key}.")
    return _figure(
        name,
        f"{summary.study.title}: {title.lower()}" if title not in summary.study.title else title,
        summary,
        {"metric": key, "window": WINDOW, "curves": [_numbers(curve) for curve in curves]},
        partial(draw_curves, curves, label, WINDOW),
        SIZE,
    )


def lift(summary: Summary) -> Analysis:
    """Make a figure of Lift, averaged over seeds: by the critic, or by a probe (``_lift_of``)."""
    found: dict[str, list[dict[str, Any]]] = {}
    reasons = []
    for arm in _done(summary):
        for folder in arm.folders.values():
            try:
                measured = _lift_of(folder)
            except CannotAnalyzeError as error:
                reasons.append(f"{folder.name}: {str(error).rstrip('.')}")
            else:
                found.setdefault(arm.label, []).append(measured)
    if not found:
        raise CannotAnalyzeError("; ".join(reasons[:3]) or "no run is finished.")
    threshold = f"{AnalysisSettings().threshold:g}"
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
    """Make a table: Lift at the main quantiles, the source of V, how well V predicts rewards.

    A critic's R² is computed on the sampled responses, a probe's on held-out prompts.
    """
    places = [int(np.argmin(np.abs(quantiles - q))) for q in SHOWN]
    rows = []
    for label, stages in over.items():
        for stage, (mean, ends, num) in stages.items():
            cells = [with_interval(mean[at], ends[:, at]) for at in places]
            fit = number_text(float(np.nanmean(r_squared[label])), ".2f")
            rows.append((f"{label}, {stage}", str(num), by[label], fit, *cells))
    columns = ("", "seeds", "V", "R² of V", *(f"Lift, q = {q:g}" for q in SHOWN))
    return Table(columns, tuple(rows))


def _lift_of(folder: Path) -> dict[str, Any]:
    """Return one run's Lift and the share of reward variance that V explains; cached on disk.

    V is the critic's if it is trained at every token, else a probe's.
    """
    place, settings = folder / "analysis", AnalysisSettings(probe=True)
    for name, part in (("lift", "critic"), ("lift_probe", "probe")):
        kept = place / f"{name}.json"
        if kept.is_file():
            numbers: dict[str, Any] = json.loads(kept.read_bytes())["numbers"]
            whole = numbers.get("resamples") == settings.resamples
            if part in numbers and whole and numbers[part].get("at_every_token", True):
                fit = numbers[part]["r_squared"]
                return {**numbers, "by": part, "r_squared": float("nan") if fit is None else fit}
    run = read_run(folder)
    steps = read_steps(run, settings)
    by = lift_of_critic if trained_at_every_token(run, steps) else lift_of_probe
    write(by(run, folder.name, steps, settings), place)
    return _lift_of(folder)


def _done(summary: Summary) -> list[ArmSummary]:
    done = list(summary.done)
    if not done:
        raise CannotAnalyzeError("no run is finished.")
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
