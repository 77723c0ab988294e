"""SPO (segment): segments between unlikely tokens, credited by Monte-Carlo values or a tree."""

from segcredit.algorithms.credit import CreditPart, TreeDifference, ValueDifference
from segcredit.algorithms.objective import (
    K3,
    Clipped,
    ConstantMean,
    LossKL,
    LowProbability,
    TokenMean,
    Whiten,
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
    truncated_reward: float | None = 0.0,
) -> PolicyGradient:
    """Segment Policy Optimization, chain (arXiv 2505.23564).

    Cut before every 5th token with π_old < .9; 9 continuations per cut; only tokens with
    π_old < .9 enter whitening, policy loss and KL. Truncated responses and continuations earn 0.
    """
    cuts = ProbabilityCutpoints(threshold, every)
    credit = ValueDifference(cuts, samples, truncated_reward=truncated_reward)
    return _spo(credit, threshold, clip, kl)


def spo_tree(
    threshold: float = 0.9,
    normalise: bool = False,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
) -> PolicyGradient:
    """SPO over a tree of continuations, each edge one row of the rollouts.

    V(node) = mean of its children, Â(edge) = V(child) − V(parent); ``normalise`` divides by the
    siblings' deviation (its "grpo"). The update is the chain's. A truncated leaf keeps its grade,
    as in SPO's code. Branching is a setting of the run.
    """
    return _spo(TreeDifference(normalise=normalise), threshold, clip, kl)


def _spo(
    credit: CreditPart, threshold: float, clip: tuple[float, float], kl: float
) -> PolicyGradient:
    """Build the update that SPO's chain and tree share (its ppo_trainer.py)."""
    # SPO's cap of 1e9 on the estimate has no effect: e^10 is 22026
    penalty = LossKL(kl, K3(log_ratio_limit=10.0), ConstantMean(1.0), only_in_loss=True)
    return PolicyGradient(
        credit=credit,
        ratio=TokenRatio(limit=10.0),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        only=LowProbability(threshold),
        adjust_minibatch=(Whiten(),),
        terms=(penalty,) if kl else (),
    )
