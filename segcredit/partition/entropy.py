"""Partitions at the highest-ranked tokens: by entropy (SAPO) or by changes of the value."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.columns import ENTROPY, VALUE, Needs
from segcredit.core.checks import (
    empty_rows,
    finite,
    has_kernels,
    keep,
    not_finite,
    positions,
    require,
    require_mask,
    require_shape,
)
from segcredit.core.segments import Segments
from segcredit.partition.base import Partition, require_count
from segcredit.types import Rollouts, named_repr

CountRule = Callable[[Tensor, float], Tensor]
"""(lengths, fraction) → how many tokens to pick."""


def exact_ceil(length: Int[Tensor, " B"], fraction: float) -> Int[Tensor, " B"]:
    """Compute ⌈T · fraction⌉ in integers. In floats, 100 · 0.55 is 55.000000000000007 → 56."""
    exact = _exact(fraction)
    return (length * exact.numerator + (exact.denominator - 1)) // exact.denominator


def _exact(fraction: float) -> Fraction:
    return Fraction(str(float(fraction))).limit_denominator(1_000_000)


def float_ceil(length: Int[Tensor, " B"], fraction: float) -> Int[Tensor, " B"]:
    """Compute ⌈T · fraction⌉ in floating point, as the authors do for credit and value loss."""
    return (length.double() * fraction).ceil().long()


def float_nudge(length: Int[Tensor, " B"], fraction: float) -> Int[Tensor, " B"]:
    """Compute int(T · fraction + .999999), the authors' number of cuts for the ratio."""
    return (length.double() * fraction + 0.999999).long()


LONGEST = 65_536
"""Longest response, in tokens, that the CUDA kernel handles; longer ones are sorted."""


def top_entropy(
    entropy: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    fraction: float,
    count: CountRule = exact_ceil,
) -> Segments:
    """Cut after the ⌈T · fraction⌉ tokens of largest H_t, and after the last token (§4.2).

    Ties go to the earlier token. Only ranks matter, so any monotone transform of H gives the same
    segments. There are n or n + 1 of them (n ≥ 1); for a single one use ``response(mask)``.
    """
    _check(entropy, mask, fraction, "entropy")
    if has_kernels(entropy) and mask.shape[1] <= LONGEST:
        table = _count_table(count, fraction, mask.shape[1], mask.device)
        return _by_kernel(entropy, mask, table)
    picked = most(entropy, mask, fraction, count)
    return Segments.from_trusted_ends(picked, mask, finite(mask, entropy=entropy))


def most(
    key: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    fraction: float,
    count: CountRule = exact_ceil,
) -> Bool[Tensor, "B T"]:
    """True at the ⌈T · fraction⌉ tokens with the largest key; ties go to the earlier token."""
    table = _count_table(count, fraction, mask.shape[1], mask.device)
    num_picked = table[mask.sum(dim=1, keepdim=True)]
    key = keep(mask, key, -torch.inf) + 0.0  # + 0.0: −0.0 and 0.0 are one tie
    order = key.argsort(dim=1, descending=True, stable=True)
    rank = positions(mask.shape[1], mask.device)
    return torch.zeros_like(mask).scatter_(1, order, rank < num_picked)


def _by_kernel(entropy: Tensor, mask: Tensor, table: Tensor) -> Segments:
    from segcredit.core import kernels

    mask = mask.contiguous()
    slot, start, starts, info = kernels.top_entropy(entropy, mask, table)
    *counted, bad = info.tolist()
    if bad:
        raise ValueError(not_finite(mask, entropy=entropy))
    if min(counted) == 0:
        raise ValueError(empty_rows(mask))
    width = max(counted)
    segments = Segments(token_mask=mask, slot=slot, num=info[:-1], width=width)
    # the kernel computes these too, so fill the cached properties
    segments.__dict__.update(start=start[:, :width], starts=starts)
    return segments


def highest_in_batch(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float
) -> Bool[Tensor, "B T"]:
    """True at the tokens whose H_t is at or above the batch's (1 − fraction) quantile.

    Unlike ``most``, it compares the tokens of all responses with each other. The quantile is
    TRL's (linear interpolation): of N tokens, N − ⌈(1 − fraction)(N − 1)⌉ are kept, and ties.
    """
    _check(entropy, mask, fraction, "entropy")
    require(finite(mask, entropy=entropy))
    ordered = entropy[mask].sort().values
    if not len(ordered):
        return mask
    return mask & (entropy >= ordered[math.ceil((1 - _exact(fraction)) * (len(ordered) - 1))])


@lru_cache(maxsize=64)
def _count_table(count: CountRule, fraction: float, width: int, device: torch.device) -> Tensor:
    """Return how many tokens are picked, for every length up to the width."""
    return count(torch.arange(width + 1), fraction).clamp(min=1).to(device)


