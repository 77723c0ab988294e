"""VinePPO: steps credited by the change of a Monte-Carlo value, token ratios."""

from segcredit.algorithms.credit import ValueDifference
from segcredit.algorithms.objective import (
    K3,
    Clipped,
    ConstantMean,
    LossKL,
    TokenMean,
    Whiten,
)
from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.algorithms.ratio import TokenRatio
from segcredit.partition import Newline, Partition


def vineppo(
    samples: int = 9,
    clip: tuple[float, float] = (0.2, 0.2),
    kl: float = 1e-4,
    partition: Partition | None = None,
    most: int | None = None,
    truncated_reward: float | None = 0.0,
) -> PolicyGradient:
    """VinePPO (arXiv 2410.01679): K = 9 continuations per step, no critic.

    ``most`` limits the estimates to the prompt and that many steps (its GSM8K runs: 25). A
    truncated response or continuation earns ``truncated_reward``; None keeps its grade.

    Whitened over each mini-batch; KL 1e-4 · k3, clamped to [0, 10], summed over the response
    (its code). Steps are lines; its own splitters differ by data set (docs/deviations.md).
    """
    return PolicyGradient(
        credit=ValueDifference(partition or Newline(), samples, most, truncated_reward),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        adjust_minibatch=(Whiten(),),
        terms=(LossKL(kl, K3(limit=10.0), ConstantMean(1.0)),) if kl else (),
    )
