"""GSPO: GRPO's credit with one ratio per response."""

from segcredit.algorithms.credit import GroupZScore
from segcredit.algorithms.objective import Clipped, LossKL, ResponseMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import GeometricMean, TokenwiseGeometricMean
from segcredit.partition import Response


def gspo(
    clip: tuple[float, float] = (3e-4, 4e-4), kl: float = 0.0, tokenwise: bool = False
) -> PolicyGradient:
    """Group Sequence Policy Optimization (arXiv 2507.18071): ε 3e-4 / 4e-4.

    A response's mean log-ratio is far smaller than a token's, hence the narrow ε. ``tokenwise``
    is GSPO-token: the same value, the gradient through each token's own log-prob.
    """
    units = Response()
    return PolicyGradient(
        credit=GroupZScore(),
        ratio=TokenwiseGeometricMean(over=units) if tokenwise else GeometricMean(over=units),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        terms=(LossKL(kl),) if kl else (),
    )
