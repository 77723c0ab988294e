"""The runs that a study needs, and their folders, addressed by a digest of the recipe."""

import hashlib
import json
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from segcredit.config import Recipe, RecipeError
from segcredit.runlog import Run, read_run
from segcredit.runlog.files import Lock, write_json_atomically
from segcredit.runlog.folder import CRITIC, POLICY, RunFolder, by_step, step_name
from segcredit.runlog.reader import as_number, step_in
from segcredit.runlog.storage import seal
from segcredit.train.checkpoint import mark_unsaved
from segcredit_lab.study.definition import Scale, Study
from segcredit_lab.study.recipes import (
    after,
    arm_recipe,
    pretraining_of,
    pretrains,
    seeded,
    shortened,
    warm_start_of,
)

FINISHED = "finished.json"
"""File in a run directory: all stages are done, and unneeded checkpoints are deleted."""
LETTERS = 10
"""Characters of the digest in a folder's name."""

ADDED_FIELDS: dict[tuple[str, str], object] = {
    ("model", "family"): None,
    ("data", "system"): None,
    ("rollout", "top_p"): 1.0,
    ("rollout", "stop"): [],
    ("rollout", "mismatch_over"): "token",
    ("rollout", "mismatch_mask"): False,
    ("rollout", "mismatch_floor"): None,
    ("rollout", "refills"): 0,
    ("rollout", "refill_by"): "auto",
    ("rollout", "ahead"): 0,
    ("rollout", "device"): None,
    ("update", "mask_truncated"): False,
    ("update", "entropy_coef"): 0.0,
    ("evaluation", "metric"): "auto",
    ("evaluation", "patience"): None,
    ("evaluation", "min_gain"): 0.0,
    ("save", "best"): False,
    ("data", "curriculum"): False,
}
"""Recipe fields that were added after the first studies, with their defaults. A digest leaves them
out at the default, so that runs made before are found again."""

Kind = Literal["warm", "tune", "run"]


@dataclass(frozen=True)
class StudyRun:
    """A run that a study needs, finished or not."""

    arm: str
    kind: Kind
    whole: Recipe
    """Recipe including the stages of its start, if that is a separate run."""
    start: "StudyRun | None" = None
    """Run whose final models it starts from: a warm start, with or without a pretrained critic."""

    @property
    def seed(self) -> int:
        return self.whole.seed

    @cached_property
    def digest(self) -> str:
        """Digest of the complete recipe and of its start, without the run's name and folder.

        It contains the method's repr, so a setting may be left out or set to its default.
        """
        recipe = self.recipe("start")
        # finished runs have the digest of the setting's earlier name
        method = repr(recipe.make_algorithm()).replace("normalize=", "normalise=")
        content = recipe.as_dict() | {"algorithm": method}
        content.pop("name")
        content["data"].pop("allow_outside")  # a permission, which does not change results
        for (section, key), default in ADDED_FIELDS.items():
            if content[section][key] == default:
                del content[section][key]
        text = json.dumps([content, self.start.digest if self.start else None], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]

    @property
    def name(self) -> str:
        """Name of the run directory."""
        what = self.arm if self.kind == "run" else f"{self.kind}-{self.arm}"
        return f"{what}-s{self.seed}-{self.digest}"

    @property
    def starts(self) -> "list[StudyRun]":
        """Return all runs that must finish before this one, in order."""
        return [] if self.start is None else [*self.start.starts, self.start]

    @property
    def steps(self) -> int:
        """Steps of this run, without those of its starting run."""
        return self.recipe("start").total_steps

    @property
    def keeps(self) -> tuple[str, ...]:
        """Parts of the last checkpoint to keep when the run is finished."""
        if self.kind == "tune":
            return ()
        return (POLICY, CRITIC) if self.kind == "warm" and pretrains(self.whole) else (POLICY,)

    def recipe(self, start: str) -> Recipe:
        """Return the recipe to train; it starts from checkpoint ``start`` if the run has one."""
        return self.whole if self.start is None else after(self.whole, self.start.whole, start)


