"""Run all possible analyses of some runs; explain in one sentence why others cannot run."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from segcredit.printable import one_line
from segcredit.registry import nearest
from segcredit.report.page import Figure, Figures
from segcredit.runlog import Run
from segcredit_lab.analysis.compare import COMPARISONS, compare
from segcredit_lab.analysis.drawing import INK, svg
from segcredit_lab.analysis.lift import jumps_of_critic, lift_of_critic, trained_at_every_token
from segcredit_lab.analysis.probe import lift_of_probe
from segcredit_lab.analysis.ratio_bias import ratio_bias
from segcredit_lab.analysis.reading import (
    Analysis,
    AnalysisSettings,
    CannotAnalyzeError,
    SkippedAnalysis,
    Step,
    read_steps,
    require_columns,
    run_name,
)
from segcredit_lab.analysis.segments import segment_shapes, within_segments
from segcredit_lab.analysis.targets import target_variances


@dataclass(frozen=True)
class AnalysisKind:
    """An analysis of one run, and what it needs."""

    name: str
    columns: tuple[str, ...]
    """Columns that the recorded responses must have."""
    at_every_token: bool = False
    """Whether V must have a meaning at every token, not only at segment boundaries."""
    without_critic: str = ""
    """Alternative if the run has no critic, or a critic without values at every token."""


KINDS = (
    AnalysisKind(
        "lift", ("entropy", "value"), at_every_token=True, without_critic="Use a probe: --probe."
    ),
    AnalysisKind("lift_probe", ("entropy",)),
    AnalysisKind("ratio_bias", ("ratio",)),
    AnalysisKind("segments", ("segment",)),
    AnalysisKind("within", ("value", "segment")),
    AnalysisKind("jumps", ("entropy", "value"), at_every_token=True),
    AnalysisKind("targets", ("value",)),
)
OF_A_RUN = tuple(kind.name for kind in KINDS)
NOT_IN_REPORT = ("lift_probe", "jumps", "targets")
"""Analyses that a report leaves out: lift_probe loads a model, the others are for studies."""
NAMES = (*OF_A_RUN, *(what.name for what in COMPARISONS))


@dataclass(frozen=True)
class AnalysisResults:
    """Analyses that ran, and those that could not."""

    done: list[Analysis]
    skipped: list[SkippedAnalysis]


def analyses(runs: Sequence[Run], settings: AnalysisSettings | None = None) -> list[Analysis]:
    """Run every possible analysis: of each run, then of all runs together."""
    return analyze_runs(runs, settings).done


def analyze_runs(
    runs: Sequence[Run],
    settings: AnalysisSettings | None = None,
    only: Collection[str] = (),
    progress: Callable[[str], None] = lambda what: None,
    leave_out: Collection[str] = (),
) -> AnalysisResults:
    """Run the analyses, and report why others cannot be run.

    Args:
        runs: The runs.
        settings: Settings of the analyses.
        only: Names of analyses; if empty, all that are meaningful for the run. An analysis that is
            named here runs even if its note says that V has no meaning between boundaries.
        leave_out: Names of analyses that are neither run nor listed.
        progress: Called with a description of the current work.
    """
    chosen = settings or AnalysisSettings()
    check_names(only)
    wanted = {*(only or NAMES)} - {*leave_out}
    if not chosen.probe and not only:
        wanted -= {"lift_probe"}
    found = AnalysisResults([], [])
    names = run_names(runs)
    for run, name in zip(runs, names, strict=True):
        if wanted & {*OF_A_RUN}:
            progress(f"reading {name}")
            _of_a_run(found, run, name, wanted, chosen, progress, bool(only))
    for what in COMPARISONS:
        if what.name in wanted and runs:
            progress(what.title)
            make = partial(compare, what, runs, names, chosen)
            _add(found, what.name, ", ".join(names), make)
    return found


def _of_a_run(
    found: AnalysisResults,
    run: Run,
    name: str,
    wanted: Collection[str],
    settings: AnalysisSettings,
    progress: Callable[[str], None],
    by_name: bool,
) -> None:
    try:
        whole = read_steps(run, settings)
    except CannotAnalyzeError as reason:
        found.skipped.extend(SkippedAnalysis(x, name, str(reason)) for x in OF_A_RUN if x in wanted)
        return
    steps = [step.without_holes() for step in whole]
    makers: dict[str, Callable[[], Analysis]] = {
        "lift": lambda: lift_of_critic(run, name, steps, settings),
        "lift_probe": lambda: lift_of_probe(run, name, whole, settings),
        "ratio_bias": lambda: ratio_bias(run, name, steps),
        "segments": lambda: segment_shapes(name, steps),
        "within": lambda: within_segments(run, name, steps, settings),
        "jumps": lambda: jumps_of_critic(run, name, steps, settings),
        "targets": lambda: target_variances(run, name, steps, settings),
    }
    for kind in KINDS:
        if kind.name in wanted:
            progress(f"{kind.name} of {name}")
            check = partial(_require, kind, run, steps, by_name)
            _add(found, kind.name, name, makers[kind.name], check)


def _require(kind: AnalysisKind, run: Run, steps: Sequence[Step], by_name: bool) -> None:
    """Raise unless the run has what the analysis needs."""
    require_columns(steps, kind.columns, kind.without_critic)
    if kind.at_every_token and not by_name and not trained_at_every_token(run, steps):
        other = f" {kind.without_critic}" if kind.without_critic else ""
        raise CannotAnalyzeError(
            "the critic is trained only at segment boundaries, so V has no meaning between them."
            f"{other} Make it regardless: --only {kind.name}."
        )


def _add(
    found: AnalysisResults,
    what: str,
    run: str,
    make: Callable[[], Analysis],
    check: Callable[[], None] = lambda: None,
) -> None:
    try:
        check()
        found.done.append(make())
    except CannotAnalyzeError as reason:
        found.skipped.append(SkippedAnalysis(what, run, str(reason)))


def check_names(names: Collection[str]) -> None:
    """Raise ValueError for an unknown analysis."""
    for name in names:
        if name not in NAMES:
            hint = nearest(name, NAMES)
            raise ValueError(
                f"unknown analysis {name!r}; the analyses are {', '.join(NAMES)}.{hint}"
            )


def run_names(runs: Sequence[Run]) -> list[str]:
    """Name each run, with a number if two folders have the same name."""
    seen: dict[str, int] = {}
    names = []
    for run in runs:
        name = run_name(run)
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def report_figures(runs: Sequence[Run]) -> Figures:
    """Draw the analyses for the report page, from a part of the responses to keep it fast."""
    settings = AnalysisSettings(resamples=300, steps=40, responses=64)
    names = {*NOT_IN_REPORT, *(what.name for what in COMPARISONS)}
    try:
        found = analyze_runs(runs, settings, leave_out=names)
    except (ValueError, RecursionError) as error:  # such a run still has a report
        return Figures((), (f"no analysis: {one_line(str(error))}",))
    drawn = (Figure(x.heading, x.note, svg(x).replace(INK, "currentColor")) for x in found.done)
    return Figures(tuple(drawn), tuple(one_line(str(x)) for x in found.skipped))
