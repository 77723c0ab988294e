"""Keep the checkpoint with the best held-out result, and stop a run that no longer improves.

``evaluation.metric`` says which result counts, ``save.best`` keeps its checkpoint, and
``evaluation.patience`` ends the run. Evaluations before optimization do not count.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from segcredit.runlog import RunFolder
from segcredit.runlog.files import write_json_atomically
from segcredit.runlog.folder import step_name
from segcredit.runlog.reader import read_best
from segcredit.train import checkpoint

if TYPE_CHECKING:
    from segcredit.config import Recipe
    from segcredit.train.state import State


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, and the number of evaluations without a gain."""

    metric: str
    value: float
    step: int
    reference: float
    """Value of the last evaluation that gained at least ``evaluation.min_gain``."""
    waited: int = 0
    """Number of evaluations since then."""

    def after(self, value: float, step: int, min_gain: float) -> "Best":
        """Return the record after another evaluation."""
        gain = value - self.reference
        if gain > 0 and gain >= min_gain:
            found = replace(self, reference=value, waited=0)
        else:
            found = replace(self, waited=self.waited + 1)
        return replace(found, value=value, step=step) if value > self.value else found


def tracks_best(recipe: "Recipe") -> bool:
    """Whether a setting needs the best result."""
    return recipe.save.best or recipe.evaluation.patience is not None


def metric_of(state: "State", measured: Mapping[str, float]) -> str:
    """Return the name of the result that counts; raise ValueError if it was not measured."""
    asked = state.recipe.evaluation.metric
    if asked == "auto":
        return "sampled" if "sampled" in measured else "reward"
    if asked in measured:
        return asked
    raise ValueError(
        f"evaluation.metric: expected a result of the evaluations; got {asked}, which needs a "
        f"reward that says which responses are correct. Set evaluation.metric=reward"
    )


def after_evaluation(state: "State", measured: Mapping[str, float]) -> Best | None:
    """Return the record after an evaluation at the current step; every rank gets the same."""
    if not tracks_best(state.recipe):
        return None
    name, best = metric_of(state, measured), state.best
    value = float(state.parallel.share(measured[name]))
    if best is None or best.metric != name:
        return Best(name, value, state.step, value)
    return best.after(value, state.step, state.recipe.evaluation.min_gain)


def stops_early(state: "State") -> bool:
    """Whether the result did not improve in ``evaluation.patience`` evaluations."""
    patience, best = state.recipe.evaluation.patience, state.best
    return patience is not None and best is not None and best.waited >= patience


def stop_message(state: "State") -> str:
    """Say why the run stopped early, and how to continue it."""
    best, settings = state.best, state.recipe.evaluation
    assert best is not None
    least = f" of at least {settings.min_gain:g}" if settings.min_gain else ""
    return (
        f"Stopped early after step {state.step}: {best.waited} evaluations without an "
        f"improvement{least} in {best.metric}, whose best value is {best.value:.4g} at step "
        f"{best.step} (evaluation.patience={settings.patience})."
    )


def is_best(state: "State") -> bool:
    """Whether the checkpoint of this step is the one to keep."""
    best = state.best
    return state.recipe.save.best and best is not None and best.step == state.step


def restored(state: "State", folder: RunFolder, kept: Mapping[str, Any] | None) -> Best | None:
    """Return a checkpoint's record, as far as it is valid for the recipe and the run directory.

    A checkpoint without a record was saved while no setting needed it: then best.json counts.
    Without the checkpoint of the best step, the next evaluation is the best again.
    """
    if not tracks_best(state.recipe):
        return None
    if kept is None:
        recorded = read_best(folder)
        if recorded is None or recorded["step"] > state.step:
            return None
        kept = {**recorded, "reference": recorded["value"]}
    best = Best(**kept)
    known = ("sampled", "reward") if state.recipe.evaluation.metric == "auto" else ()
    if best.metric not in (state.recipe.evaluation.metric, *known):
        return None
    missing = not (folder.checkpoints / step_name(best.step)).is_dir()
    return replace(best, value=-math.inf) if state.recipe.save.best and missing else best


def as_saved(best: Best | None) -> dict[str, Any]:
    """Return the record for a checkpoint's state file; empty if no setting needs it."""
    return {} if best is None else {"best": asdict(best)}


def protected(state: "State", folder: RunFolder) -> set[str]:
    """Return the checkpoints that must not be deleted: the best one, and that of best.json."""
    recorded = read_best(folder)
    steps = [] if recorded is None else [int(recorded["step"])]
    if is_best(state):
        steps.append(state.step)
    return {step_name(step) for step in steps}


def record(state: "State", folder: RunFolder) -> None:
    """Write best.json once its checkpoint exists, and delete the previous best checkpoint.

    If the process is killed at any moment, best.json still names a complete checkpoint.
    """
    settings, best = state.recipe.save, state.best
    if not settings.best:
        return
    if best is None or best.value == -math.inf:
        # the result of another metric stays until the first evaluation by this one
        recorded = read_best(folder)
        if recorded and not (folder.checkpoints / step_name(int(recorded["step"]))).is_dir():
            folder.best.unlink()
    elif (folder.checkpoints / step_name(best.step)).is_dir():
        found = {"step": best.step, "metric": best.metric, "value": best.value}
        write_json_atomically(folder.best, found)
    checkpoint.prune(folder.checkpoints, settings.keep, protected(state, folder))
