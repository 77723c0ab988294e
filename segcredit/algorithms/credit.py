"""Credit estimators: from rollouts and token rewards to advantages over units."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.columns import (
    BASELINE,
    ENTROPY,
    IMAGE_KL,
    PARENT,
    VALUE,
    Continuations,
    ImageKL,
    Needs,
)
from segcredit.core.advantages import (
    Credit,
    image_weight,
    length_adaptive_lambda,
    return_to_go,
    rewards_before,
    segment_gae,
    terminal_reward,
    value_difference,
)
from segcredit.core.checks import (
    finite,
    keep,
    positions,
    require,
    require_at_least,
    require_positive,
    require_shape,
    require_unit_interval,
)
from segcredit.core.group import Std, check_std, group_zscore, leave_one_out, tree_advantage
from segcredit.core.segments import Segments, ValueAt, check_value_at
from segcredit.core.tracker import batch_normalize
from segcredit.partition import Partition, Response, Token
from segcredit.partition.entropy import check_fraction, highest_in_batch, most
from segcredit.types import MonteCarlo, Rollouts


class Case(NamedTuple):
    """Input of a credit estimator."""

    rollouts: Rollouts
    reward: Float[Tensor, "B T"]
    """Reward per token, KL penalty included."""
    segments: Segments
    """The estimator's own units."""
    monte_carlo: MonteCarlo | None = None

    @property
    def total_reward(self) -> Float[Tensor, " B"]:
        """Sum of a response's token rewards."""
        return keep(self.rollouts.mask, self.reward).sum(dim=1)


@runtime_checkable
class CreditPart(Protocol):
    """Credit estimator: turns rewards into advantages over units."""

    @property
    def over(self) -> Partition:
        """The units of credit."""
        ...

    @property
    def needs(self) -> Needs:
        """Columns that the estimator reads, besides those of its partition."""
        ...

    def __call__(self, case: Case) -> Credit:
        """Compute the credit of every token."""
        ...


@dataclass(frozen=True)
class GAE:
    """Generalized advantage estimation over any units (Eq. 6–7)."""

    over: Partition
    lam: float
    gamma: float = 1.0
    lam_critic: float | None = None
    """λ of the value targets; None: ``lam`` (VC-PPO and VAPO: 1)."""
    value_at: ValueAt = "start"

    def __post_init__(self) -> None:
        require_unit_interval("gamma", self.gamma, "Language tasks use 1.0.")
        require_unit_interval("lam", self.lam, "The paper uses 0.99 per segment, 0.95 per token.")
        if self.lam_critic is not None:
            require_unit_interval("lam_critic", self.lam_critic, "VC-PPO uses 1.0.")
        check_value_at(self.value_at)

    @property
    def needs(self) -> Needs:
        """The critic's values."""
        return frozenset({VALUE})

    def __call__(self, case: Case) -> Credit:
        value = case.rollouts.column("value", "GAE")
        return segment_gae(
            case.reward, value, case.segments, self.gamma, self.lam, self.value_at, self.lam_critic
        )


@dataclass(frozen=True)
class LengthAdaptiveGAE:
    """GAE whose λ = 1 − 1/(α l) grows with the response's length (VAPO), clamped to [0, 1]."""

    over: Partition
    alpha: float = 0.05
    gamma: float = 1.0
    lam_critic: float = 1.0
    value_at: ValueAt = "start"

    def __post_init__(self) -> None:
        require_positive("alpha", self.alpha, "VAPO uses 0.05.")
        require_unit_interval("gamma", self.gamma, "Language tasks use 1.0.")
        require_unit_interval("lam_critic", self.lam_critic, "VAPO uses 1.0.")
        check_value_at(self.value_at)

    @property
    def needs(self) -> Needs:
        """The critic's values."""
        return frozenset({VALUE})

    def __call__(self, case: Case) -> Credit:
        value = case.rollouts.column("value", "LengthAdaptiveGAE")
        lam = length_adaptive_lambda(case.segments.token_mask.sum(dim=1), self.alpha)
        return segment_gae(
            case.reward, value, case.segments, self.gamma, lam, self.value_at, self.lam_critic
        )


@dataclass(frozen=True)
class GroupZScore:
    """Z-score of the reward, (r − mean) / (std + ε), among the responses to one prompt (GRPO)."""

    compares_groups: ClassVar[bool] = True

    std: Std = "sample"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_std(self.std)
        require_at_least("eps", self.eps, 0.0, "verl uses 1e-6, TRL 1e-4.")

    @property
    def over(self) -> Partition:
        """The whole response: all its tokens have one advantage."""
        return Response()

    @property
    def needs(self) -> Needs:
        """Columns that it reads: none, because rewards and groups are always available."""
        return frozenset()

    def __call__(self, case: Case) -> Credit:
        return _to_responses(
            group_zscore(case.total_reward, case.rollouts.group, self.std, self.eps), case.segments
        )