class Store:
    """Folder with the runs of all studies."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    def folder(self, run: StudyRun) -> Path:
        """Return the folder of a run; another arm with the same digest may have named it."""
        return existing_folder(self.path / run.name)

    def finished(self, run: StudyRun) -> bool:
        """Whether a run is finished and cleaned up."""
        return is_finished(self.folder(run))

    def reopen(self, run: StudyRun) -> None:
        """Mark a run as unfinished because its model was deleted."""
        folder = RunFolder(self.folder(run))
        if folder.config.is_file():
            mark_unsaved(folder.checkpoints)
        (folder.path / FINISHED).unlink(missing_ok=True)  # another study may have finished it

    def note_failure(self, run: StudyRun, message: str) -> None:
        """Record why a run failed, for tables that are written later."""
        place = self._failure(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(place, {"message": message})

    def forget_failure(self, run: StudyRun) -> None:
        """Delete the record of a failure when the run is tried again."""
        self._failure(run).unlink(missing_ok=True)

    def failure(self, run: StudyRun) -> str | None:
        """Explain why the last attempt failed; None if it did not."""
        try:
            return str(json.loads(self._failure(run).read_bytes())["message"])
        except FileNotFoundError:
            return None

    def _failure(self, run: StudyRun) -> Path:
        """Return the path of the failure record; a run may fail before it has a run directory."""
        return self.path / ".failed" / f"{run.digest}.json"

    def recipe(self, run: StudyRun) -> Recipe:
        """Return the recipe to train, with the path of its starting run in this store."""
        start = run.start
        return run.recipe("" if start is None else str(self.last(start)))

    def last(self, run: StudyRun) -> Path:
        """Return the last checkpoint of a finished run."""
        return RunFolder(self.folder(run)).checkpoints / step_name(run.steps)

    def has_models(self, run: StudyRun) -> bool:
        """Whether the models that other runs start from still exist."""
        return all((self.last(run) / name).is_dir() for name in run.keeps)


def existing_folder(own: Path) -> Path:
    """Return this folder, or an existing one of another arm with the same digest."""
    if own.is_dir():
        return own
    digest = own.name.rpartition("-")[2]
    return next(iter(sorted(own.parent.glob(f"*-{digest}"))), own)


def claim(own: Path) -> Lock:
    """Lock a run for this process; raise LockedError if another process holds it.

    The trainer's own lock is released after training, before checkpoints are cleaned up.
    """
    place = own.parent / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    return Lock(place / own.name.rpartition("-")[2])


def record_of(folder: Path) -> dict[str, Any] | None:
    """Return the content of finished.json; None while the run is not finished."""
    try:
        found = json.loads((folder / FINISHED).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if isinstance(found, dict) else None


def is_finished(folder: Path) -> bool:
    """Whether a run is finished and cleaned up."""
    record = record_of(folder)
    return record is not None and record.get("cleared") is True


def finish(folder: Path, keep: Collection[str]) -> None:
    """Mark a run as finished and delete its checkpoints, except parts of the last one.

    ``keep`` names the files and folders to keep in the last checkpoint. Optimizer states and the
    reference model are most of a run's size. If the process is killed in between,
    the next call completes the cleanup.
    """
    if record_of(folder) is None:
        write_json_atomically(folder / FINISHED, {"cleared": False})
    steps = [path for _, path in by_step(RunFolder(folder).checkpoints)]
    last = steps[-1] if keep and steps else None
    for path in RunFolder(folder).checkpoints.iterdir():
        if path != last:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if last is not None:
        for path in last.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        seal(last)
    write_json_atomically(folder / FINISHED, {"cleared": True})


LAST = 5
"""Last batches of critic pretraining over which its explained variance is averaged."""
LAST_STEPS = 10
"""Last optimization steps over which the final training reward is averaged."""


@dataclass(frozen=True)
class Measurement:
    """Measurements of one run. Shares are in [0, 1]; missing values are NaN."""

    steps: tuple[int, ...]
    """Steps of the evaluations, counted from the first, which precedes optimization."""
    accuracy: tuple[float, ...]
    """Held-out accuracy or mean reward, as ``measure`` says."""
    area: float
    """Mean held-out accuracy (or reward) over the curve."""
    final: float
    """Last value of the curve."""
    tokens: float
    """Tokens sampled during optimization, including continuations and dynamic sampling's."""
    pretraining_tokens: float
    """Tokens sampled to pretrain the critic."""
    seconds: float
    """Time of optimization, without evaluations."""
    clip_fraction: float
    """Mean over the optimization steps, as the following fields."""
    explained_variance: float
    segment_length: float
    entropy: float
    response_length: float
    explained_before: float
    """Explained variance of the critic in the last batches of its pretraining."""
    measure: str = "accuracy"
    """Either "accuracy", or "reward" if the run's reward does not report correctness."""
    by_set: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Accuracy of every evaluation by test set; empty if there is only one."""
    training_reward: tuple[float, float] = (float("nan"), float("nan"))
    """Mean reward of training responses: over all optimization steps, and over the last ten."""

    def of_set(self, name: str) -> "Measurement":
        """Return the measurements with the curve of one test set; NaN if it has none."""
        curve = self.by_set.get(name, (float("nan"),) * len(self.steps))
        return replace(
            self, accuracy=curve, area=area_under(self.steps, curve), final=curve[-1], by_set={}
        )


def area_under(steps: Sequence[float], values: Sequence[float]) -> float:
    """Compute a curve's mean over the steps: its normalized area by the trapezoidal rule."""
    if len(values) == 0:
        return float("nan")
    width = steps[-1] - steps[0]
    if width <= 0:
        return float(values[-1])
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / width)


