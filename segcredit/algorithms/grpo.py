"""GRPO: the response against its siblings, token ratios."""

from segcredit.algorithms.credit import GroupZScore
from segcredit.algorithms.objective import Clipped, LossKL, ResponseMean
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.core.group import Std


def grpo(
    std: Std = "sample",
    eps: float = 1e-6,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.01,
) -> PolicyGradient:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

    KL: SAPO, Table 7 (k3 loss, .01; DeepSeekMath .04), with 8 samples per prompt. Deviation and ε
    as in verl; ``std="none"`` is Dr. GRPO's centring.
    """
    return PolicyGradient(
        credit=GroupZScore(std=std, eps=eps),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        terms=(LossKL(kl),) if kl else (),
    )
