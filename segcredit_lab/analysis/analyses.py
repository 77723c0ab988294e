"""All analyses of some runs, and one sentence for each that cannot be made."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from segcredit.report.page import Figure
from segcredit.runlog import Run
from segcredit_lab.analysis.compare import COMPARISONS, compare
from segcredit_lab.analysis.drawing import INK, svg
from segcredit_lab.analysis.lift import lift_of_critic
from segcredit_lab.analysis.ratio_bias import ratio_bias
from segcredit_lab.analysis.reading import (
    Analysis,
    CannotAnalyseError,
    Settings,
    Skipped,
    Step,
    read_steps,
    run_name,
)
from segcredit_lab.analysis.segments import segment_shapes, within_segments

OF_A_RUN = ("lift", "lift_probe", "ratio_bias", "segments", "within")
NAMES = (*OF_A_RUN, *(what.name for what in COMPARISONS))


@dataclass(frozen=True)
class Analysed:
    """What was found, and what was not."""

    done: list[Analysis]
    skipped: list[Skipped]


def analyses(runs: Sequence[Run], settings: Settings | None = None) -> list[Analysis]:
    """Every analysis that can be made: of each run in turn, then of all of them together."""
    return analyse(runs, settings).done


def analyse(
    runs: Sequence[Run],
    settings: Settings | None = None,
    only: Collection[str] = (),
    watch: Callable[[str], None] = lambda what: None,
) -> Analysed:
    """The same, with the reasons why others cannot be made.

    Args:
        only: names of analyses; none: all.
        watch: told what is being done.
    """
    chosen = settings or Settings()
    check_names(only)
    wanted = {*(only or NAMES)} - ({"lift_probe"} if not chosen.probe and not only else set())
    found = Analysed([], [])
    names = run_names(runs)
    for run, name in zip(runs, names, strict=True):
        if wanted & {*OF_A_RUN}:
            watch(f"reading {name}")
            _of_a_run(found, run, name, wanted, chosen, watch)
    for what in COMPARISONS:
        if what.name in wanted and runs:
            watch(what.title)
            make = partial(compare, what, runs, names, chosen)
            _add(found, what.name, ", ".join(names), make)
    return found


def _of_a_run(
    found: Analysed,
    run: Run,
    name: str,
    wanted: Collection[str],
    settings: Settings,
    watch: Callable[[str], None],
) -> None:
    try:
        whole = read_steps(run, settings)
    except CannotAnalyseError as reason:
        found.skipped.extend(Skipped(x, name, str(reason)) for x in OF_A_RUN if x in wanted)
        return
    steps = [step.without_holes() for step in whole]
    makers: dict[str, Callable[[], Analysis]] = {
        "lift": lambda: lift_of_critic(run, name, steps, settings),
        "lift_probe": lambda: _probe(run, name, whole, settings),
        "ratio_bias": lambda: ratio_bias(run, name, steps),
        "segments": lambda: segment_shapes(name, steps),
        "within": lambda: within_segments(run, name, steps, settings),
    }
    for what, make in makers.items():
        if what in wanted:
            watch(f"{what} of {name}")
            _add(found, what, name, make)


def _probe(run: Run, name: str, steps: Sequence[Step], settings: Settings) -> Analysis:
    from segcredit_lab.analysis.probe import lift_of_probe

    return lift_of_probe(run, name, steps, settings)


def _add(found: Analysed, what: str, run: str, make: Callable[[], Analysis]) -> None:
    try:
        found.done.append(make())
    except CannotAnalyseError as reason:
        found.skipped.append(Skipped(what, run, str(reason)))


def check_names(names: Collection[str]) -> None:
    """Raise ValueError at a name that no analysis has."""
    for name in names:
        if name not in NAMES:
            near = get_close_matches(name, NAMES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"there is no analysis {name!r}; there are {', '.join(NAMES)}.{hint}")


def run_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run, with a number where two folders are called the same."""
    seen: dict[str, int] = {}
    names = []
    for run in runs:
        name = run_name(run)
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def report_figures(runs: Sequence[Run]) -> list[Figure]:
    """Draw the analyses for the report page, from a part of the responses to keep it fast."""
    settings = Settings(resamples=300, steps=40, responses=64)
    names = [name for name in OF_A_RUN if name != "lift_probe"]  # lift_probe loads a model
    try:
        found = analyse(runs, settings, names).done
    except (ValueError, RecursionError):  # a run that cannot be analyzed still has a report
        return []
    return [Figure(x.heading, x.note, svg(x).replace(INK, "currentColor")) for x in found]
