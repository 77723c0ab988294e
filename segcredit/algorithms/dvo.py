"""DVO: regression of each step's log-ratio to the reference on the change of its value."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from segcredit.algorithms.credit import Case, ValueDifference
from segcredit.columns import LOGP_REF, Needs
from segcredit.core.advantages import terminal_reward
from segcredit.core.checks import require_positive
from segcredit.core.losses import capped_weight, direct_value, k1, token_shares, weighted_sum
from segcredit.partition import Newline, Partition
from segcredit.types import Batch, Loss, MonteCarlo, Outputs, Rollouts


@dataclass(frozen=True)
class DirectValue:
    """Direct Value Optimization (arXiv 2502.13723): w · ½ (β Σ_step log-ratio − target)².

    target = r_m + V̂(s_{m+1}) − V̂(s_m), never whitened; mean over the mini-batch's estimated steps.
    """

    fits_credit: ClassVar[bool] = True

    beta: float = 0.1
    credit: ValueDifference = field(default_factory=lambda: ValueDifference(over=Newline()))
    weight_cap: float | None = 10.0
    """w = min(exp Σ_step (log π − log π_old), cap), a constant (SPO's code); None: w = 1 (the
    paper, offline)."""

    def __post_init__(self) -> None:
        require_positive("beta", self.beta, "SPO's code uses 0.1.")
        if self.weight_cap is not None:
            require_positive("weight_cap", self.weight_cap, "SPO's code uses 10; None: no weight.")

    @property
    def offline(self) -> bool:
        """Whether the loss ignores π_old; it does if there is no weight."""
        return self.weight_cap is None

    @property
    def needs(self) -> Needs:
        return self.credit.needs | self.credit.over.needs | {LOGP_REF}

    @torch.no_grad()
    def prepare(self, rollouts: Rollouts, monte_carlo: MonteCarlo | None = None) -> Batch:
        """Compute steps and their targets."""
        segments = self.credit.over(rollouts)
        reward = terminal_reward(rollouts.reward, rollouts.mask)
        case = Case(rollouts, reward, segments, monte_carlo)
        credit, known = self.credit.credit_and_estimated(case)
        # a step without a value has no target; it is left out
        learned = segments.spread(known.to(credit.advantage.dtype)).bool()
        return Batch(rollouts=rollouts, loss_mask=learned, credit=credit)

    def minibatch(self, batch: Batch, micro_batch: Int[Tensor, " B"] | None = None) -> Batch:
        """Compute the mean over estimated steps."""
        if batch.credit is None:
            raise ValueError("the batch has no targets. Make it with algorithm.prepare(rollouts).")
        segments = batch.credit.segments
        known = segments.at_start(batch.loss_mask.float()).bool()
        return replace(batch, shares={"policy": token_shares(known, batch.credit.advantage.dtype)})

    def loss(self, outputs: Outputs, batch: Batch) -> Loss:
        """Compute the squared error of every step."""
        if batch.credit is None:
            raise ValueError("the batch has no targets. Make it with algorithm.prepare(rollouts).")
        segments = batch.credit.segments
        logp_ref = batch.rollouts.column("logp_ref", "DirectValue")
        step = segments.sum(k1(outputs.logp, logp_ref))
        target = segments.at_start(batch.credit.advantage)
        error, share = direct_value(step, target, self.beta), batch.share("policy")
        metrics = {}
        if self.weight_cap is not None:
            moved = segments.sum(k1(outputs.logp, batch.rollouts.logp_old))
            weight = capped_weight(moved, self.weight_cap)
            error = weight * error
            metrics["step_weight"] = weighted_sum(weight, share)
        policy = weighted_sum(error, share)
        return Loss(policy=policy, metrics={"value_regression": policy.detach(), **metrics})


def dvo(
    beta: float = 0.1,
    samples: int = 9,
    partition: Partition | None = None,
    weight_cap: float | None = 10.0,
) -> DirectValue:
    """DVO with Monte-Carlo values at each line, weighted as in SPO's repository.

    We could not find the paper's β; .1 and the weight are from SPO's repository.
    ``weight_cap=None`` is the paper's unweighted, offline loss at temperature 1.
    """
    credit = ValueDifference(over=partition or Newline(), samples=samples)
    return DirectValue(beta, credit, weight_cap)
