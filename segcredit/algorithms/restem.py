"""RestEM: supervised fine-tuning on the correct responses."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from segcredit.columns import INITIAL_POLICY, Needs
from segcredit.core.checks import (
    at_least_float32,
    finite_vector,
    keep,
    require,
    require_at_least,
    require_positive,
)
from segcredit.core.group import rank_within
from segcredit.core.losses import nll, response_shares, weighted_sum
from segcredit.types import Batch, Loss, MonteCarlo, NothingToLearn, Outputs, Rollouts


@dataclass(frozen=True)
class RestEM:
    """Expectation-maximization self-training (arXiv 2312.06585): filter, then NLL.

    It keeps responses that are correct and not truncated. Each step of the run is one round, which
    trains from the *initial* checkpoint with a new optimizer.
    """

    offline: ClassVar[bool] = True

    threshold: float = 1.0
    """Minimum reward of a correct response, if the reward does not report correctness."""
    per_prompt: int = 10
    """Maximum number of kept responses per prompt."""
    temperature: float | None = None
    """Temperature of log π in the loss; None: the sampling temperature (VinePPO's code)."""

    def __post_init__(self) -> None:
        require_at_least("per_prompt", self.per_prompt, 1, "The paper keeps 10.")
        if self.temperature is not None:
            require_positive("temperature", self.temperature, "None: the sampling temperature.")

    @property
    def needs(self) -> Needs:
        return frozenset({INITIAL_POLICY})

    def prepare(self, rollouts: Rollouts, monte_carlo: MonteCarlo | None = None) -> Batch:
        """Keep correct responses."""
        require(finite_vector("reward", rollouts.reward))
        kept = rollouts.is_correct(self.threshold) & ~rollouts.truncated
        if not bool(kept.any()):
            raise NothingToLearn(
                f"expected a correct response that is not truncated (if the reward does not report "
                f"correctness: a reward of at least {self.threshold}); got none, so there is "
                f"nothing to imitate. Sample more, or lower the threshold."
            )
        rows = kept.nonzero().flatten()
        rows = rows[rank_within(rollouts.group[rows]) < self.per_prompt]
        kept_rollouts = rollouts.select(rows)
        return Batch(rollouts=kept_rollouts, loss_mask=kept_rollouts.mask)

    def minibatch(self, batch: Batch, micro_batch: Int[Tensor, " B"] | None = None) -> Batch:
        """Compute the mean over responses of each response's mean."""
        return replace(batch, shares={"policy": response_shares(batch.loss_mask, _dtype(batch))})

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute −log π_θ."""
        policy = weighted_sum(keep(batch.loss_mask, nll(outputs.logp)), batch.share("policy"))
        return Loss(policy=policy, metrics={"nll": policy.detach()})


def _dtype(batch: Batch) -> torch.dtype:
    return at_least_float32(batch.rollouts.logp_old).dtype


def restem(
    threshold: float = 1.0, per_prompt: int = 10, temperature: float | None = None
) -> RestEM:
    """RestEM as VinePPO runs it; ``temperature=1.0`` fits the model's own likelihood."""
    return RestEM(threshold, per_prompt, temperature)
