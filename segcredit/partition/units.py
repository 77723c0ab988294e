"""Partitions into simple units: tokens, whole responses, runs of a fixed length."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from segcredit.core.checks import require_mask
from segcredit.core.segments import Segments, first_token
from segcredit.partition.base import Partition, require_count
from segcredit.types import Rollouts


def tokens(mask: Bool[Tensor, "B T"]) -> Segments:
    """One segment per token."""
    require_mask("mask", mask)
    return Segments.from_trusted_starts(mask, mask)


def response(mask: Bool[Tensor, "B T"]) -> Segments:
    """One segment per response."""
    require_mask("mask", mask)
    return Segments.from_trusted_starts(first_token(mask), mask)


def fixed_length(mask: Bool[Tensor, "B T"], size: int) -> Segments:
    """Segments of ``size`` tokens; the last may be shorter: ends L−1, 2L−1, …, T−1."""
    require_count("size", size, "a whole number of tokens")
    require_mask("mask", mask)
    return Segments.from_trusted_starts(mask & ((mask.cumsum(dim=1) - 1) % size == 0), mask)


@dataclass(frozen=True)
class Token(Partition):
    """Cut after every token (PPO)."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return tokens(rollouts.mask)


@dataclass(frozen=True)
class Response(Partition):
    """The whole response is one segment (GRPO, GSPO, RLOO)."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return response(rollouts.mask)


@dataclass(frozen=True)
class FixedLength(Partition):
    """Cut after a fixed number of tokens."""

    examples = ({"size": 16},)

    size: int

    def __post_init__(self) -> None:
        require_count("size", self.size, "a whole number of tokens")

    def __call__(self, rollouts: Rollouts) -> Segments:
        return fixed_length(rollouts.mask, self.size)