def measure(run: Run) -> Measurement:
    """Compute all measurements of a finished run."""
    evaluated = [
        row for row in run.metrics if row.get("stage") == "evaluation" and step_in(row) is not None
    ]
    known = any(ACCURACY in row for row in evaluated)
    key = ACCURACY if known else REWARD
    curve = [
        (step, as_number(row[key]))
        for row in evaluated
        if key in row and (step := step_in(row)) is not None
    ]
    if not curve:
        raise ValueError(
            f"{run.path} has no held-out accuracy: its data has no test prompts (data.test)."
        )
    sets = dict.fromkeys(
        name for row in evaluated for name in row if name.startswith(f"{ACCURACY}/")
    )
    first = curve[0][0]
    steps, accuracy = [step - first for step, _ in curve], [x for _, x in curve]
    trained = [row for row in run.metrics if row.get("stage") not in ("evaluation", "warm_start")]
    optimized = [row for row in trained if row.get("stage") != "pretrain_critic"]
    before = [row for row in trained if row.get("stage") == "pretrain_critic"]
    return Measurement(
        steps=tuple(steps),
        accuracy=tuple(accuracy),
        area=area_under(steps, accuracy),
        final=accuracy[-1],
        tokens=_tokens(optimized, run.config),
        pretraining_tokens=_pretraining_tokens(before, run.config),
        seconds=sum(x for row in optimized for key, x in row.items() if key.startswith("time/")),
        clip_fraction=_mean(optimized, "clip_fraction"),
        explained_variance=_mean(optimized, "explained_variance"),
        segment_length=_mean(optimized, "segment_length"),
        entropy=_mean(optimized, "entropy"),
        response_length=_mean(optimized, "response_length"),
        explained_before=_mean(before[-LAST:], "explained_variance"),
        measure="accuracy" if known else "reward",
        by_set={
            name.removeprefix(f"{ACCURACY}/"): tuple(
                as_number(row.get(name)) for row in evaluated if key in row
            )
            for name in sets
        },
        training_reward=(_mean(optimized, "reward"), _mean(optimized[-LAST_STEPS:], "reward")),
    )


