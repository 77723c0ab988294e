"""SAPO (segment-aligned): the paper, the authors' released code, and Table 2's ablation."""

from segcredit.algorithms.credit import GAE
from segcredit.algorithms.objective import (
    Adjustment,
    BoundaryMSE,
    Clamp,
    Clipped,
    MicroBatchTokenMean,
    ResponseMean,
    RewardKL,
    TokenMean,
    Whiten,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import GeometricMean, TokenRatio
from segcredit.core.segments import ValueAt
from segcredit.partition import Partition, TopEntropy, float_ceil, float_nudge

FRACTION = 0.30
"""k of §5.1."""


def _units(fraction: float, partition: Partition | None) -> Partition:
    if partition is None:
        return TopEntropy(fraction)
    if fraction != FRACTION:
        raise ValueError(
            f"pass fraction or partition, not both; got fraction={fraction} and {partition!r}."
        )
    return partition


def sapo(
    fraction: float = FRACTION,
    lam: float = 0.99,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
    partition: Partition | None = None,
    value_at: ValueAt = "start",
    whiten: bool = False,
    clamp: float | None = None,
    dual_clip: float | None = None,
    token_mean: bool = False,
    value_everywhere: bool = False,
) -> PolicyGradient:
    """Segment-Aligned Policy Optimization (arXiv 2605.01327, Algorithm 1), as the paper states it.

    Defaults: §5.1 (k = 30) and Table 7 (λ, γ, KL). The paper's ε is symmetric and never given;
    .2 is PPO's usual one. ``partition`` replaces the top-entropy segments (Table 3). The next five
    are what the authors' code does otherwise, to be tried one at a time: where V is read, whitened
    and limited advantages, the dual clip, a mean over tokens instead of each response's own. The
    last is ours: the critic learns at every token, not at boundaries alone.
    """
    segments = _units(fraction, partition)  # §4.2, Eq. 11
    adjust: tuple[Adjustment, ...] = (Whiten(),) if whiten else ()
    return PolicyGradient(
        credit=GAE(over=segments, lam=lam, gamma=gamma, value_at=value_at),  # Eq. 6–7
        ratio=GeometricMean(over=segments),  # Eq. 8
        surrogate=Clipped(*clip, dual=dual_clip),  # Eq. 9
        reduce=TokenMean() if token_mean else ResponseMean(),  # the 1/T of Eq. 9
        critic=BoundaryMSE(everywhere=value_everywhere),  # Eq. 10
        kl=RewardKL(kl) if kl else None,  # Table 7
        adjust=adjust if clamp is None else (*adjust, Clamp(clamp)),
    )


def sapo_token_ratio(
    fraction: float = FRACTION,
    lam: float = 0.99,
    gamma: float = 1.0,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 0.001,
    partition: Partition | None = None,
) -> PolicyGradient:
    """Table 2's "naive-IS": SAPO's credit with PPO's ratio, everything else equal."""
    return PolicyGradient(
        credit=GAE(over=_units(fraction, partition), lam=lam, gamma=gamma),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=ResponseMean(),
        critic=BoundaryMSE(),
        kl=RewardKL(kl) if kl else None,
    )


def sapo_authors(
    fraction: float = FRACTION, lam: float = 0.99, gamma: float = 1.0, kl: float = 0.001
) -> PolicyGradient:
    """SAPO as the authors' released code computes it (their run_sapo.sh).

    Every difference from the paper that lies in the mathematics, one per line; docs/deviations.md
    has them all, with those that lie in the reward and the plumbing.
    """
    return PolicyGradient(
        credit=GAE(
            over=TopEntropy(fraction, count=float_ceil),  # rounded in floating point
            lam=lam,
            gamma=gamma,
            value_at="end",  # V before the segment's last token
        ),
        ratio=GeometricMean(
            over=TopEntropy(fraction, count=float_nudge),  # rounded another way
            limit=20.0,  # log-ratios clamped per token
        ),
        surrogate=Clipped(0.2, 0.28, dual=3.0),  # asymmetric, dual-clipped
        reduce=MicroBatchTokenMean(),  # not 1/T, and dependent on the micro-batches
        critic=BoundaryMSE(reduce=MicroBatchTokenMean(), half=True, clip=0.5),
        kl=RewardKL(kl) if kl else None,
        adjust=(Whiten(), Clamp(5.0)),  # neither is in the paper
    )
