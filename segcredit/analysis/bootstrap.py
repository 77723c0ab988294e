"""Intervals by resampling responses or steps, never tokens: those of one response go together."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from segcredit.analysis.lift import Pool, lift_of_draws

SHARE = 0.95


def draws(
    generator: np.random.Generator, num: int, resamples: int
) -> Int[np.ndarray, "resamples num"]:
    """How often each of ``num`` units stands in each draw of ``num`` with replacement."""
    return generator.multinomial(num, np.full(num, 1.0 / num), size=resamples)


def percentile_interval(x: Float[np.ndarray, "B *rest"]) -> Float[np.ndarray, "2 *rest"]:
    """Both ends of the middle 95 % of the draws; NaN where no draw is finite."""
    found = np.full((2, *x.shape[1:]), np.nan)
    if len(x):
        some = np.isfinite(x).any(axis=0)
        ends = [(1 - SHARE) / 2, (1 + SHARE) / 2]
        found[:, some] = np.nanquantile(x[:, some], ends, axis=0)
    return found


def lift_over_responses(
    pools: Sequence[Pool],
    quantiles: Float[np.ndarray, " Q"],
    thresholds: Float[np.ndarray, " D"],
    resamples: int,
    seed: int = 0,
) -> Float[np.ndarray, "S B D Q"]:
    """Lift of every step with its responses drawn again; each draw has quantiles of its own."""
    found = []
    for number, pool in enumerate(pools):
        generator = np.random.default_rng([seed, number])
        counts = draws(generator, pool.num_responses, resamples)
        found.append(lift_of_draws(pool, counts, quantiles, thresholds))
    return np.stack(found)


def mean_over_steps(
    x: Float[np.ndarray, "S *rest"], resamples: int, seed: int = 0
) -> Float[np.ndarray, "B *rest"]:
    """Means of steps drawn again, each with what was measured at it."""
    counts = draws(np.random.default_rng(seed), len(x), resamples)
    known = np.isfinite(x)
    weight = np.tensordot(counts, known, axes=1)
    total = np.tensordot(counts, np.where(known, x, 0.0), axes=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weight > 0, total / weight, np.nan)
