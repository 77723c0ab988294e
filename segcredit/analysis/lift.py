"""Lift: how much likelier a large jump of V is at tokens of high entropy (the paper's Figure 3)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from segcredit.analysis.quantiles import tail_starts

STAGES = (("early", 0.3), ("middle", 0.6), ("late", 1.0))
"""The first 30, the next 30 and the last 40 % of the recorded steps."""
ENTRIES = 2**21
"""Of the arrays (draws × tokens) made at once."""


@dataclass(frozen=True)
class Pool:
    """The tokens of one step that are compared, every response's last one left out."""

    owner: Int[np.ndarray, " N"]
    """Which of the responses a token belongs to."""
    entropy: Float[np.ndarray, " N"]
    jump: Float[np.ndarray, " N"]
    """ΔV_t = |V_t − V_{t+1}|."""
    num_responses: int
    left_out: int = 0
    """Tokens whose H or ΔV is not finite."""


def make_pool(
    owner: Int[np.ndarray, " N"],
    entropy: Float[np.ndarray, " N"],
    value: Float[np.ndarray, " N"],
    num_responses: int,
) -> Pool:
    """Tokens with a successor in their own response.

    The last one has none: V past the end is 0, which would make every end a jump.
    """
    followed = np.flatnonzero(owner[:-1] == owner[1:])
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        jump = np.abs(value[followed] - value[followed + 1])
    entropy = entropy[followed]
    good = np.isfinite(jump) & np.isfinite(entropy)
    return Pool(owner[followed][good], entropy[good], jump[good], num_responses, int((~good).sum()))


def lift(
    pool: Pool, quantiles: Float[np.ndarray, " Q"], thresholds: Float[np.ndarray, " D"]
) -> Float[np.ndarray, "D Q"]:
    """Lift(q) = P(D | A) / P(D), A = {H ≥ quantile_q(H)}, D = {ΔV ≥ quantile_d(ΔV)}.

    Quantiles are those of the pool, interpolated linearly. NaN for an empty pool.
    """
    once = np.ones((1, pool.num_responses), dtype=np.int64)
    return lift_of_draws(pool, once, quantiles, thresholds)[0]


def lift_of_draws(
    pool: Pool,
    counts: Int[np.ndarray, "B R"],
    quantiles: Float[np.ndarray, " Q"],
    thresholds: Float[np.ndarray, " D"],
) -> Float[np.ndarray, "B D Q"]:
    """Lift of many draws, each given by how often every response stands in it.

    The tokens are sorted once; a draw's quantiles and counts are then read off sums over them.
    """
    found = np.full((len(counts), len(thresholds), len(quantiles)), np.nan)
    if not len(pool.owner):
        return found
    rows = max(1, ENTRIES // len(pool.owner))
    sorted_pool = _sort(pool)
    for first in range(0, len(counts), rows):
        part = slice(first, first + rows)
        found[part] = _lift(sorted_pool, counts[part], quantiles, thresholds)
    return found


@dataclass(frozen=True)
class _Sorted:
    """A pool in the order of H, and in the order of ΔV."""

    owner_by_entropy: np.ndarray
    owner_by_jump: np.ndarray
    entropy_tie: np.ndarray
    jump_tie: np.ndarray
    jump_rank: np.ndarray
    """Of the tokens in the order of H, their places in the order of ΔV."""


def _sort(pool: Pool) -> _Sorted:
    by_entropy = np.argsort(pool.entropy, kind="stable")
    by_jump = np.argsort(pool.jump, kind="stable")
    rank = np.empty(len(by_jump), dtype=np.int64)
    rank[by_jump] = np.arange(len(by_jump))
    return _Sorted(
        owner_by_entropy=pool.owner[by_entropy],
        owner_by_jump=pool.owner[by_jump],
        entropy_tie=_first_equal(pool.entropy[by_entropy]),
        jump_tie=_first_equal(pool.jump[by_jump]),
        jump_rank=rank[by_entropy],
    )


def _first_equal(x: np.ndarray) -> np.ndarray:
    """Where each of the sorted values first stands."""
    return np.searchsorted(x, x, side="left")


def _lift(
    tokens: _Sorted, counts: np.ndarray, quantiles: np.ndarray, thresholds: np.ndarray
) -> np.ndarray:
    by_entropy = counts[:, tokens.owner_by_entropy].astype(np.int32)
    below = _sums(by_entropy)
    total = below[:, -1:]
    empty = total[:, 0] == 0
    below[empty, -1] = 1  # any start will do: their Lift is NaN
    starts = tail_starts(tokens.entropy_tie, below[:, 1:], quantiles)
    in_a = total - np.take_along_axis(below, starts, axis=1)
    below_jump = _sums(counts[:, tokens.owner_by_jump].astype(np.int32))
    below_jump[empty, -1] = 1
    jump_starts = tail_starts(tokens.jump_tie, below_jump[:, 1:], thresholds)
    in_d = total - np.take_along_axis(below_jump, jump_starts, axis=1)
    found = np.empty((len(counts), len(thresholds), len(quantiles)))
    with np.errstate(invalid="ignore", divide="ignore"):
        for number in range(len(thresholds)):
            large = tokens.jump_rank >= jump_starts[:, number, None]
            both = _sums(by_entropy * large)
            in_both = both[:, -1:] - np.take_along_axis(both, starts, axis=1)
            found[:, number] = (in_both / in_a) / (in_d[:, number, None] / total)
    found[empty] = np.nan
    return found


def _sums(x: np.ndarray) -> np.ndarray:
    """0, x₀, x₀ + x₁, … along the rows."""
    sums = np.zeros((x.shape[0], x.shape[1] + 1), dtype=np.int32)
    np.cumsum(x, axis=1, dtype=np.int32, out=sums[:, 1:])
    return sums


def stage_slices(num: int) -> dict[str, slice]:
    """Which of the recorded steps, in order, belong to which stage; fewer than three are one."""
    if num < len(STAGES):
        return {"all": slice(0, num)}
    found, first = {}, 0
    for name, share in STAGES:
        last = round(num * share)
        found[name] = slice(first, max(last, first + 1))
        first = found[name].stop
    return found