@dataclass(frozen=True)
class LeaveOneOut:
    """Reward minus the mean of the other responses to the same prompt (RLOO)."""

    compares_groups: ClassVar[bool] = True

    @property
    def over(self) -> Partition:
        """The whole response: all its tokens have one advantage."""
        return Response()

    @property
    def needs(self) -> Needs:
        """Columns that it reads: none, because rewards and groups are always available."""
        return frozenset()

    def __call__(self, case: Case) -> Credit:
        return _to_responses(leave_one_out(case.total_reward, case.rollouts.group), case.segments)


@dataclass(frozen=True)
class ValueDifference:
    """Differences of Monte-Carlo values at unit starts (VinePPO, SPO-chain)."""

    over: Partition
    samples: int = 9
    """Continuations sampled per estimated prefix."""
    most: int | None = None
    """Maximum number of units of a response that are estimated in addition to the prompt
    (VinePPO, GSM8K: 25); None: all."""
    truncated_reward: float | None = None
    """Reward of a truncated response or continuation; None: the graded reward."""

    def __post_init__(self) -> None:
        require_at_least("samples", self.samples, 1, "VinePPO and SPO use 9.")
        if self.most is not None:
            require_at_least("most", self.most, 1, "None estimates every unit.")
        if self.truncated_reward is not None and not math.isfinite(self.truncated_reward):
            raise ValueError(
                f"truncated_reward must be finite; got {self.truncated_reward}. VinePPO and SPO "
                f"use 0.0; None keeps the original reward."
            )

    @property
    def needs(self) -> Needs:
        """Values of the unit starts, from sampled continuations."""
        return frozenset({Continuations(self.truncated_reward)})

    def __call__(self, case: Case) -> Credit:
        return self.credit_and_estimated(case)[0]

    def credit_and_estimated(self, case: Case) -> tuple[Credit, Bool[Tensor, "B M"]]:
        """Compute the credit, and which units got a value; a limit may exclude some."""
        rollouts, reward, segments, monte_carlo = case
        if monte_carlo is None:
            raise ValueError(
                "ValueDifference estimates values by sampling continuations; got no sampler. "
                "Pass prepare(rollouts, monte_carlo=…)."
            )
        # changes only the outcome reward; a KL penalty in the token rewards is kept
        change = self.scored(rollouts.reward, rollouts.truncated) - rollouts.reward
        reward = reward + terminal_reward(change, rollouts.mask)
        estimated = self.estimated(rollouts, segments)
        state_value = monte_carlo(rollouts, segments, estimated, self.samples)
        estimated = estimated & ~state_value.isnan()
        advantage = value_difference(segments.sum(reward), state_value, segments.mask, estimated)
        return Credit(segments.spread(advantage), None, segments), estimated

    def scored(self, reward: Float[Tensor, "*N"], truncated: Bool[Tensor, "*N"]) -> Tensor:
        """Return rewards of responses, with ``truncated_reward`` applied."""
        if self.truncated_reward is None:
            return reward
        return keep(~truncated, reward, self.truncated_reward)

    def estimated(self, rollouts: Rollouts, segments: Segments) -> Bool[Tensor, "B M"]:
        """Return the units whose start gets a value; the others get no credit."""
        estimated = self.over.estimated(rollouts, segments)
        if self.most is None:
            return estimated
        return estimated & (positions(segments.width, estimated.device) <= self.most)


@dataclass(frozen=True)
class TreeDifference:
    """Difference V(child) − V(parent) in a tree of continuations; a row is an edge (SPO-tree)."""

    normalize: bool = False

    @property
    def over(self) -> Partition:
        """The whole row, which is one branch of the tree."""
        return Response()

    @property
    def needs(self) -> Needs:
        """The row that each branch continues."""
        return frozenset({PARENT})

    def __call__(self, case: Case) -> Credit:
        parent = case.rollouts.column("parent", "TreeDifference")
        advantage, _ = tree_advantage(
            case.total_reward, parent, case.rollouts.group, self.normalize
        )
        return _to_responses(advantage, case.segments)


@dataclass(frozen=True)
class TrackedBaseline:
    """Reward minus the prompt's tracked value, normalized over the batch (single-stream SPO)."""

    @property
    def over(self) -> Partition:
        """The whole response: all its tokens have one advantage."""
        return Response()

    @property
    def needs(self) -> Needs:
        """The prompt's value, tracked over the run."""
        return frozenset({BASELINE})

    def __call__(self, case: Case) -> Credit:
        baseline = case.rollouts.column("baseline", "TrackedBaseline")
        return _to_responses(batch_normalize(case.total_reward - baseline), case.segments)


