"""The runs a study needs, as far as they are known: a function of what is in the store."""

from collections.abc import Collection
from dataclasses import dataclass, field

from segcredit.config import Recipe, RecipeError
from segcredit_lab.study.definition import Scale, Study
from segcredit_lab.study.measure import read_measured
from segcredit_lab.study.recipes import (
    arm_recipe,
    pretraining_of,
    seeded,
    shortened,
    warm_start_of,
)
from segcredit_lab.study.store import Kind, Planned, Store

WARM, PRETRAINED_CRITIC = "start", "critic"
"""What beginnings are called: they belong to no arm."""


@dataclass(frozen=True)
class Options:
    """What may be chosen about a study when it is run."""

    seeds: tuple[int, ...] = ()
    """None: the study's."""
    only: tuple[str, ...] = ()
    """Arms, beside the reference; none: all, optional ones if asked for."""
    overrides: tuple[str, ...] = ()
    """Settings of every run, key.path=value."""
    tune: bool = True
    optional: bool = False
    """Optional arms, too."""


@dataclass(frozen=True)
class Tuned:
    """A learning rate, and how it was found."""

    rate: float
    tried: dict[float, float] = field(default_factory=dict)
    """The measure at each rate, averaged over the tuning seeds; empty: not tuned."""
    failed: tuple[float, ...] = ()
    """Rates at which a run did not come to its end."""

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond those that were tried might have been better still."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


class Plan:
    """One study at one scale."""

    def __init__(self, study: Study, scale: Scale, options: Options, store: Store) -> None:
        self.study, self.scale, self.options, self.store = study, scale, options, store
        self.seeds = options.seeds or tuple(study.seeds.get(scale.name) or scale.seeds)
        if shared := {*self.seeds} & {*scale.tuning_seeds} if self.tunes else set():
            raise RecipeError(
                f"seed {min(shared)} is one of those that learning rates are tuned on: choose "
                f"others, or --no-tune."
            )
        self.arms = study.choose([*options.only], options.optional)
        self._recipes = {
            arm: arm_recipe(study, arm, scale, options.overrides)
            for arm in dict.fromkeys([*self.arms, study.reference])
        }
        self._known: dict[tuple[object, ...], Planned] = {}
        self._rates: dict[str, Tuned] = {}

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned."""
        return self.options.tune and self.study.tune != "none" and len(self.scale.rates) > 1

    def planned(self, failed: Collection[str] = (), guess: bool = False) -> list[Planned]:
        """All runs that are known to be needed, each once: starts, tuning, then seed by seed.

        ``failed`` are digests of runs that did not come to their end; ``guess`` the rates that
        are not known yet, to count the runs.
        """
        found: list[Planned] = []
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

    def early(self, failed: Collection[str] = ()) -> list[Planned]:
        """Beginnings for which nobody need wait until learning rates are tuned."""
        unknown = [arm for arm in self.arms if self.rate(arm, failed) is None]
        guessed = [
            self.run(arm, seed, self._recipes[arm].optimizer.lr)
            for seed in self.seeds
            for arm in unknown
        ]
        found = [start for run in guessed for start in run.starts]
        return list({start.digest: start for start in found}.values())

    def run(self, arm: str, seed: int, rate: float) -> Planned:
        """One run of the table."""
        return self._plan(arm, "run", seed, rate)

    def tuning(self, arm: str) -> dict[float, list[Planned]]:
        """The runs that choose an arm's learning rate, by rate; empty if it is not tuned."""
        if not self.tunes:
            return {}
        lr = self._recipes[arm].optimizer.lr
        rates = [float(f"{lr * times:.3g}") for times in self.scale.rates]
        return {
            rate: [self._plan(arm, "tune", seed, rate) for seed in self.scale.tuning_seeds]
            for rate in rates
        }

    def rate(self, arm: str, failed: Collection[str] = ()) -> Tuned | None:
        """The learning rate of an arm; None while it is being tuned, or if every rate failed."""
        if not self.tunes:
            return Tuned(self._recipes[arm].optimizer.lr)
        by = self._tuned_by(arm)
        found = self._rates.get(by) or self._find_rate(by, failed)
        if found is not None and not found.failed:
            self._rates[by] = found  # for good: runs that are through stay as they are
        return found

    def _find_rate(self, by: str, failed: Collection[str]) -> Tuned | None:
        tried, lost = {}, []
        for rate, runs in self.tuning(by).items():
            if any(run.digest in failed for run in runs):
                lost.append(rate)
            elif all(self.store.finished(run) for run in runs):
                areas = [read_measured(self.store.folder(run)).area for run in runs]
                tried[rate] = sum(areas) / len(areas)
            else:
                return None
        if not tried:
            return None
        best = max(tried, key=lambda rate: (tried[rate], -rate))
        return Tuned(best, tried, tuple(lost))

    def recipe(self, arm: str) -> Recipe:
        """Of an arm, with its beginnings."""
        return self._recipes[arm]

    def _tuned_by(self, arm: str) -> str:
        return arm if self.study.tune == "each" else self.study.reference

    def _plan(self, arm: str, kind: Kind, seed: int, rate: float) -> Planned:
        key = (arm, kind, seed, rate)
        if key not in self._known:
            recipe = seeded(self._recipes[arm], seed, rate)
            if kind == "tune":
                recipe = shortened(recipe, self.scale.tuning_share)
            start: Planned | None = None
            for name, made in (
                (WARM, warm_start_of(recipe)),
                (PRETRAINED_CRITIC, pretraining_of(recipe)),
            ):
                start = start if made is None else Planned(name, "warm", made, start)
            self._known[key] = Planned(arm, kind, recipe, start)
        return self._known[key]