@lru_cache(maxsize=4096)
def read_measurement(folder: Path, critic: Path | None = None) -> Measurement:
    """Return the measurements of a finished run's directory, cached because it no longer changes.

    ``critic`` is the separate run that pretrained the critic, if any; its cost is NaN if that run
    is not finished.
    """
    found = measure(read_run(folder))
    if critic is None:
        return found
    if not is_finished(critic):
        return replace(found, pretraining_tokens=float("nan"))
    run = read_run(critic)
    before = [row for row in run.metrics if row.get("stage") == "pretrain_critic"]
    return replace(
        found,
        pretraining_tokens=_pretraining_tokens(before, run.config),
        explained_before=_mean(before[-LAST:], "explained_variance"),
    )


def _tokens(rows: Sequence[dict[str, Any]], config: dict[str, Any]) -> float:
    """Count the tokens sampled in some steps: responses, dynamic sampling's and continuations.

    With dynamic sampling, ``response_length`` is that of the step's first batch.
    """
    rollout = config.get("rollout") or {}
    drawn = rollout.get("prompts", 0) * rollout.get("samples", 0)
    length = sum(float(row.get("response_length", 0.0)) for row in rows)
    extra = ("refill/extra_tokens", "continuations/tokens")
    return length * drawn + sum(float(row.get(key, 0.0)) for row in rows for key in extra)


def _pretraining_tokens(rows: Sequence[dict[str, Any]], config: dict[str, Any]) -> float:
    """Count the tokens sampled for critic pretraining; its stages may set their own prompts."""
    rollout = config.get("rollout") or {}
    usual = rollout.get("prompts", 0)
    stages = [x for x in config.get("stages") or () if x.get("kind") == "pretrain_critic"]
    asked = chain(*(repeat(x.get("prompts") or usual, x["steps"]) for x in stages), repeat(usual))
    each = zip(rows, asked, strict=False)
    lengths = sum(float(row.get("response_length", 0.0)) * prompts for row, prompts in each)
    return lengths * rollout.get("samples", 0)


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else float("nan")


ACCURACY, REWARD = "sampled", "reward"
"""Metrics on held-out prompts: accuracy of sampled responses, or their mean reward if the reward
does not report correctness."""


WARM, PRETRAINED_CRITIC = "start", "critic"
"""Names of runs that other runs start from; they belong to no arm."""


@dataclass(frozen=True)
class Options:
    """Options of ``segcredit study``."""

    seeds: tuple[int, ...] = ()
    """Seeds to run; empty: those of the study."""
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
    losing: tuple[float, ...] = ()
    """Rates that the scale's rule excludes."""

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest one tried."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


class StudyPlan:
    """The runs of one study at one scale."""

    def __init__(self, study: Study, scale: Scale, options: Options, store: Store) -> None:
        study = study.at_scale(scale.name)
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
        """List the starting runs that can run before learning rates are tuned."""
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
        tried, lost = {}, []  # finished runs of each rate; rates with a failed run
        for rate, runs in self.tuning(by).items():
            if any(run.digest in failed for run in runs):
                lost.append(rate)
            elif all(self.store.finished(run) for run in runs):
                tried[rate] = [read_measurement(self.store.folder(run)) for run in runs]
            else:
                return None
        if not tried:
            return None
        rule = self.scale.rule
        areas = {rate: sum(x.area for x in found) / len(found) for rate, found in tried.items()}
        losing = tuple(rate for rate, found in tried.items() if any(map(rule.loses, found)))
        return LearningRate(rule.choose(tried), areas, tuple(lost), losing)

    def recipe(self, arm: str) -> Recipe:
        """Return the recipe of an arm, including the stages of its starting run."""
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
