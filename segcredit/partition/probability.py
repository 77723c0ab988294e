"""Partitions at tokens of low probability under π_old, in two variants."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.columns import LOGP_OLD, Needs
from segcredit.core.checks import finite, require_mask, require_probability, require_shape
from segcredit.core.segments import Segments
from segcredit.partition.base import Partition, require_count
from segcredit.types import Rollouts


def probability_cutpoints(
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    threshold: float = 0.9,
    every: int = 5,
) -> Segments:
    """Cut before the 1st, (n+1)-th, (2n+1)-th, … token with π_old < threshold (SPO's rule).

    Every segment except perhaps the first begins with an unlikely token and contains n of them.
    Without an unlikely token there is one segment.
    """
    low = _low(logp_old, mask, threshold, every)
    starts = low & ((low.cumsum(dim=1) - 1) % every == 0)
    return Segments.from_trusted_starts(starts, mask, finite(mask, logp_old=logp_old))


def probability_accumulate(
    logp_old: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    threshold: float = 0.9,
    every: int = 5,
) -> Segments:
    """Cut after every n-th token with π_old < threshold, as the SAPO paper words it."""
    low = _low(logp_old, mask, threshold, every)
    ends = low & (low.cumsum(dim=1) % every == 0)
    return Segments.from_trusted_ends(ends, mask, finite(mask, logp_old=logp_old))


def _low(logp_old: Tensor, mask: Tensor, threshold: float, every: int) -> Tensor:
    _check(threshold, every)
    require_mask("mask", mask)
    require_shape("logp_old", logp_old, "mask", mask)
    return mask & (logp_old.exp() < threshold)


def _check(threshold: float, every: int) -> None:
    require_probability("threshold", threshold, "SPO uses 0.9.")
    require_count("every", every, hint=" SPO: 5.")


@dataclass(frozen=True)
class _LowProbability(Partition):
    """Base class: every ``every``-th token with π_old below ``threshold`` counts."""

    threshold: float = 0.9
    every: int = 5

    def __post_init__(self) -> None:
        _check(self.threshold, self.every)

    @property
    def needs(self) -> Needs:
        return frozenset({LOGP_OLD})


@dataclass(frozen=True)
class ProbabilityCutpoints(_LowProbability):
    """Cut before every n-th token of low probability (SPO)."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return probability_cutpoints(rollouts.logp_old, rollouts.mask, self.threshold, self.every)

    def estimated(self, rollouts: Rollouts, segments: Segments) -> Bool[Tensor, "B M"]:
        """Return all cuts; the start of the response counts only if its first token is unlikely."""
        low = _low(rollouts.logp_old, rollouts.mask, self.threshold, self.every)
        return segments.at_start(low.float()).bool()


@dataclass(frozen=True)
class ProbabilityAccumulate(_LowProbability):
    """Cut after every n-th token of low probability (the SAPO paper's wording)."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return probability_accumulate(rollouts.logp_old, rollouts.mask, self.threshold, self.every)
