"""VAPO: VC-PPO whose λ grows with the response, plus imitation of correct responses."""

from segcredit.algorithms.credit import LengthAdaptiveGAE
from segcredit.algorithms.objective import BoundaryMSE, Clipped, PositiveNLL, TokenMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.partition import Token


def vapo(
    alpha: float = 0.05,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.28),
    positive_nll: float = 0.1,
    threshold: float = 0.5,
) -> PolicyGradient:
    """VAPO (arXiv 2504.05118): λ_actor = 1 − 1/(α l), λ_critic = 1, ε .2/.28, μ = .1.

    The paper samples 16 responses per prompt and pretrains the critic for 50 steps: settings of
    the run. λ is clamped to [0, 1]; the formula is negative below 20 tokens. The NLL term covers
    responses that the reward reports as correct; ``threshold`` is the minimum reward of a correct
    response if the reward does not report correctness.
    """
    return PolicyGradient(
        credit=LengthAdaptiveGAE(over=Token(), alpha=alpha, gamma=gamma, lam_critic=1.0),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        critic=BoundaryMSE(reduce=TokenMean(), half=True),
        terms=(PositiveNLL(positive_nll, threshold),) if positive_nll else (),
    )