def check_fraction(fraction: float) -> None:
    """Raise ValueError unless the fraction is in (0, 1]."""
    if not 0.0 < fraction <= 1.0:
        hint = f" For top-{fraction:g}% pass {fraction / 100:.2f}." if 1 < fraction <= 100 else ""
        raise ValueError(f"fraction must be in (0, 1]; got {fraction}.{hint}")


def _check(x: Tensor, mask: Tensor, fraction: float, name: str) -> None:
    check_fraction(fraction)
    require_mask("mask", mask)
    require_shape(name, x, "mask", mask)


def entropy_peaks(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float
) -> Segments:
    """Cut after those of the ⌈T · fraction⌉ tokens of largest H_t that no neighbor exceeds.

    Entropy often stays high for several tokens; ``top_entropy`` cuts after each of them.
    """
    _check(entropy, mask, fraction, "entropy")
    near, order = _close_holes(keep(mask, entropy, -torch.inf), mask)
    edge = near.new_full((len(near), 1), -torch.inf)
    before, after = torch.cat([edge, near[:, :-1]], dim=1), torch.cat([near[:, 1:], edge], dim=1)
    peak = torch.zeros_like(mask).scatter_(1, order, (near > before) & (near >= after))
    ends = most(entropy, mask, fraction) & peak
    return Segments.from_trusted_ends(ends & mask, mask, finite(mask, entropy=entropy))


def smooth_entropy(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float, window: int
) -> Segments:
    """Cut after the ⌈T · fraction⌉ tokens with the largest mean of H over the last ``window``.

    The mean is over H_{t−w+1} … H_t; over fewer tokens at the beginning of a response.
    """
    _check(entropy, mask, fraction, "entropy")
    require_count("window", window, "a whole number of tokens")
    near, order = _close_holes(keep(mask, entropy), mask)
    summed = near.double().cumsum(dim=1)
    summed = summed - torch.nn.functional.pad(summed, (window, 0))[:, : mask.shape[1]]
    place = torch.arange(mask.shape[1], device=mask.device)
    mean = (summed / (place + 1).clamp(max=window)).to(entropy.dtype)
    smooth = torch.zeros_like(entropy).scatter_(1, order, mean)
    return top_entropy(smooth.where(entropy.isfinite(), entropy), mask, fraction)


def value_jumps(
    value: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float
) -> Segments:
    """Cut after the ⌈T · fraction⌉ tokens with the largest change of the value, |V_{t+1} − V_t|.

    A critic that is trained only at segment boundaries is arbitrary between them, so train it at
    every token (``value_everywhere``). The last token ends a segment in any case.
    """
    _check(value, mask, fraction, "value")
    near, order = _close_holes(keep(mask, value.detach()), mask)
    jump = torch.nn.functional.pad(near.diff(dim=1).abs(), (0, 1))
    counted = torch.arange(mask.shape[1], device=mask.device) < mask.sum(dim=1, keepdim=True) - 1
    jumps = torch.zeros_like(near).scatter_(1, order, jump.where(counted, 0.0))
    return top_entropy(jumps.where(value.isfinite(), value.detach()), mask, fraction)


def _close_holes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the tokens of each response together, without holes; also return their positions."""
    order = (~mask).long().argsort(dim=1, stable=True)
    return x.gather(1, order), order


@dataclass(frozen=True)
class _TopFraction(Partition):
    """Base class: cut after a fraction of the tokens, chosen by entropy unless a class differs."""

    fraction: float = 0.30

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    @property
    def needs(self) -> Needs:
        return frozenset({ENTROPY})


@dataclass(frozen=True, repr=False)
class TopEntropy(_TopFraction):
    """Cut after the tokens of highest entropy (SAPO)."""

    examples = ({"fraction": 0.1}, {"fraction": 0.3}, {"fraction": 0.5})

    count: CountRule = exact_ceil

    def __repr__(self) -> str:
        return named_repr(self)

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "TopEntropy")
        return top_entropy(entropy, rollouts.mask, self.fraction, self.count)


@dataclass(frozen=True)
class EntropyPeaks(_TopFraction):
    """Cut after local peaks among the tokens of highest entropy."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "EntropyPeaks")
        return entropy_peaks(entropy, rollouts.mask, self.fraction)


@dataclass(frozen=True)
class SmoothEntropy(_TopFraction):
    """Cut after the tokens of highest entropy, averaged over a window of preceding tokens."""

    window: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("window", self.window, "a whole number of tokens")

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "SmoothEntropy")
        return smooth_entropy(entropy, rollouts.mask, self.fraction, self.window)


@dataclass(frozen=True)
class ValueJumps(_TopFraction):
    """Cut after the tokens at which the critic's value changes most."""

    @property
    def needs(self) -> Needs:
        return frozenset({VALUE})

    def __call__(self, rollouts: Rollouts) -> Segments:
        value = rollouts.column("value", "ValueJumps")
        return value_jumps(value, rollouts.mask, self.fraction)
