"""Columns: the per-token and per-response data that a method needs from a run.

A part of a method (a partition, a credit estimator, a loss term) lists in ``needs`` the columns of
the rollouts that it reads. The trainer fills exactly the union of these columns, so every forward
pass is used.

Three layers share the work:

* **A column names something**: a frozen object with a ``name``, a ``description``, and a check of
  the settings it needs. Equal columns are filled once. This module has the built-in columns and
  no code that fills them, so partitions and algorithms stay free of models.
* **A provider fills it** (``segcredit.train.provider.Provider``): it prepares itself (loads
  the reference model, builds the critic), fills the column for a batch of rollouts, updates itself
  after the step, and saves its state in a checkpoint.
  ``segcredit/train/columns.py`` has the one table from built-in columns to their providers. The
  trainer loops over providers and does not know which method they serve.
* **A column of your own is its own provider**: subclass
  ``segcredit.train.provider.OwnColumn``, write ``fill``, and return it from ``needs``
  (docs/extending.md).

In ``needs`` a string is the name of a built-in column, as in ``frozenset({"entropy"})``;
``resolve`` replaces it by the column.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from segcredit.registry import Registry


@dataclass(frozen=True)
class Column:
    """A requirement of a method, usually one column of the rollouts."""

    name: ClassVar[str]
    """The field of ``segcredit.types.Rollouts`` that holds it, or a name of its own."""
    description: ClassVar[str]
    continues: ClassVar[bool] = False
    """Whether it samples continuations of responses with π_old, after or while these are sampled.
    They share their prompts' KV cache, and ``rollout.ahead`` is refused."""

    def check(self, recipe: Any, method: str) -> list[str]:
        """Return problems of a recipe's settings for this column.

        Args:
            recipe: A ``segcredit.config.Recipe``.
            method: Name of the method that needs the column, for messages.
        """
        return []

    def check_unused(self, recipe: Any, method: str) -> list[str]:
        """Return settings that have no effect because the method does not need this column."""
        return []

    def check_prompts(self, prompts: Sequence[Any], method: str) -> list[str]:
        """Return problems of the training prompts for this column.

        Args:
            prompts: All prompts (``segcredit.types.Prompt``), or the first prompts of a world.
        """
        return []


@dataclass(frozen=True)
class LogpOld(Column):
    """log π_old of each token. Every method needs it, unless its loss is offline."""

    name = "logp_old"
    description = "log-probability of each token under the policy that sampled it"


@dataclass(frozen=True)
class Entropy(Column):
    """H_t under π_old, full vocabulary, at the sampling temperature."""

    name = "entropy"
    description = "entropy of the policy's distribution at each token"


@dataclass(frozen=True)
class Value(Column):
    """V of the prefix before each token, from a critic that is trained with the policy."""

    name = "value"
    description = "value of the prefix before each token, from the critic"

    def check_unused(self, recipe: Any, method: str) -> list[str]:
        problems = [
            f"stages.{number}: {method} has no critic to pretrain: remove the stage"
            for number, stage in enumerate(recipe.stages)
            if stage.kind == "pretrain_critic"
        ]
        if recipe.model.critic is not None:
            problems.append(f"model.critic is given, but {method} has no critic: remove it")
        return problems


@dataclass(frozen=True)
class LogpRef(Column):
    """log π_ref of each token; π_ref is the policy at the start of reinforcement learning."""

    name = "logp_ref"
    description = "log-probability of each token under the reference model"


@dataclass(frozen=True)
class Pieces(Column):
    """Text of each token."""

    name = "pieces"
    description = "text of each token"


@dataclass(frozen=True)
class Baseline(Column):
    """Value of each prompt, tracked from step to step (single-stream SPO)."""

    name = "baseline"
    description = "value of each prompt, tracked from step to step"

    def check(self, recipe: Any, method: str) -> list[str]:
        problems = []
        if recipe.data.world is not None and recipe.data.size is None:
            problems.append(
                f"{method} tracks a value per prompt, so prompts must repeat: set data.size to the "
                f"number of distinct prompts"
            )
        if recipe.rollout.samples != 1:
            problems.append(
                f"{method} needs exactly one response per prompt: set rollout.samples=1; got "
                f"{recipe.rollout.samples}"
            )
        if recipe.data.curriculum:
            problems.append(
                f"{method} draws prompts by their tracked values already: set data.curriculum=false"
            )
        return problems


