"""Plan a study: the runs it needs, as far as they are known from the finished ones."""

from collections.abc import Collection
from dataclasses import dataclass, field

from segcredit.config import Recipe, RecipeError
from segcredit_lab.study.definition import Scale, Study
from segcredit_lab.study.recipes import (
    arm_recipe,
    pretraining_of,
    seeded,
    shortened,
    warm_start_of,
)
from segcredit_lab.study.store import Kind, Store, StudyRun, read_measurement

WARM, PRETRAINED_CRITIC = "start", "critic"
"""Names of shared starts, which belong to no arm."""


@dataclass(frozen=True)
class Options:
    """Options of ``segcredit study``."""

    seeds: tuple[int, ...] = ()
    """Empty: the study's seeds."""
    only: tuple[str, ...] = ()
    """Arms to run besides the reference; empty: all."""
    overrides: tuple[str, ...] = ()
    """Overrides for every run, key.path=value."""
    tune: bool = True
    optional: bool = False
    """Include optional arms."""


@dataclass(frozen=True)
class LearningRate:
    """A learning rate and its tuning results."""

    rate: float
    tried: dict[float, float] = field(default_factory=dict)
    """Mean result of each rate over the tuning seeds; empty: not tuned."""
    failed: tuple[float, ...] = ()
    """Rates at which a run failed."""

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest one tried."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


class StudyPlan:
    """The runs of one study at one scale."""

    def __init__(self, study: Study, scale: Scale, options: Options, store: Store) -> None:
        self.study, self.scale, self.options, self.store = study, scale, options, store
        self.seeds = options.seeds or tuple(study.seeds.get(scale.name) or scale.seeds)
        if shared := {*self.seeds} & {*scale.tuning_seeds} if self.tunes else set():
            raise RecipeError(
                f"seed {min(shared)} is used to tune learning rates: choose other seeds, or add "
                f"--no-tune."
            )
        self.arms = study.choose([*options.only], options.optional)
        self._recipes = {
            arm: arm_recipe(study, arm, scale, options.overrides)
            for arm in dict.fromkeys([*self.arms, study.reference])
        }
        self._known: dict[tuple[object, ...], StudyRun] = {}
        self._rates: dict[str, LearningRate] = {}

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned."""
        return self.options.tune and self.study.tune != "none" and len(self.scale.rates) > 1

    def runs(self, failed: Collection[str] = (), guess: bool = False) -> list[StudyRun]:
        """List the runs known to be needed, each once: starts, tuning, then seed by seed.

        ``failed`` holds digests of failed runs. With ``guess``, unknown learning rates are
        replaced by the recipe's, to count the runs.
        """
        found: list[StudyRun] = []
        for arm in dict.fromkeys(self._tuned_by(arm) for arm in self.arms):
            found += [run for runs in self.tuning(arm).values() for run in runs]
        rates = {arm: self.rate(arm, failed) for arm in self.arms}
        for seed in self.seeds:
            for arm, tuned in rates.items():
                if tuned is not None or guess:
                    rate = tuned.rate if tuned else self._recipes[arm].optimizer.lr
                    found.append(self.run(arm, seed, rate))
        starts = [start for run in found for start in run.starts]
        return list({run.digest: run for run in [*starts, *found]}.values())

    def early(self, failed: Collection[str] = ()) -> list[StudyRun]:
        """List the starts that can run before learning rates are tuned."""
        unknown = [arm for arm in self.arms if self.rate(arm, failed) is None]
        guessed = [
            self.run(arm, seed, self._recipes[arm].optimizer.lr)
            for seed in self.seeds
            for arm in unknown
        ]
        found = [start for run in guessed for start in run.starts]
        return list({start.digest: start for start in found}.values())

    def run(self, arm: str, seed: int, rate: float) -> StudyRun:
        """Return the run of an arm, seed and learning rate."""
        return self._plan(arm, "run", seed, rate)

    def tuning(self, arm: str) -> dict[float, list[StudyRun]]:
        """Return the runs that tune an arm's learning rate, by rate; empty if it is not tuned."""
        if not self.tunes:
            return {}
        lr = self._recipes[arm].optimizer.lr
        rates = [float(f"{lr * times:.3g}") for times in self.scale.rates]
        return {
            rate: [self._plan(arm, "tune", seed, rate) for seed in self.scale.tuning_seeds]
            for rate in rates
        }

    def rate(self, arm: str, failed: Collection[str] = ()) -> LearningRate | None:
        """Return the learning rate of an arm; None until it is tuned, or if every rate failed."""
        if not self.tunes:
            return LearningRate(self._recipes[arm].optimizer.lr)
        by = self._tuned_by(arm)
        found = self._rates.get(by) or self._find_rate(by, failed)
        if found is not None and not found.failed:
            self._rates[by] = found  # final: finished runs do not change
        return found

    def _find_rate(self, by: str, failed: Collection[str]) -> LearningRate | None:
        tried, lost = {}, []
        for rate, runs in self.tuning(by).items():
            if any(run.digest in failed for run in runs):
                lost.append(rate)
            elif all(self.store.finished(run) for run in runs):
                areas = [read_measurement(self.store.folder(run)).area for run in runs]
                tried[rate] = sum(areas) / len(areas)
            else:
                return None
        if not tried:
            return None
        best = max(tried, key=lambda rate: (tried[rate], -rate))
        return LearningRate(best, tried, tuple(lost))

    def recipe(self, arm: str) -> Recipe:
        """Return the recipe of an arm, including the stages of its start."""
        return self._recipes[arm]

    def _tuned_by(self, arm: str) -> str:
        return arm if self.study.tune == "each" else self.study.reference

    def _plan(self, arm: str, kind: Kind, seed: int, rate: float) -> StudyRun:
        key = (arm, kind, seed, rate)
        if key not in self._known:
            recipe = seeded(self._recipes[arm], seed, rate)
            if kind == "tune":
                recipe = shortened(recipe, self.scale.tuning_share)
            start: StudyRun | None = None
            for name, made in (
                (WARM, warm_start_of(recipe)),
                (PRETRAINED_CRITIC, pretraining_of(recipe)),
            ):
                start = start if made is None else StudyRun(name, "warm", made, start)
            self._known[key] = StudyRun(arm, kind, recipe, start)
        return self._known[key]
