"""Whether a number rises over training: smoothing, Spearman's ρ, and the slope of a line."""

import numpy as np
from jaxtyping import Float

from segcredit.analysis.bootstrap import draws


def smooth(x: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """Centred moving average; at the ends over what is there, and over finite numbers only."""
    known = np.isfinite(x)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, x, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(x))
    first = np.maximum(at - (window - 1) // 2, 0)
    last = np.minimum(at + window // 2 + 1, len(x))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def ranks(x: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def spearman(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """Correlation of the ranks, over pairs that are finite; NaN where one of them is constant."""
    good = np.isfinite(x) & np.isfinite(y)
    a, b = ranks(x[good]), ranks(y[good])
    if len(a) < 2:
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm > 0 else float("nan")


def slope(
    x: Float[np.ndarray, " N"], y: Float[np.ndarray, "*B N"], weight: Float[np.ndarray, "*B N"]
) -> Float[np.ndarray, "*B"]:
    """Least squares: how much y changes per x; pairs without a finite y do not count."""
    known = np.isfinite(y)
    weight = np.where(known, weight, 0.0)
    y = np.where(known, y, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = weight.sum(axis=-1, keepdims=True)
        x_off = x - (weight * x).sum(axis=-1, keepdims=True) / total
        y_off = y - (weight * y).sum(axis=-1, keepdims=True) / total
        spread = (weight * x_off**2).sum(axis=-1)
        found = (weight * x_off * y_off).sum(axis=-1) / spread
    return np.where(spread > 0, found, np.nan)


def slope_over_steps(
    x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"], resamples: int, seed: int = 0
) -> Float[np.ndarray, " B"]:
    """The slope with the steps drawn again."""
    counts = draws(np.random.default_rng(seed), len(x), resamples).astype(np.float64)
    return slope(x, np.broadcast_to(y, counts.shape), counts)
