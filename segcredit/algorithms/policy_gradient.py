"""Policy-gradient methods as a composition of parts: units of credit, units of ratio, objective."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.algorithms.credit import GAE, Case, CreditPart, ValueCredit
from segcredit.algorithms.objective import (
    Adjustment,
    BoundaryMSE,
    Clipped,
    ConstantMean,
    EntropyBonus,
    GeometricMean,
    LogProbSurrogate,
    RatioPart,
    Reduction,
    RewardKL,
    Surrogate,
    Term,
    TokenFilter,
)
from segcredit.columns import VALUE, Column, resolve
from segcredit.core.advantages import Credit, terminal_reward
from segcredit.core.losses import segment_policy_loss, weighted_sum
from segcredit.core.segments import Segments
from segcredit.partition import Partition
from segcredit.types import Batch, Loss, MonteCarlo, Outputs, Rollouts


@dataclass(frozen=True)
class PolicyGradient:
    """A method composed of a credit estimator, an importance ratio, a surrogate and a reduction.

    The frozen parts are the configuration: ``repr(algorithm)`` records what ran.
    """

    credit: CreditPart
    ratio: RatioPart
    surrogate: Surrogate | LogProbSurrogate
    reduce: Reduction
    critic: BoundaryMSE | None = None
    kl: RewardKL | None = None
    adjust: tuple[Adjustment, ...] = ()
    """Adjustments of the advantages over the whole rollout batch."""
    adjust_minibatch: tuple[Adjustment, ...] = ()
    """Adjustments of the advantages over each mini-batch (VinePPO, SPO)."""
    only: TokenFilter | None = None
    """Selects the tokens that enter the policy loss; None: all."""
    terms: tuple[Term, ...] = ()

    def __post_init__(self) -> None:
        if self.critic is not None and VALUE not in resolve(self.credit.needs):
            raise ValueError(
                f"a critic learns from the value targets of GAE; got credit {self.credit!r}, "
                f"which has none. Pass critic=None, or credit=GAE(…)."
            )

        names = ["policy", "value", *(term.name for term in self.terms)]
        if len(set(names)) < len(names):
            raise ValueError(
                f"each term needs its own name, other than 'policy' and 'value'; got {names[2:]}."
            )

    @property
    def needs(self) -> frozenset[Column]:
        """Union of the columns that the parts read, so that every forward pass is used."""
        needs = self.credit.needs | self.credit.over.needs | self.ratio.over.needs
        if self.kl is not None:
            needs |= self.kl.needs
        return resolve(needs.union(*(term.needs for term in self.terms)))

    @property
    def uses_entropy(self) -> bool:
        """Whether a term of the loss reads the entropy of π_θ (``Outputs.entropy``)."""
        return any(getattr(term, "uses_entropy", False) for term in self.terms)

    def with_entropy_bonus(self, coef: float) -> "PolicyGradient":
        """Add an entropy bonus, averaged like the policy loss; 0 adds none."""
        if coef == 0.0:
            return self
        return replace(self, terms=(*self.terms, EntropyBonus(coef, self.reduce)))

    @torch.no_grad()
    def prepare(self, rollouts: Rollouts, monte_carlo: MonteCarlo | None = None) -> Batch:
        """Compute segments and credit, once per rollout batch and distinct partition."""
        if self.kl is not None:
            reward = self.kl(rollouts)
        else:
            reward = terminal_reward(rollouts.reward, rollouts.mask)
        return self.prepare_rewarded(rollouts, reward, monte_carlo)

    @torch.no_grad()
    def prepare_rewarded(
        self,
        rollouts: Rollouts,
        reward: Float[Tensor, "B T"],
        monte_carlo: MonteCarlo | None = None,
    ) -> Batch:
        """Prepare from given rewards per token; ``kl`` is not applied to them."""
        segments: dict[Partition, Segments] = {}
        for partition in (self.credit.over, self.ratio.over):
            if partition not in segments:
                segments[partition] = partition(rollouts)
        credit = self.credit(Case(rollouts, reward, segments[self.credit.over], monte_carlo))
        loss_mask = rollouts.mask if self.only is None else self.only(rollouts)
        batch = Batch(
            rollouts=rollouts,
            loss_mask=loss_mask,
            credit=credit,
            ratio_segments=segments[self.ratio.over],
        )
        return _adjusted(batch, self.adjust)

    @torch.no_grad()
    def recorded_ratio(self, logp: Float[Tensor, "B T"], batch: Batch) -> Float[Tensor, "B T"]:
        """Compute the method's own ratio of a prepared batch, to record it after the update."""
        if batch.ratio_segments is None:
            raise ValueError("the batch has no ratio segments. Make it with algorithm.prepare(…).")
        ratio = getattr(self.ratio, "recorded", self.ratio)
        return ratio(logp, batch.rollouts.logp_old, batch.ratio_segments)

    def returns_only(self) -> "PolicyGradient":
        """Return the method with Monte-Carlo returns as value targets, to pretrain its critic."""
        credit = self.credit
        if not isinstance(credit, ValueCredit) or self.critic is None:
            raise ValueError(f"this method has no critic to pretrain: {self!r}. Use one with GAE.")
        returns = GAE(credit.over, lam=1.0, gamma=credit.gamma, value_at=credit.value_at)
        return replace(self, credit=returns, kl=None, terms=(), adjust=(), adjust_minibatch=())

    def minibatch(self, batch: Batch, micro_batch: Int[Tensor, " B"] | None = None) -> Batch:
        """Compute the denominators of every term, and the adjustments per mini-batch."""
        advantage = _credit(batch).advantage
        if advantage.is_inference():
            raise ValueError(
                "the batch was prepared under torch.inference_mode(), so no gradient can be taken "
                "with it. Prepare it under torch.no_grad()."
            )

        def shares_of(reduce: Reduction, mask: Tensor) -> Tensor:
            return _shares(reduce, mask, batch.in_loss, micro_batch, advantage.dtype)

        shares = {"policy": shares_of(self.reduce, batch.loss_mask)}
        if isinstance(self.reduce, ConstantMean):  # not a mean, which metrics are
            # 0 if no response enters the loss
            shares["metrics"] = shares["policy"] / shares["policy"].sum().clamp(min=1e-30)
        if self.critic is not None:
            shares["value"] = self.critic.shares(_credit(batch), micro_batch)
        for term in self.terms:
            shares[term.name] = shares_of(term.reduce, term.mask(batch))
        return replace(_adjusted(batch, self.adjust_minibatch), shares=shares)

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute Σ share · term over a micro-batch; the sum over micro-batches is the loss."""
        credit, rollouts = _credit(batch), batch.rollouts
        if batch.ratio_segments is None:
            raise ValueError("the batch has no ratio segments. Make it with algorithm.prepare(…).")
        policy, metrics = self._policy_loss(outputs.logp, batch, batch.ratio_segments)
        metrics["policy_loss"] = policy.detach()
        for term in self.terms:
            extra = weighted_sum(term(outputs, batch), batch.share(term.name))
            metrics[term.name] = extra.detach()
            policy = policy + extra
        if self.critic is None:
            return Loss(policy=policy, metrics=metrics)
        if outputs.value is None:
            raise ValueError("this algorithm trains a critic; got outputs without values.")
        value = self.critic(
            outputs.value,
            rollouts.column("value", "the critic's loss"),
            credit,
            batch.share("value"),
        )
        return Loss(policy=policy, value=value, metrics={**metrics, "value_loss": value.detach()})

    def _policy_loss(
        self, logp: Tensor, batch: Batch, segments: Segments
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute Σ share · weight · surrogate(ratio, Â) and the surrogate's metrics."""
        logp_old, advantage = batch.rollouts.logp_old, _credit(batch).advantage
        share, weight = batch.share("policy"), batch.weight
        ratio_part, clip = self.ratio, self.surrogate
        # exactly these types, no subclasses: one CUDA kernel computes this pair
        if type(ratio_part) is GeometricMean and ratio_part.limit is None and type(clip) is Clipped:
            clips = (clip.low, clip.high, clip.dual)
            # the loss is proportional to the advantage, so this weights the token's term
            weighed = advantage if weight is None else advantage * weight
            return segment_policy_loss(logp, logp_old, weighed, segments, *clips, share)
        if isinstance(clip, LogProbSurrogate):
            surrogate, watched = clip.from_log_probs(logp, logp_old, advantage, segments)
        else:
            ratio = ratio_part(logp, logp_old, segments)
            surrogate = clip(ratio, advantage)
            watched = clip.metrics(ratio.detach(), advantage)
        policy = weighted_sum(surrogate if weight is None else surrogate * weight, share)
        mean = batch.shares.get("metrics", share)
        return policy, {name: weighted_sum(x, mean) for name, x in watched.items()}


def _shares(
    reduce: Reduction,
    mask: Bool[Tensor, "B T"],
    in_loss: Bool[Tensor, " B"] | None,
    micro_batch: Int[Tensor, " B"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "B T"]:
    """Compute shares as if the mini-batch had only the responses that enter the loss."""
    if in_loss is None:
        return reduce(mask, micro_batch, dtype)
    shares = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    if bool(in_loss.any()):
        some = None if micro_batch is None else micro_batch[in_loss]
        shares[in_loss] = reduce(mask[in_loss], some, dtype)
    return shares


def _credit(batch: Batch) -> Credit:
    if batch.credit is None:
        raise ValueError("the batch has no credit. Make it with algorithm.prepare(rollouts).")
    return batch.credit


def _adjusted(batch: Batch, adjustments: tuple[Adjustment, ...]) -> Batch:
    if not adjustments:
        return batch
    credit = _credit(batch)
    # SPO's code falls back to all tokens without unlikely ones; a single one has no variance either
    mask = batch.loss_mask if int(batch.loss_mask.sum()) > 1 else batch.rollouts.mask
    for adjustment in adjustments:
        credit = replace(credit, advantage=adjustment(credit.advantage, mask))
    return replace(batch, credit=credit)
