"""DPO and DPO+: preference pairs of a correct and an incorrect response to one prompt."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.columns import LOGP_REF, Needs
from segcredit.core.checks import (
    at_least_float32,
    finite_vector,
    keep,
    require,
    require_at_least,
    require_positive,
)
from segcredit.core.group import rank_within
from segcredit.core.losses import dpo as dpo_loss
from segcredit.core.losses import dpo_positive as dpo_positive_loss
from segcredit.core.losses import k1
from segcredit.types import Batch, Loss, MonteCarlo, NothingToLearn, Outputs, Rollouts


@dataclass(frozen=True)
class DirectPreference:
    """Direct preference optimization (arXiv 2305.18290); with a penalty, DPO+ (2402.13228)."""

    offline: ClassVar[bool] = True
    draws: ClassVar[bool] = True
    compares_responses: ClassVar[bool] = True

    beta: float = 0.1
    penalty: float = 0.0
    """λ of DPO+'s hinge on the chosen response's own log-ratio; 0 is DPO."""
    pairs_per_prompt: int = 64
    threshold: float = 0.5
    """Minimum reward of a correct response, if the reward does not report correctness."""
    temperature: float | None = None
    """Temperature of log π and log π_ref; None: the sampling temperature (VinePPO's code)."""

    def __post_init__(self) -> None:
        require_positive("beta", self.beta, "0.1 is usual.")
        require_at_least("penalty", self.penalty, 0.0, "DPO+ uses 50; 0 is DPO.")
        require_at_least("pairs_per_prompt", self.pairs_per_prompt, 1, "VinePPO uses 64.")
        if self.temperature is not None:
            require_positive("temperature", self.temperature, "None: the sampling temperature.")

    @property
    def needs(self) -> Needs:
        return frozenset({LOGP_REF})

    def prepare(
        self,
        rollouts: Rollouts,
        monte_carlo: MonteCarlo | None = None,
        generator: torch.Generator | None = None,
    ) -> Batch:
        """Pair correct with incorrect responses per prompt; chosen and rejected rows alternate.

        ``generator`` samples the pairs of prompts that have more than ``pairs_per_prompt``; None:
        torch's global generator.
        """
        require(finite_vector("reward", rollouts.reward))
        chosen, rejected = self._pairs(rollouts, generator)
        if len(chosen) == 0:
            raise NothingToLearn(
                "no prompt has both a correct and an incorrect response, so there is no pair. "
                "Sample more responses per prompt, or other prompts."
            )
        rows = torch.stack([chosen, rejected], dim=1).flatten()
        paired = rollouts.select(rows)
        return Batch(rollouts=paired, loss_mask=paired.mask, rows_per_item=2)

    def _pairs(
        self, rollouts: Rollouts, generator: torch.Generator | None
    ) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
        """Return the rows of the chosen and of the rejected responses.

        A prompt with more pairs than ``pairs_per_prompt`` gives a random sample of them, without
        replacement. A truncated response is never the chosen one, but it may be the rejected one.
        """
        correct = rollouts.is_correct(self.threshold) & ~rollouts.truncated
        order = correct.long().argsort(descending=True, stable=True)
        order = order[rollouts.group[order].argsort(stable=True)]  # by prompt, correct ones first
        _, prompt, size = rollouts.group[order].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        right = torch.zeros_like(size).index_add(0, prompt, correct[order].long())
        wrong = size - right
        num_pairs = right * wrong
        of = torch.repeat_interleave(num_pairs)  # the prompt of each pair
        k = torch.arange(len(of), device=of.device) - (num_pairs.cumsum(0) - num_pairs)[of]
        if bool((num_pairs > self.pairs_per_prompt).any()):
            shuffled = torch.randperm(len(of), generator=generator).to(of.device)
            drawn = shuffled[rank_within(of[shuffled]) < self.pairs_per_prompt].sort().values
            of, k = of[drawn], k[drawn]
        first = (size.cumsum(0) - size)[of]
        i, j = k // wrong[of], k % wrong[of]
        return order[first + i], order[first + right[of] + j]

    def minibatch(self, batch: Batch, micro_batch: Int[Tensor, " B"] | None = None) -> Batch:
        """Compute the mean over pairs; both rows of a pair carry its share."""
        num_pairs = len(batch.rollouts) // 2
        like = at_least_float32(batch.rollouts.logp_old)
        share = like.new_full((len(like),), 1.0 / num_pairs)
        return replace(batch, shares={"policy": share})

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute −log σ of each pair's margin."""
        chosen, rejected = self._log_ratios(outputs, batch)
        if self.penalty:
            per_pair = dpo_positive_loss(chosen, rejected, self.beta, self.penalty)
        else:
            per_pair = dpo_loss(chosen, rejected, self.beta)
        share = batch.share("policy")[0::2]
        policy = (per_pair * share).sum()
        won = (chosen > rejected).detach().to(share.dtype)
        metrics = {"preference_loss": policy.detach(), "preference_accuracy": (won * share).sum()}
        return Loss(policy=policy, metrics=metrics)

    def _log_ratios(
        self, outputs: Outputs, batch: Batch
    ) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        logp_ref = batch.rollouts.column("logp_ref", "DirectPreference")
        delta = keep(batch.loss_mask, k1(outputs.logp, logp_ref)).sum(dim=1)
        return delta[0::2], delta[1::2]


def dpo(
    beta: float = 0.1,
    pairs_per_prompt: int = 64,
    threshold: float = 0.5,
    temperature: float | None = None,
) -> DirectPreference:
    """DPO with β = .1; pairs and temperature as in :func:`dpo_positive`."""
    return DirectPreference(beta, 0.0, pairs_per_prompt, threshold, temperature)


def dpo_positive(
    beta: float = 0.1,
    penalty: float = 50.0,
    pairs_per_prompt: int = 64,
    threshold: float = 0.5,
    temperature: float | None = None,
) -> DirectPreference:
    """DPO+ (also DPOP) as VinePPO runs it: λ = 50, β = .1 on MATH and .3 on GSM8K."""
    return DirectPreference(beta, penalty, pairs_per_prompt, threshold, temperature)
