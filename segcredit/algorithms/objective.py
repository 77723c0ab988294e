"""Parts of the objective: ratios, surrogates, reductions, the critic's loss, KL and more terms."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.columns import LOGP_REF, Needs
from segcredit.core.advantages import Credit, clamp, kl_shaped_reward, whiten
from segcredit.core.checks import (
    constant,
    keep,
    require_at_least,
    require_positive,
    require_probability,
)
from segcredit.core.losses import (
    boundary_value_loss,
    check_clip,
    clipped_surrogate,
    constant_shares,
    is_clipped,
    k3,
    micro_batch_token_shares,
    nll,
    probability_mask,
    response_shares,
    token_shares,
)
from segcredit.core.ratios import (
    bounded_exp,
    geometric_mean_ratio,
    gspo_token_ratio,
    log_ratio,
    raw_ratio,
    token_ratio,
)
from segcredit.core.segments import Segments, ValueAt
from segcredit.partition import Partition, Token, tokens
from segcredit.types import Batch, Outputs, Rollouts, named_repr

Estimator = Callable[[Tensor, Tensor], Tensor]
"""Estimator of KL(π_θ ‖ π_ref) per token: k1, k2 or k3 of core/losses.py."""


@runtime_checkable
class Reduction(Protocol):
    """Share (weight) of each entry in a mini-batch's loss Σ share · x (core/losses.py)."""

    def __call__(
        self, mask: Bool[Tensor, "B N"], micro_batch: Int[Tensor, " B"] | None, dtype: torch.dtype
    ) -> Float[Tensor, "B N"]:
        """Compute the share of each entry of a mini-batch."""
        ...


@dataclass(frozen=True)
class ResponseMean:
    """Mean over responses of each response's mean: Eq. 9's 1/T, Eq. 10's 1/M."""

    def __call__(
        self, mask: Bool[Tensor, "B N"], micro_batch: Int[Tensor, " B"] | None, dtype: torch.dtype
    ) -> Float[Tensor, "B N"]:
        return response_shares(mask, dtype)


@dataclass(frozen=True)
class TokenMean:
    """Mean over all tokens (or boundaries) of the mini-batch."""

    def __call__(
        self, mask: Bool[Tensor, "B N"], micro_batch: Int[Tensor, " B"] | None, dtype: torch.dtype
    ) -> Float[Tensor, "B N"]:
        return token_shares(mask, dtype)


@dataclass(frozen=True)
class ConstantMean:
    """Each response's sum over a constant length, then the mean over responses."""

    length: float = 1.0

    def __call__(
        self, mask: Bool[Tensor, "B N"], micro_batch: Int[Tensor, " B"] | None, dtype: torch.dtype
    ) -> Float[Tensor, "B N"]:
        return constant_shares(mask, self.length, dtype)


@dataclass(frozen=True)
class MicroBatchTokenMean:
    """Token mean per micro-batch, micro-batches weighted equally (the authors' code)."""

    def __call__(
        self, mask: Bool[Tensor, "B N"], micro_batch: Int[Tensor, " B"] | None, dtype: torch.dtype
    ) -> Float[Tensor, "B N"]:
        if micro_batch is None:
            micro_batch = torch.zeros(len(mask), dtype=torch.long, device=mask.device)
        return micro_batch_token_shares(mask, micro_batch, dtype)


ReduceBy = Literal["response", "token", "sum"]
"""A reduction by name: ResponseMean, TokenMean, or each response's sum (ConstantMean of 1)."""


def reduction(name: str) -> Reduction:
    """Return the reduction with this name (see ``ReduceBy``)."""
    if name == "response":
        return ResponseMean()
    if name == "token":
        return TokenMean()
    if name == "sum":
        return ConstantMean(1.0)
    known = ", ".join(repr(x) for x in get_args(ReduceBy))
    raise ValueError(
        f"a reduction must be one of {known}; got {name!r}. "
        f"Set reduce='response' for DeepSeekMath's GRPO, reduce='token' for verl's."
    )