@dataclass(frozen=True)
class Parent(Column):
    """The row that each row continues; rows are branches of a tree of responses (SPO-tree)."""

    name = "parent"
    continues = True
    description = "the branch that each response continues, in a tree of responses"

    def check(self, recipe: Any, method: str) -> list[str]:
        if recipe.rollout.tree is not None:
            return []
        return [
            f"{method} compares branches of a tree: set rollout.tree, as in "
            f"rollout.tree='{{branching: [6, 6, 6], tokens: 100}}'"
        ]

    def check_unused(self, recipe: Any, method: str) -> list[str]:
        if recipe.rollout.tree is None:
            return []
        return [
            f"rollout.tree is for methods that compare branches (spo_tree), which {method} does "
            f"not: remove it"
        ]


@dataclass(frozen=True)
class Continuations(Column):
    """Monte-Carlo values of prefixes, from sampled continuations (VinePPO, SPO-chain, DVO).

    The method gets them through ``monte_carlo`` in ``prepare``, since only its partition knows the
    prefixes.
    """

    name = "continuations"
    continues = True
    description = "values of prefixes, as mean rewards of sampled continuations"

    truncated_reward: float | None = None
    """Reward of a truncated continuation; None: the graded reward."""

    def check_unused(self, recipe: Any, method: str) -> list[str]:
        if recipe.rollout.prefixes is None:
            return []
        return [
            f"rollout.prefixes limits the prefixes that are continued, but {method} samples no "
            f"continuations: remove it"
        ]


@dataclass(frozen=True)
class ImageKL(Column):
    """Dependence of each token's probability on the prompt's images (VPPO).

    k3 between π_old and the same policy that reads the images with random black patches, at most
    10, with log-ratios within ±20. NaN at all tokens of a response whose prompt has no image.
    """

    name = "image_kl"
    description = "KL of each token between the policy with its images and with hidden ones"

    patch: int = 14
    """Side of a patch, in pixels of the image file."""
    probability: float = 0.5
    """Probability with which a patch is black; 1: the whole image."""

    def __post_init__(self) -> None:
        if isinstance(self.patch, bool) or not isinstance(self.patch, int) or self.patch < 1:
            raise ValueError(
                f"patch must be a whole number of pixels, at least 1; got {self.patch!r}. VPPO "
                f"uses 14."
            )
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(
                f"probability must be in (0, 1]; got {self.probability}. VPPO hides half of the "
                f"patches: 0.5."
            )

    def check_prompts(self, prompts: Sequence[Any], method: str) -> list[str]:
        if any(prompt.images for prompt in prompts):
            return []
        return [
            f"{method} weights tokens by their dependence on the prompt's images; got no training "
            f"prompt with an image. Use data with images, or dapo, which is vppo without them"
        ]


@dataclass(frozen=True)
class InitialPolicy(Column):
    """The policy at the start of reinforcement learning; each update starts from it (RestEM)."""

    name = "initial_policy"
    description = "weights at the start of reinforcement learning, from which each update starts"


LOGP_OLD, ENTROPY, VALUE, LOGP_REF = LogpOld(), Entropy(), Value(), LogpRef()
PIECES, BASELINE, PARENT = Pieces(), Baseline(), Parent()
CONTINUATIONS, INITIAL_POLICY, IMAGE_KL = Continuations(), InitialPolicy(), ImageKL()

_BUILT_IN = (
    LOGP_OLD,
    ENTROPY,
    VALUE,
    INITIAL_POLICY,
    LOGP_REF,
    IMAGE_KL,
    PIECES,
    BASELINE,
    PARENT,
    CONTINUATIONS,
)
COLUMNS: Registry[Column] = Registry("column", {x.name: x for x in _BUILT_IN})
"""The built-in columns by name, in the order in which they are prepared and filled."""

Needs = frozenset[Column | str]
"""Type of ``needs``: columns, or names of built-in ones."""


def resolve(needs: Iterable[Column | str]) -> frozenset[Column]:
    """Replace names by columns; the error for an unknown name suggests the nearest one."""
    return frozenset(COLUMNS[x] if isinstance(x, str) else x for x in needs)


def in_order(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Sort columns: built-in ones in their order, then others by name; equal in every process."""
    order = list(COLUMNS)
    found = sorted(
        set(columns),
        key=lambda x: (order.index(x.name) if x.name in order else len(order), x.name, repr(x)),
    )
    for one, other in pairwise(found):
        if one.name == other.name:
            raise ValueError(
                f"expected one column named {one.name!r} in needs; got two: {one!r} and {other!r}. "
                f"Use one of them, or give yours another name."
            )
    return tuple(found)
