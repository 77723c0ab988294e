"""Quantiles of a sample in which every value may stand several times, or not at all."""

import numpy as np
from jaxtyping import Float, Int

DIGITS = 9
"""(n − 1)q is rounded to these: in floating point 100 · .55 is 55.00000000000001, not 55."""


def place(total: Int[np.ndarray, "*B"], q: Float[np.ndarray, " Q"]) -> Float[np.ndarray, "*B Q"]:
    """(n − 1) q: where numpy's linear quantile lies among n sorted values, counted from 0."""
    return np.round((total[..., None] - 1) * q, DIGITS)


def positions(
    cumulative: Int[np.ndarray, "B N"], rank: Int[np.ndarray, "B Q"]
) -> Int[np.ndarray, "B Q"]:
    """Which of the N sorted values stands at each rank, given how often each stands, summed up.

    One search serves all draws: shifted apart, their sums are one sorted array.
    """
    num, width = cumulative.shape
    apart = int(cumulative[:, -1].max(initial=0)) + 1
    shift = apart * np.arange(num, dtype=np.int64)[:, None]
    found = np.searchsorted((cumulative + shift).ravel(), (rank + shift).ravel(), side="right")
    return found.reshape(rank.shape) - width * np.arange(num)[:, None]


def weighted_quantile(
    x: Float[np.ndarray, " N"], counts: Int[np.ndarray, " N"], q: Float[np.ndarray, " Q"]
) -> Float[np.ndarray, " Q"]:
    """numpy's linear quantile of x repeated by the counts, without repeating it."""
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
    """Of N sorted values, the place from which on they are ≥ the q-quantile of each draw.

    The quantile lies above its lower neighbour unless it is that neighbour, so the tail begins at
    rank ⌈(n − 1) q⌉, or at the first of its equals: ``tie`` names that place for every value.
    """
    rank = np.ceil(place(cumulative[:, -1], q)).astype(np.int64)
    return tie[positions(cumulative, rank)]
