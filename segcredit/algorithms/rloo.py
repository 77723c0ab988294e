"""RLOO: the response against the mean of its siblings."""

from dataclasses import replace

from segcredit.algorithms.credit import LeaveOneOut
from segcredit.algorithms.grpo import grpo_spo
from segcredit.algorithms.objective import (
    Clipped,
    ConstantMean,
    ResponseMean,
    RewardKL,
    Unclipped,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import LogProb, RawRatio
from segcredit.partition import Response


def rloo(clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.05) -> PolicyGradient:
    """REINFORCE leave-one-out with the raw sequence ratio clipped, so that batches can be reused.

    As in TRL: β = .05 (k1, summed into the reward), clip .2 on exp Σ x.
    """
    return PolicyGradient(
        credit=LeaveOneOut(),
        ratio=RawRatio(over=Response()),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        kl=RewardKL(kl) if kl else None,
    )


def rloo_reinforce(kl: float = 0.05) -> PolicyGradient:
    """RLOO as published (arXiv 2402.14740): −Â log π(y | x), no ratio, no clip, on-policy."""
    return PolicyGradient(
        credit=LeaveOneOut(),
        ratio=LogProb(),
        surrogate=Unclipped(),
        reduce=ConstantMean(1.0),
        kl=RewardKL(kl) if kl else None,
    )


def rloo_spo(clip: tuple[float, float] = (0.2, 0.2), kl: float = 1e-4) -> PolicyGradient:
    """RLOO as SPO's repository runs it (AIFrameResearch/SPO): Figure 4's baseline.

    ``grpo_spo`` with leave-one-out credit: token ratios, whitening, k3 in the loss.
    """
    return replace(grpo_spo(clip, kl), credit=LeaveOneOut())
