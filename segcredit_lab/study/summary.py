"""Summary of a study: measurements of each arm over seeds, compared with the reference."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from segcredit_lab.analysis.compare import t_interval
from segcredit_lab.study.definition import LargestArea, RateRule, Study
from segcredit_lab.study.recipes import pretrains
from segcredit_lab.study.store import (
    LearningRate,
    Measurement,
    StudyPlan,
    StudyRun,
    read_measurement,
)

EQUAL = 0.05
"""Relative difference up to which budgets count as equal."""


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds with its 95 % confidence interval (Student's t); NaN if undefined."""

    mean: float
    low: float
    high: float
    num: int


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean over seeds; values that are not finite are left out."""
    known = [x for x in values if math.isfinite(x)]
    if not known:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean, ends = t_interval(np.array(known, dtype=np.float64)[:, None])
    return Estimate(float(mean[0]), float(ends[0, 0]), float(ends[1, 0]), len(known))


def paired(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate:
    """Compute the paired difference to the reference, over the seeds that both have."""
    return estimate([values[seed] - reference[seed] for seed in values if seed in reference])


@dataclass(frozen=True)
class ArmSummary:
    """One arm and its finished runs by seed."""

    name: str
    label: str
    tuned: LearningRate | None
    """Learning rate and its tuning results; None: not known yet."""
    runs: dict[int, Measurement]
    folders: dict[int, Path]
    missing: tuple[int, ...]
    """Seeds whose run is not finished."""

    def of(self, read: Callable[[Measurement], float]) -> Estimate:
        """Estimate one measurement over seeds."""
        return estimate([read(run) for run in self.runs.values()])

    def against(self, other: "ArmSummary", read: Callable[[Measurement], float]) -> Estimate:
        """Compute the paired difference of one measurement to another arm."""
        return paired(
            {seed: read(run) for seed, run in self.runs.items()},
            {seed: read(run) for seed, run in other.runs.items()},
        )


@dataclass(frozen=True)
class Summary:
    """All results of a study."""

    study: Study
    scale: str
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    measure_tuned: bool
    arms: tuple[ArmSummary, ...]
    failed: dict[str, str]
    """Name of a failed run → reason."""
    rule: RateRule = field(default_factory=LargestArea)
    """Rule that chose the learning rates."""

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the test sets; empty if there is only one."""
        runs = [run for arm in self.arms for run in arm.runs.values()]
        return tuple(dict.fromkeys(name for run in runs for name in run.by_set))

    def of_set(self, name: str) -> "Summary":
        """Return the summary with the accuracies of one test set."""
        arms = tuple(
            replace(arm, runs={seed: run.of_set(name) for seed, run in arm.runs.items()})
            for arm in self.arms
        )
        return replace(self, arms=arms)

    @property
    def reference(self) -> ArmSummary:
        return next(arm for arm in self.arms if arm.name == self.study.reference)

    @property
    def measure(self) -> str:
        """Name of the measure: "accuracy", or "reward" if correctness is not reported."""
        found = {run.measure for arm in self.arms for run in arm.runs.values()} or {"accuracy"}
        return " or ".join(sorted(found))

    @property
    def scale_of_measure(self) -> str:
        """Label of the axis; all values are plotted times 100."""
        if self.measure == "accuracy":
            return "held-out accuracy (%)"
        return f"100 × held-out {self.measure}"

    @property
    def complete(self) -> bool:
        return not any(arm.missing for arm in self.arms)

    @property
    def done(self) -> tuple[ArmSummary, ...]:
        """Arms with at least one finished run."""
        return tuple(arm for arm in self.arms if arm.runs)

    def budget(self, arm: ArmSummary) -> float:
        """Return the number of tokens that an arm sampled, divided by the reference arm's."""
        own, its = (x.of(lambda run: run.tokens).mean for x in (arm, self.reference))
        return own / its if its else math.nan

    def unequal(self) -> list[ArmSummary]:
        """Return the arms that sampled more or fewer tokens than the reference arm."""
        return [arm for arm in self.done if not abs(self.budget(arm) - 1) <= EQUAL]


def _critic(plan: StudyPlan, run: StudyRun) -> Path | None:
    """Return the folder of the separate run that pretrained the critic, if any."""
    start = run.start
    return None if start is None or not pretrains(start.whole) else plan.store.folder(start)


def _in_steps(found: Measurement, rounds: int) -> Measurement:
    """Convert rounds of several steps to steps, so that the curves of all arms share an axis."""
    return replace(found, steps=tuple(rounds * step for step in found.steps))


def summarize(plan: StudyPlan, failed: Mapping[str, str] | None = None) -> Summary:
    """Summarize the finished runs of a study; ``failed`` maps digests to reasons."""
    failed = failed or {}
    arms, names = [], {}
    for run in plan.runs(failed):
        if run.digest in failed:
            names[run.name] = failed[run.digest]
    for arm in plan.arms:
        tuned = plan.rate(arm, failed)
        found: dict[int, StudyRun] = {}
        if tuned is not None:
            runs = {seed: plan.run(arm, seed, tuned.rate) for seed in plan.seeds}
            found = {seed: run for seed, run in runs.items() if plan.store.finished(run)}
        folders = {seed: plan.store.folder(run) for seed, run in found.items()}
        arms.append(
            ArmSummary(
                arm,
                plan.study.label(arm),
                tuned,
                {
                    seed: _in_steps(
                        read_measurement(x, _critic(plan, found[seed])), plan.study.arms[arm].rounds
                    )
                    for seed, x in folders.items()
                },
                folders,
                tuple(seed for seed in plan.seeds if seed not in found),
            )
        )
    return Summary(
        study=plan.study,
        scale=plan.scale.name,
        seeds=plan.seeds,
        overrides=plan.options.overrides,
        measure_tuned=plan.tunes,
        arms=tuple(arms),
        failed=names,
        rule=plan.scale.rule,
    )
