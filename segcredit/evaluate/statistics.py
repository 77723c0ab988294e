"""Estimates over prompts: pass@k without bias, intervals by bootstrap."""

from collections.abc import Sequence
from math import comb

import torch

RESAMPLES = 2000


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that one of k responses is right, drawn from ``samples`` of which ``right`` are.

    1 − C(n − c, k) / C(n, k): unbiased, unlike 1 − (1 − c/n)^k.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k needs 1 ≤ k ≤ the {samples} samples; got k={k}.")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def mean_interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of shares, one per prompt: the prompt is what was drawn.

    By bootstrap; where all are 0 or all are 1, drawing again says nothing, and the exact binomial
    interval of so many prompts stands instead: 0 of 3 is 0 to 71 %, not 0 to 0.
    """
    if not values or min(values) != max(values) or values[0] not in (0, 1):
        return bootstrap_interval(values, share)
    far = ((1 - share) / 2) ** (1 / len(values))  # Clopper and Pearson, at their ends
    return (0.0, 1 - far) if values[0] == 0 else (far, 1.0)


def bootstrap_interval(
    values: Sequence[float], share: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean, prompts drawn again with replacement."""
    if not values:
        raise ValueError("an interval needs at least one value; got none.")
    x = torch.tensor(values, dtype=torch.float64)
    drawn = torch.randint(
        len(x), (RESAMPLES, len(x)), generator=torch.Generator().manual_seed(seed)
    )
    means = x[drawn].mean(dim=1)
    ends = torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)
    low, high = means.quantile(ends).tolist()
    return low, high