@dataclass(frozen=True)
class SegmentBootstrap:
    """GAE per token that bootstraps only where a segment ends (SAE, arXiv 2601.07320).

    Â_t = δ_t + λ_t Â_{t+1} with λ_t = λ at the last token of a segment and 1 inside, γ = 1. Inside
    a segment the values telescope: Â_t = R̂_m − (the segment's rewards before t) − V(s_t), with the
    segment's target R̂_m. One token per segment gives GAE.
    """

    gamma: ClassVar[float] = 1.0
    value_at: ClassVar[ValueAt] = "start"

    over: Partition
    lam: float
    lam_critic: float | None = None
    """λ of the value targets; None: ``lam``."""

    def __post_init__(self) -> None:
        require_unit_interval("lam", self.lam, "PPO uses 0.95.")
        if self.lam_critic is not None:
            require_unit_interval("lam_critic", self.lam_critic, "VC-PPO uses 1.0.")

    @property
    def needs(self) -> Needs:
        """The critic's values."""
        return frozenset({VALUE})

    def __call__(self, case: Case) -> Credit:
        value, mask = case.rollouts.column("value", "SegmentBootstrap"), case.rollouts.mask
        earlier = rewards_before(case.reward, case.segments)

        def target(lam: float) -> Tensor:
            credit = segment_gae(case.reward, value, case.segments, self.gamma, lam)
            assert credit.value_target is not None
            return keep(mask, credit.value_target - earlier)

        advantage = keep(mask, target(self.lam) - value)
        critic = target(self.lam if self.lam_critic is None else self.lam_critic)
        return Credit(advantage, critic, case.segments)


ValueCredit = GAE | LengthAdaptiveGAE | SegmentBootstrap
"""Estimators that read values of a critic and make its targets."""


@dataclass(frozen=True)
class ReturnToGo:
    """Sum of the rewards from each token on, without a baseline (REINFORCE++)."""

    gamma: float = 1.0

    def __post_init__(self) -> None:
        require_unit_interval("gamma", self.gamma, "Language tasks use 1.0.")

    @property
    def over(self) -> Partition:
        """Single tokens."""
        return Token()

    @property
    def needs(self) -> Needs:
        """Columns that it reads: none, because token rewards are always available."""
        return frozenset()

    def __call__(self, case: Case) -> Credit:
        total = return_to_go(case.segments.sum(case.reward), self.gamma)
        return Credit(case.segments.spread(total), None, case.segments)


@dataclass(frozen=True)
class AroundCredit:
    """Base class of estimators that modify the advantages of another estimator."""

    credit: CreditPart

    @property
    def compares_groups(self) -> bool:
        """Whether the inner estimator compares the responses to one prompt."""
        return bool(getattr(self.credit, "compares_groups", False))

    @property
    def over(self) -> Partition:
        """The units of the inner estimator."""
        return self.credit.over


@dataclass(frozen=True)
class TopEntropyOnly(AroundCredit):
    """Credit of another estimator at the batch's tokens of highest entropy, 0 at the others.

    The loss is proportional to the advantage, so the other tokens have no gradient, but they count
    in the denominator of the mean (80/20, arXiv 2506.01939).
    """

    fraction: float = 0.2

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    @property
    def needs(self) -> Needs:
        """The columns of the inner estimator, and the entropies."""
        return self.credit.needs | {ENTROPY}

    def __call__(self, case: Case) -> Credit:
        credit = self.credit(case)
        entropy = case.rollouts.column("entropy", "TopEntropyOnly")
        highest = highest_in_batch(entropy, case.rollouts.mask, self.fraction)
        return replace(credit, advantage=keep(highest, credit.advantage))


@dataclass(frozen=True)
class ImageDependence(AroundCredit):
    """Credit of another estimator, weighted by the dependence on the images (VPPO).

    The advantages of a response are multiplied by its weight (``image_weight``). Outside of the
    response's ⌈T · fraction⌉ most dependent tokens they are 0: these tokens have no gradient, but
    count in the denominator of the mean. A response without an image keeps its credit.
    """

    fraction: float = 0.4
    floor: float = 0.9
    """β, the weight of the response that depends least on its images; 1: all weights are 1."""
    column: ImageKL = IMAGE_KL
    """The measure of dependence."""

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        require_unit_interval("floor", self.floor, "VPPO uses 0.9; 1.0 weights all responses by 1.")

    @property
    def needs(self) -> Needs:
        """The columns of the inner estimator, and the dependence on the images."""
        return self.credit.needs | {self.column}

    def __call__(self, case: Case) -> Credit:
        credit, mask = self.credit(case), case.rollouts.mask
        image_kl = case.rollouts.column("image_kl", "ImageDependence")
        require_shape("image_kl", image_kl, "the mask", mask)
        has_image = (mask & ~image_kl.isnan()).any(dim=1)
        seen = mask & has_image[:, None]
        require(finite(seen, image_kl=image_kl))
        weight = image_weight(image_kl, mask, has_image, self.floor)
        dependent = most(keep(seen, image_kl), mask, self.fraction) | ~has_image[:, None]
        shaped = credit.advantage * weight[:, None].to(credit.advantage.dtype)
        return replace(credit, advantage=keep(mask & dependent, shaped))


def _to_responses(advantage: Float[Tensor, " B"], segments: Segments) -> Credit:
    return Credit(segments.spread(advantage[:, None]), None, segments)
