"""SAPO's partition: a response is cut after its most uncertain tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.columns import ENTROPY, Needs
from segcredit.core.checks import (
    empty_rows,
    finite,
    has_kernels,
    keep,
    not_finite,
    positions,
    require_mask,
    require_shape,
)
from segcredit.core.segments import Segments
from segcredit.partition.base import Partition
from segcredit.types import Rollouts, named_repr

CountRule = Callable[[Tensor, float], Tensor]
"""(lengths, fraction) → how many tokens to pick."""


def exact_ceil(length: Int[Tensor, " B"], fraction: float) -> Int[Tensor, " B"]:
    """⌈T · fraction⌉ in integers. In floating point, 100 · 0.55 is 55.000000000000007 → 56."""
    exact = Fraction(str(float(fraction))).limit_denominator(1_000_000)
    return (length * exact.numerator + (exact.denominator - 1)) // exact.denominator


def float_ceil(length: Int[Tensor, " B"], fraction: float) -> Int[Tensor, " B"]:
    """⌈T · fraction⌉ in floating point: the authors' advantages and value loss."""
    return (length.double() * fraction).ceil().long()


def float_nudge(length: Int[Tensor, " B"], fraction: float) -> Int[Tensor, " B"]:
    """int(T · fraction + .999999): the authors' ratio."""
    return (length.double() * fraction + 0.999999).long()


LONGEST = 65_536
"""Tokens of one response that fit into one CUDA program; longer ones are sorted."""


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
    check_fraction(fraction)
    require_mask("mask", mask)
    require_shape("entropy", entropy, "mask", mask)
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
    # what the kernel found on the way fills the cached properties
    segments.__dict__.update(start=start[:, :width], starts=starts)
    return segments


@lru_cache(maxsize=64)
def _count_table(count: CountRule, fraction: float, width: int, device: torch.device) -> Tensor:
    """How many tokens are picked, for every length up to the width."""
    return count(torch.arange(width + 1), fraction).clamp(min=1).to(device)


def check_fraction(fraction: float) -> None:
    """Refuse what is no share of a response."""
    if not 0.0 < fraction <= 1.0:
        hint = f" For top-{fraction:g}% pass {fraction / 100:.2f}." if 1 < fraction <= 100 else ""
        raise ValueError(f"fraction must be in (0, 1]; got {fraction}.{hint}")


@dataclass(frozen=True, repr=False)
class TopEntropy(Partition):
    """Cut after each response's top fraction of tokens by entropy (SAPO)."""

    fraction: float = 0.30
    count: CountRule = exact_ceil

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    def __repr__(self) -> str:
        return named_repr(self)

    @property
    def needs(self) -> Needs:
        return frozenset({ENTROPY})

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "TopEntropy")
        return top_entropy(entropy, rollouts.mask, self.fraction, self.count)