@runtime_checkable
class Surrogate(Protocol):
    """Surrogate loss per token, a function of ratio and advantage."""

    def __call__(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Compute the loss of each token."""
        ...

    def metrics(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> dict[str, Float[Tensor, "B T"]]:
        """Compute metrics per token; they are averaged as the loss is."""
        ...


@dataclass(frozen=True)
class Clipped:
    """The clipped surrogate (Eq. 9), optionally asymmetric and dual-clipped."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        check_clip(self.low, self.high, self.dual)

    def __call__(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        return clipped_surrogate(ratio, advantage, self.low, self.high, self.dual)

    def metrics(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> dict[str, Float[Tensor, "B T"]]:
        """Return the ratio and the fraction of tokens without a gradient."""
        clipped = is_clipped(ratio, advantage, self.low, self.high, self.dual)
        return {"ratio": ratio, "clip_fraction": clipped.to(ratio.dtype)}


@dataclass(frozen=True)
class Unclipped:
    """Surrogate without a clip, −ρ Â; it is REINFORCE if log π replaces the ratio ρ."""

    def __call__(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        return -ratio * advantage

    def metrics(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> dict[str, Float[Tensor, "B T"]]:
        """Return no metrics: nothing is clipped, and the ratio may be log π."""
        return {}


@runtime_checkable
class LogProbSurrogate(Protocol):
    """Surrogate loss per token that ratio and advantage alone do not determine."""

    def from_log_probs(
        self,
        logp: Float[Tensor, "B T"],
        logp_old: Float[Tensor, "B T"],
        advantage: Float[Tensor, "B T"],
        segments: Segments,
    ) -> tuple[Float[Tensor, "B T"], dict[str, Float[Tensor, "B T"]]]:
        """Compute the loss of each token, and metrics; ``segments`` are the units of the ratio."""
        ...


@dataclass(frozen=True)
class SoftGate:
    """Smooth gate in place of the clip, −4/τ σ(τ (ρ − 1)) Â (Qwen's soft adaptive SAPO).

    At ρ = 1 its gradient is that of −ρ Â; it vanishes as ρ moves away, on both sides.
    """

    positive: float = 1.0
    """τ of tokens with Â > 0."""
    negative: float = 1.05
    """τ of the other tokens; a larger τ makes their gradient fade faster."""

    def __post_init__(self) -> None:
        require_positive("positive", self.positive, "Qwen's SAPO uses 1.0.")
        require_positive("negative", self.negative, "Qwen's SAPO uses 1.05.")

    def __call__(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        number = partial(constant, dtype=ratio.dtype, device=ratio.device)
        tau = torch.where(advantage > 0, number(self.positive), number(self.negative))
        return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantage

    def metrics(
        self, ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"]
    ) -> dict[str, Float[Tensor, "B T"]]:
        """Return the ratio; a gate has no clip fraction."""
        return {"ratio": ratio}


@dataclass(frozen=True)
class ClippedWeight:
    """Loss −clip(ρ, low, high) Â log π; the clipped ratio is a constant weight (CISPO).

    No token loses its gradient.
    """

    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        require_at_least("low", self.low, 0.0, "0 is no lower bound.")
        if not self.low < self.high:
            raise ValueError(
                f"the bounds of CISPO's weight must be 0 ≤ low < high; got {self.low} and "
                f"{self.high}. They are ratios, not distances from 1: 1 + ε is a high of 1.2."
            )

    def from_log_probs(
        self,
        logp: Float[Tensor, "B T"],
        logp_old: Float[Tensor, "B T"],
        advantage: Float[Tensor, "B T"],
        segments: Segments,
    ) -> tuple[Float[Tensor, "B T"], dict[str, Float[Tensor, "B T"]]]:
        """Compute the weighted loss of each token, with ratio and clip fraction."""
        ratio = token_ratio(logp.detach(), logp_old, segments.token_mask)
        weight = ratio.clamp(self.low, self.high)
        clipped = (weight != ratio).to(ratio.dtype)
        loss = -weight * advantage * keep(segments.token_mask, logp)
        return loss, {"ratio": ratio, "clip_fraction": clipped}


@dataclass(frozen=True)
class ClippedInsideMean:
    """Geometric mean of a unit's clipped token ratios, times −Â (GMPO).

    The clip is PPO's, on log-ratios: from above where Â > 0, from below where Â < 0.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        require_positive("low", self.low, "GMPO uses 0.4.")
        require_positive("high", self.high, "GMPO uses 0.4.")

    def from_log_probs(
        self,
        logp: Float[Tensor, "B T"],
        logp_old: Float[Tensor, "B T"],
        advantage: Float[Tensor, "B T"],
        segments: Segments,
    ) -> tuple[Float[Tensor, "B T"], dict[str, Float[Tensor, "B T"]]]:
        """Compute the loss of each token, with the unit's ratio and the clip fraction."""
        mask = segments.token_mask
        x = log_ratio(logp, logp_old, mask)
        inside = torch.where(advantage > 0, x.clamp(max=self.high), x.clamp(min=-self.low))
        ratio = keep(mask, segments.spread(bounded_exp(segments.mean(inside))))
        clipped = (inside != x).to(ratio.dtype)
        return -ratio * advantage, {"ratio": ratio.detach(), "clip_fraction": clipped}


@runtime_checkable
class Adjustment(Protocol):
    """Transformation of the advantages before the loss, such as whitening."""

    def __call__(
        self, advantage: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        """Adjust the advantages; ``mask`` is True at tokens that enter the loss."""
        ...


@dataclass(frozen=True)
class Whiten:
    """Normalize advantages to zero mean and unit variance over the tokens of the loss."""

    def __call__(
        self, advantage: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        return whiten(advantage, mask)


@dataclass(frozen=True)
class Clamp:
    """Clamp advantages to ±limit."""

    limit: float

    def __call__(
        self, advantage: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        return clamp(advantage, self.limit)


@runtime_checkable
class TokenFilter(Protocol):
    """Selection of the tokens that enter the policy loss."""

    def __call__(self, rollouts: Rollouts) -> Bool[Tensor, "B T"]:
        """Return True at tokens that enter the loss."""
        ...


@dataclass(frozen=True)
class LowProbability:
    """Select tokens of low probability under π_old (SPO)."""

    threshold: float = 0.9

    def __post_init__(self) -> None:
        require_probability("threshold", self.threshold, "SPO uses 0.9.")

    def __call__(self, rollouts: Rollouts) -> Bool[Tensor, "B T"]:
        return probability_mask(rollouts.logp_old, rollouts.mask, self.threshold)


@dataclass(frozen=True)
class RewardKL:
    """KL penalty −β(log π_old − log π_ref) (k1), added to each token's reward."""

    coef: float

    def __post_init__(self) -> None:
        require_at_least("coef", self.coef, 0.0, "SAPO uses 0.001.")

    @property
    def needs(self) -> Needs:
        """The reference model's log-probabilities."""
        return frozenset({LOGP_REF})

    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        """Compute token rewards: the outcome on the last token, minus the penalty on each."""
        return kl_shaped_reward(
            rollouts.reward,
            rollouts.logp_old,
            rollouts.column("logp_ref", "RewardKL"),
            rollouts.mask,
            self.coef,
        )


@dataclass(frozen=True)
class BoundaryMSE:
    """Squared error of the critic where V was read (Eq. 10)."""

    reduce: Reduction = field(default_factory=ResponseMean)
    half: bool = False
    clip: float | None = None
    everywhere: bool = False
    """Train V at every token, with the target of its segment, so that V is meaningful between
    boundaries too."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            require_positive("clip", self.clip, "verl uses 0.5; None does not clip.")

    def _read(self, credit: Credit) -> tuple[Segments, ValueAt]:
        """Return the units at which V is read."""
        if self.everywhere:
            mask = credit.segments.token_mask
            # as wide as the batch: a micro-batch may lack the longest response
            return replace(tokens(mask), width=mask.shape[1]), "start"
        return credit.segments, credit.value_at

    def shares(self, credit: Credit, micro_batch: Int[Tensor, " B"] | None) -> Float[Tensor, "B M"]:
        """Compute one share per boundary."""
        return self.reduce(self._read(credit)[0].mask, micro_batch, credit.advantage.dtype)

    def __call__(
        self,
        value: Float[Tensor, "B T"],
        value_old: Float[Tensor, "B T"],
        credit: Credit,
        shares: Float[Tensor, "B M"],
    ) -> Float[Tensor, ""]:
        if credit.value_target is None:
            raise ValueError("a critic's loss needs value targets; this credit has none. Use GAE.")
        segments, value_at = self._read(credit)
        return boundary_value_loss(
            value,
            value_old,
            credit.value_target,
            segments,
            value_at,
            self.clip,
            self.half,
            shares=shares,
        )


@runtime_checkable
class Term(Protocol):
    """Additional term of the policy's loss."""

    @property
    def name(self) -> str:
        """Name of the metric."""
        ...

    @property
    def needs(self) -> Needs:
        """Columns that the term reads."""
        ...

    def mask(self, batch: Batch) -> Bool[Tensor, "B T"]:
        """Return the tokens that the term applies to."""
        ...

    @property
    def reduce(self) -> Reduction:
        """Reduction over these tokens."""
        ...

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "B T"]:
        """Compute the term of each token, coefficient included."""
        ...


@dataclass(frozen=True)
class K3:
    """The k3 estimator with clamps, as an ``Estimator``."""

    limit: float | None = None
    """Upper bound of the estimate (verl and VinePPO: 10)."""
    log_ratio_limit: float | None = None
    """Clamp of the log-ratio to ±log_ratio_limit (verl: 20; SPO: 10)."""

    def __post_init__(self) -> None:
        if self.limit is not None:
            require_positive("kl_clamp", self.limit, "verl uses 10; None does not clamp.")

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_ref: Float[Tensor, "B T"]
    ) -> Float[Tensor, "B T"]:
        return k3(logp, logp_ref, self.limit, self.log_ratio_limit)


@dataclass(frozen=True, repr=False)
class LossKL:
    """KL penalty as a loss: β times an estimate of KL(π_θ ‖ π_ref) (GRPO)."""

    coef: float
    estimator: Estimator = k3
    reduce: Reduction = field(default_factory=ResponseMean)
    only_in_loss: bool = False
    """Penalize only the tokens that enter the policy loss (SPO); False: all."""

    def __post_init__(self) -> None:
        require_at_least("coef", self.coef, 0.0, "GRPO in SAPO's Table 7: 0.01.")

    def __repr__(self) -> str:
        # studies identify finished runs by this text, so the newer field is omitted at its default
        return named_repr(self).replace(", only_in_loss=False", "")

    @property
    def name(self) -> str:
        """Name of the metric."""
        return "kl_loss"

    @property
    def needs(self) -> Needs:
        """The reference model's log-probabilities."""
        return frozenset({LOGP_REF})

    def mask(self, batch: Batch) -> Bool[Tensor, "B T"]:
        """Return all response tokens, or those of the policy loss with ``only_in_loss``."""
        return batch.loss_mask if self.only_in_loss else batch.rollouts.mask

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "B T"]:
        mask = self.mask(batch)
        logp_ref = batch.rollouts.column("logp_ref", "LossKL")
        # masked before the exponential: after it, the gradient of garbage would be 0 · inf
        return self.coef * self.estimator(keep(mask, outputs.logp), keep(mask, logp_ref))


@dataclass(frozen=True)
class PositiveNLL:
    """Negative log-likelihood of correct responses, times μ (VAPO); 0 if there are none.

    Correctness is what the reward reports (``Rollouts.correct``).
    """

    coef: float
    threshold: float = 0.5
    """Minimum reward of a correct response, if the reward does not report correctness."""
    reduce: Reduction = field(default_factory=TokenMean)

    @property
    def name(self) -> str:
        """Name of the metric."""
        return "positive_nll"

    @property
    def needs(self) -> Needs:
        """Columns that it reads: none, because the reward reports correctness."""
        return frozenset()

    def mask(self, batch: Batch) -> Bool[Tensor, "B T"]:
        """Return the tokens of correct responses."""
        return batch.rollouts.mask & batch.rollouts.is_correct(self.threshold)[:, None]

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "B T"]:
        return self.coef * nll(keep(batch.rollouts.mask, outputs.logp))


@dataclass(frozen=True)
class EntropyBonus:
    """Entropy bonus: −coef · H(π_θ) of each response token, averaged as ``reduce`` says.

    H is the entropy of the whole vocabulary at the sampling temperature, with gradients.
    """

    coef: float
    reduce: Reduction = field(default_factory=TokenMean)

    def __post_init__(self) -> None:
        require_at_least("coef", self.coef, 0.0, "0 adds no bonus.")

    @property
    def name(self) -> str:
        """Name of the metric."""
        return "entropy_bonus"

    @property
    def needs(self) -> Needs:
        """Columns that it reads: none. The entropy is in the outputs of the trained policy."""
        return frozenset()

    @property
    def uses_entropy(self) -> bool:
        """Whether the term reads ``Outputs.entropy``."""
        return True

    def mask(self, batch: Batch) -> Bool[Tensor, "B T"]:
        """Return all response tokens."""
        return batch.rollouts.mask

    def __call__(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "B T"]:
        if outputs.entropy is None:
            raise ValueError(
                "the entropy bonus needs the policy's entropies; got outputs without them. Pass "
                "Outputs(logp, entropy=…); on verl, set update.entropy_coef instead of the term."
            )
        return -self.coef * keep(batch.rollouts.mask, outputs.entropy)


@runtime_checkable
class RatioPart(Protocol):
    """Importance ratio: compares π_θ with π_old."""

    @property
    def over(self) -> Partition:
        """The units of the ratio."""
        ...

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        """Compute the ratio of each token's unit."""
        ...


def _check_limit(limit: float | None) -> None:
    if limit is not None:
        require_positive("limit", limit, "The authors' code uses 20; None does not clamp.")


@dataclass(frozen=True)
class TokenRatio:
    """Importance ratio of each token, π_θ(y_t) / π_old(y_t) (Eq. 2)."""

    limit: float | None = None
    """Clamp of each token's log-ratio."""

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    @property
    def over(self) -> Partition:
        """Single tokens."""
        return Token()

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return token_ratio(logp, logp_old, segments.token_mask, self.limit)


@dataclass(frozen=True)
class _UnitRatio:
    """Settings of a ratio over units: their partition, and the limit of log-ratios."""

    over: Partition
    limit: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)


@dataclass(frozen=True)
class GeometricMean(_UnitRatio):
    """Geometric mean of the token ratios in the token's unit (Eq. 8; over responses, GSPO)."""

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return geometric_mean_ratio(logp, logp_old, segments, self.limit)


@dataclass(frozen=True)
class RawRatio(_UnitRatio):
    """Product of the token ratios in the token's unit: exact, with high variance for long units."""

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return raw_ratio(logp, logp_old, segments, self.limit)


@dataclass(frozen=True)
class TokenwiseGeometricMean(_UnitRatio):
    """The geometric mean's value with the token's own gradient (GSPO-token)."""

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return gspo_token_ratio(logp, logp_old, segments, self.limit)


@dataclass(frozen=True)
class LogProb:
    """Log-probability log π_θ in place of the ratio, as in REINFORCE: no importance weight."""

    @property
    def over(self) -> Partition:
        """Single tokens."""
        return Token()

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return keep(segments.token_mask, logp)

    def recorded(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        """Compute the token ratio, which is recorded although the loss does not use it."""
        return token_ratio(logp, logp_old, segments.token_mask)
