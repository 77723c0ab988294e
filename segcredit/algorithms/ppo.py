"""PPO: token advantages, token ratios."""

from segcredit.algorithms.credit import GAE
from segcredit.algorithms.objective import BoundaryMSE, Clipped, RewardKL, TokenMean, Whiten
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.partition import Token

VERL_CRITIC = BoundaryMSE(reduce=TokenMean(), half=True, clip=0.5)
"""verl's value loss: every token, ½, clipped at .5. The SAPO paper's baselines ran on verl."""


def ppo(
    lam: float = 0.95,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
) -> PolicyGradient:
    """Proximal Policy Optimization (arXiv 1707.06347) as the SAPO paper's baseline.

    λ, γ and KL: SAPO, Table 7. The rest is not reported there and follows verl, on which the
    baseline ran: whitened advantages, token mean, dual clip 3, its value loss.
    """
    return PolicyGradient(
        credit=GAE(over=Token(), lam=lam, gamma=gamma),  # Eq. 4
        ratio=TokenRatio(),  # Eq. 2
        surrogate=Clipped(*clip, dual=3.0),  # Eq. 3
        reduce=TokenMean(),
        critic=VERL_CRITIC,
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(),),
    )
