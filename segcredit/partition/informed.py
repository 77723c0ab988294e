"""Cuts of our own beside the paper's: peaks of entropy, smoothed entropy, jumps of the value."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.columns import ENTROPY, VALUE, Needs
from segcredit.core.checks import finite, keep, require_mask, require_shape
from segcredit.core.segments import Segments
from segcredit.partition.base import Partition
from segcredit.partition.entropy import check_fraction, most, top_entropy
from segcredit.types import Rollouts


def entropy_peaks(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float
) -> Segments:
    """Cut after those of the ⌈T · fraction⌉ tokens of largest H_t that no neighbour exceeds.

    Doubt often lasts for several tokens; the top-entropy rule cuts after each of them.
    """
    _check(entropy, mask, fraction, "entropy")
    near, order = _close(keep(mask, entropy, -torch.inf), mask)
    edge = near.new_full((len(near), 1), -torch.inf)
    before, after = torch.cat([edge, near[:, :-1]], dim=1), torch.cat([near[:, 1:], edge], dim=1)
    peak = torch.zeros_like(mask).scatter_(1, order, (near > before) & (near >= after))
    ends = most(entropy, mask, fraction) & peak
    return Segments.from_trusted_ends(ends & mask, mask, finite(mask, entropy=entropy))


def smooth_entropy(
    entropy: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float, window: int
) -> Segments:
    """Cut after the ⌈T · fraction⌉ tokens with the largest mean of H over the last ``window``.

    The mean of H_{t−w+1} … H_t, of fewer tokens at the beginning.
    """
    _check(entropy, mask, fraction, "entropy")
    _check_window(window)
    near, order = _close(keep(mask, entropy), mask)
    summed = near.double().cumsum(dim=1)
    summed = summed - torch.nn.functional.pad(summed, (window, 0))[:, : mask.shape[1]]
    place = torch.arange(mask.shape[1], device=mask.device)
    mean = (summed / (place + 1).clamp(max=window)).to(entropy.dtype)
    smooth = torch.zeros_like(entropy).scatter_(1, order, mean)
    return top_entropy(smooth.where(entropy.isfinite(), entropy), mask, fraction)


def value_jumps(
    value: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], fraction: float
) -> Segments:
    """Cut after the ⌈T · fraction⌉ tokens that change the critic's mind most: |V_{t+1} − V_t|.

    A critic that is trained at boundaries alone says anything between them: train it at every
    token (``value_everywhere``). The last token ends a segment anyway.
    """
    _check(value, mask, fraction, "value")
    near, order = _close(keep(mask, value.detach()), mask)
    jump = torch.nn.functional.pad(near.diff(dim=1).abs(), (0, 1))
    counted = torch.arange(mask.shape[1], device=mask.device) < mask.sum(dim=1, keepdim=True) - 1
    jumps = torch.zeros_like(near).scatter_(1, order, jump.where(counted, 0.0))
    return top_entropy(jumps.where(value.isfinite(), value.detach()), mask, fraction)


def _close(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each response's tokens without the holes between them, and where each came from."""
    order = (~mask).long().argsort(dim=1, stable=True)
    return x.gather(1, order), order


def _check(x: Tensor, mask: Tensor, fraction: float, name: str) -> None:
    check_fraction(fraction)
    require_mask("mask", mask)
    require_shape(name, x, "mask", mask)


def _check_window(window: int) -> None:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be a whole number of tokens, at least 1; got {window!r}.")


@dataclass(frozen=True)
class EntropyPeaks(Partition):
    """Cut after the peaks among each response's most uncertain tokens (ours)."""

    fraction: float = 0.30

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    @property
    def needs(self) -> Needs:
        return frozenset({ENTROPY})

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "EntropyPeaks")
        return entropy_peaks(entropy, rollouts.mask, self.fraction)


@dataclass(frozen=True)
class SmoothEntropy(Partition):
    """Cut after each response's top fraction of tokens by entropy averaged backwards (ours)."""

    fraction: float = 0.30
    window: int = 5

    def __post_init__(self) -> None:
        check_fraction(self.fraction)
        _check_window(self.window)

    @property
    def needs(self) -> Needs:
        return frozenset({ENTROPY})

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "SmoothEntropy")
        return smooth_entropy(entropy, rollouts.mask, self.fraction, self.window)


@dataclass(frozen=True)
class ValueJumps(Partition):
    """Cut after the tokens that change the critic's mind most (ours)."""

    fraction: float = 0.30

    def __post_init__(self) -> None:
        check_fraction(self.fraction)

    @property
    def needs(self) -> Needs:
        return frozenset({VALUE})

    def __call__(self, rollouts: Rollouts) -> Segments:
        value = rollouts.column("value", "ValueJumps")
        return value_jumps(value, rollouts.mask, self.fraction)
