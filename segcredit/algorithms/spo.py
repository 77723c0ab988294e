"""SPO (segment): segments between unlikely tokens, credited by Monte-Carlo values or a tree."""

from segcredit.algorithms.credit import TreeDifference, ValueDifference
from segcredit.algorithms.objective import (
    Clipped,
    ConstantMean,
    LossKL,
    LowProbability,
    TokenMean,
    Whiten,
    clamped_k3,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.partition import ProbabilityCutpoints


def spo_chain(
    threshold: float = 0.9,
    every: int = 5,
    samples: int = 9,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
) -> PolicyGradient:
    """Segment Policy Optimization, chain (arXiv 2505.23564).

    Cut before every 5th token with π_old < .9; 9 continuations per cut; only tokens with
    π_old < .9 enter whitening and loss.
    """
    return PolicyGradient(
        credit=ValueDifference(over=ProbabilityCutpoints(threshold, every), samples=samples),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        only=LowProbability(threshold),
        adjust_minibatch=(Whiten(),),
        terms=(LossKL(kl, clamped_k3, ConstantMean(1.0)),) if kl else (),
    )


def spo_tree(
    threshold: float = 0.9,
    normalise: bool = False,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
) -> PolicyGradient:
    """SPO over a tree of continuations, each edge one row of the rollouts.

    V(node) = mean of its children, Â(edge) = V(child) − V(parent); ``normalise`` divides by the
    siblings' deviation (its "grpo"). Branching 6-6-6 and the edge buffer are settings of the run.
    """
    return PolicyGradient(
        credit=TreeDifference(normalise=normalise),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        only=LowProbability(threshold),
        terms=(LossKL(kl, clamped_k3, ConstantMean(1.0)),) if kl else (),
    )
