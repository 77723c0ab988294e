"""VC-PPO: PPO with a pretrained critic and a λ of its own for it."""

from segcredit.algorithms.credit import GAE
from segcredit.algorithms.objective import Clipped, RewardKL, TokenMean, Whiten
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ppo import VERL_CRITIC
from segcredit.algorithms.ratio import TokenRatio
from segcredit.partition import Token


def vc_ppo(
    lam: float = 0.99,
    lam_critic: float = 1.0,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
) -> PolicyGradient:
    """Value-Calibrated PPO (arXiv 2503.01491): decoupled GAE, λ_critic = 1.

    Defaults: SAPO, Table 7 (the original's λ_actor is about .95). Its other half, pretraining the
    critic on Monte-Carlo returns under the frozen policy, is a stage of the run, not of the loss.
    """
    return PolicyGradient(
        credit=GAE(over=Token(), lam=lam, gamma=gamma, lam_critic=lam_critic),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip, dual=3.0),
        reduce=TokenMean(),
        critic=VERL_CRITIC,
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(),),
    )
