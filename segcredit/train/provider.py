"""Providers prepare, fill, update and save the columns of a run.

:class:`Provider` has a method for everything that a run does for a column. All are optional: a
provider overrides those that its column needs. ``segcredit/train/columns.py`` has the providers of
the built-in columns; a user's column (:class:`OwnColumn`) is its own provider. :class:`Providers`
calls all providers of a method in turn, so that the training step has no branch for any of them.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from segcredit.columns import Column
from segcredit.config import Recipe, RecipeError
from segcredit.models import Critic, Policy
from segcredit.runlog import RunFolder
from segcredit.runlog.folder import POLICY
from segcredit.types import Batch, MonteCarlo, Prompt, Rollouts

if TYPE_CHECKING:
    from segcredit.train.collect import Context
    from segcredit.train.metrics import RolloutBatch
    from segcredit.train.state import State


@runtime_checkable
class Sampler(Protocol):
    """Samples and grades responses to prompts."""

    def sample(self, context: "Context", prompts: Sequence[Prompt]) -> Any:
        """Sample responses; the result is passed to :meth:`grade`.

        With ``rollout.ahead`` it runs in a background thread, where collective operations are not
        allowed.
        """
        ...

    def grade(self, context: "Context", drawn: Any) -> "RolloutBatch":
        """Score the sampled responses."""
        ...


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint from which providers are restored."""

    folder: RunFolder
    place: Path
    """Directory of the checkpoint."""
    state: Mapping[str, Any]
    """Content of its state file."""

    def missing_error(self, what: str, recipe: Recipe) -> RecipeError:
        """Return the error to raise if the checkpoint does not have what a column needs."""
        return RecipeError(
            f"{what}, which {self.place} does not contain for this data and stage. Resume with "
            f"the previous algorithm and data, or start a new run on the trained policy: "
            f"{trained_policy(recipe, self.place)}"
        )


def trained_policy(recipe: Recipe, place: Path) -> str:
    """Return the overrides that start a new run on a checkpoint's policy."""
    instead = "" if recipe.model.tiny is None else " model.tiny=null"
    return f"model.path={shlex.quote(str(place / POLICY))}{instead}"


class Provider:
    """Everything that a run does for one column; the defaults do nothing."""

    prepares_at_build: ClassVar[bool] = False
    """Whether it is prepared when the run is built: it holds no model and no state."""
    prepares_every_stage: ClassVar[bool] = False
    """Whether it is prepared at the start of every stage, and not only once per run."""
    held_out: ClassVar[bool] = True
    """Whether the column can be filled for held-out prompts."""
    sampler: Sampler | None = None
    """How responses are sampled; None: independently of each other."""
    learners: tuple[str, ...] = ()
    """Names of models (``State.learners``) that are trained along with the policy."""

    state_key: str | None = None
    """Key of :meth:`state_dict` in a checkpoint's state file; None: ``column/<name>``."""

    def prepare(self, state: "State") -> "Provider":
        """Prepare for a run, when its first stage that needs the column begins.

        Returns the provider that is used from then on, which may be another object.
        """
        return self

    def restore(self, state: "State", saved: SavedRun) -> "Provider | None":
        """Return the provider restored from a checkpoint; None if it must be prepared later."""
        return None

    def choose_prompts(self, state: "State", count: int) -> list[Prompt] | None:
        """Choose the prompts of the next step; return None to keep the data's order."""
        return None

    def fill(self, context: "Context", rollouts: Rollouts) -> Rollouts:
        """Return the rollouts with this column filled."""
        return rollouts

    def describe(self, rollouts: Rollouts) -> dict[str, float]:
        """Return metrics of a training step's rollouts."""
        return {}

    def monte_carlo(self, context: "Context") -> MonteCarlo | None:
        """Return the Monte-Carlo value estimator to pass to the method's ``prepare``.

        A column whose estimator samples sets ``continues``.
        """
        return None

    def select_rows(self, batch: Batch) -> Int[Tensor, " R"] | None:
        """Return the rows that enter the update; None for all rows."""
        return None

    def before_update(self, context: "Context", batch: Batch) -> Batch:
        """Change the batch, or the run's state, before the gradient steps."""
        return batch

    def after_update(self, context: "Context", rollouts: Rollouts) -> dict[str, float]:
        """Update the column's own state after the step, and return metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: tensors, numbers, texts, lists and dicts of them."""
        return {}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""

    def models(self) -> Mapping[str, Policy | Critic]:
        """Return the models to save in every checkpoint, by the name of their directory."""
        return {}

    def fixed_models(self) -> Mapping[str, Policy]:
        """Return models that never change, to save once per run, by directory name."""
        return {}


@dataclass(frozen=True)
class OwnColumn(Column, Provider):
    """Base class of a user's column, which is its own provider.

    A subclass is a frozen dataclass with ``name``, ``description`` and :meth:`Provider.fill`. If it
    keeps state, :meth:`Provider.prepare` returns another :class:`Provider` that holds it.
    """

    def restore(self, state: "State", saved: SavedRun) -> "Provider | None":
        """Prepare again, then load what :meth:`Provider.state_dict` saved, if anything."""
        if not state.has_begun("pretrain_critic", "optimize"):
            return None
        provider = self.prepare(state)
        if (kept := saved.state.get(f"column/{self.name}")) is not None:
            provider.load_state_dict(kept)
        return provider


@dataclass(frozen=True)
class Providers:
    """The providers of a method's columns, called one after the other."""

    each: tuple[Provider, ...]

    def __iter__(self) -> Iterator[Provider]:
        return iter(self.each)

    @property
    def sampler(self) -> Sampler | None:
        """Sampler of the first provider that has one; None if responses are independent."""
        return next((x.sampler for x in self.each if x.sampler is not None), None)

    @property
    def learners(self) -> tuple[str, ...]:
        """Names of the models that are trained along with the policy."""
        return tuple(name for x in self.each for name in x.learners)

    def choose_prompts(self, state: "State", count: int) -> list[Prompt] | None:
        found = (x.choose_prompts(state, count) for x in self.each)
        return next((x for x in found if x is not None), None)

    @torch.no_grad()
    def fill(self, context: "Context", rollouts: Rollouts) -> Rollouts:
        for x in self.each:
            rollouts = x.fill(context, rollouts)
        return rollouts

    def describe(self, rollouts: Rollouts) -> dict[str, float]:
        return {name: y for x in self.each for name, y in x.describe(rollouts).items()}

    def monte_carlo(self, context: "Context") -> MonteCarlo | None:
        found = (x.monte_carlo(context) for x in self.each)
        return next((x for x in found if x is not None), None)

    def select_rows(self, batch: Batch) -> Int[Tensor, " R"] | None:
        found = (x.select_rows(batch) for x in self.each)
        return next((x for x in found if x is not None), None)

    def before_update(self, context: "Context", batch: Batch) -> Batch:
        for x in self.each:
            batch = x.before_update(context, batch)
        return batch

    def after_update(self, context: "Context", rollouts: Rollouts) -> dict[str, float]:
        return {name: y for x in self.each for name, y in x.after_update(context, rollouts).items()}
