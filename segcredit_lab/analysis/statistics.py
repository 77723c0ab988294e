"""Quantiles, bootstrap intervals, smoothing and trends."""

import numpy as np
from jaxtyping import Float, Int


def smooth(x: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """Compute a centered moving average over finite numbers; the window is cut off at the ends."""
    known = np.isfinite(x)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, x, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(x))
    first = np.maximum(at - (window - 1) // 2, 0)
    last = np.minimum(at + window // 2 + 1, len(x))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def ranks(x: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Compute ranks from 1; equal values share the mean of their ranks."""
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def spearman(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """Compute the spearman correlation over finite pairs; NaN if one variable is constant."""
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
    """Compute the weighted least-squares slope of y over x, ignoring non-finite y."""
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
    """Bootstrap the least-squares slope of y over x by resampling the points."""
    counts = draws(np.random.default_rng(seed), len(x), resamples).astype(np.float64)
    return slope(x, np.broadcast_to(y, counts.shape), counts)


def place(total: Int[np.ndarray, "*B"], q: Float[np.ndarray, " Q"]) -> Float[np.ndarray, "*B Q"]:
    """(n − 1) q: position of numpy's linear quantile among n sorted values, from 0."""
    return np.round((total[..., None] - 1) * q, DIGITS)


def positions(
    cumulative: Int[np.ndarray, "B N"], rank: Int[np.ndarray, "B Q"]
) -> Int[np.ndarray, "B Q"]:
    """Return the index of the sorted value at each rank, given the cumulative counts of the values.

    Shifting the rows apart makes their sums one sorted array, so one search serves all draws.
    """
    num, width = cumulative.shape
    apart = int(cumulative[:, -1].max(initial=0)) + 1
    shift = apart * np.arange(num, dtype=np.int64)[:, None]
    found = np.searchsorted((cumulative + shift).ravel(), (rank + shift).ravel(), side="right")
    return found.reshape(rank.shape) - width * np.arange(num)[:, None]


def weighted_quantile(
    x: Float[np.ndarray, " N"], counts: Int[np.ndarray, " N"], q: Float[np.ndarray, " Q"]
) -> Float[np.ndarray, " Q"]:
    """numpy's linear quantile of x repeated by counts, computed without repeating it."""
    order = np.argsort(x, kind="stable")
    cumulative = np.cumsum(counts[order])[None]
    at = place(cumulative[:, -1], q)
    low = np.floor(at).astype(np.int64)
    below = x[order][positions(cumulative, low)][0]
    above = x[order][positions(cumulative, np.ceil(at).astype(np.int64))][0]
    return below + (above - below) * (at - low)[0]


def tail_starts(
    tie: Int[np.ndarray, " N"], cumulative: Int[np.ndarray, "B N"], q: Float[np.ndarray, " Q"]
) -> Int[np.ndarray, "B Q"]:
    """For each resample, find the index from which N sorted values are ≥ its q-quantile.

    The tail starts at the value of rank ⌈(n − 1) q⌉, or at the first value equal to it. ``tie``
    gives the index of the first equal value for every value.
    """
    rank = np.ceil(place(cumulative[:, -1], q)).astype(np.int64)
    return tie[positions(cumulative, rank)]


def draws(
    generator: np.random.Generator, num: int, resamples: int
) -> Int[np.ndarray, "resamples num"]:
    """Draw resamples with replacement; return how often each of ``num`` units is drawn."""
    return generator.multinomial(num, np.full(num, 1.0 / num), size=resamples)


def percentile_interval(x: Float[np.ndarray, "B *rest"]) -> Float[np.ndarray, "2 *rest"]:
    """Return the ends of the central 95 % of the draws; NaN if no draw is finite."""
    found = np.full((2, *x.shape[1:]), np.nan)
    if len(x):
        some = np.isfinite(x).any(axis=0)
        ends = [(1 - SHARE) / 2, (1 + SHARE) / 2]
        found[:, some] = np.nanquantile(x[:, some], ends, axis=0)
    return found


DIGITS = 9
"""Decimals to which (n − 1)q is rounded: in floating point 100 · .55 is 55.00000000000001."""


SHARE = 0.95
