"""The plain units: tokens, whole responses, runs of a fixed length."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from segcredit.core.checks import require_mask
from segcredit.core.segments import Segments, first_token
from segcredit.partition.base import Partition
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
    """Segments of ``size`` tokens, the last one what remains: ends L−1, 2L−1, …, T−1."""
    _check_size(size)
    require_mask("mask", mask)
    return Segments.from_trusted_starts(mask & ((mask.cumsum(dim=1) - 1) % size == 0), mask)


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a whole number of tokens, at least 1; got {size!r}.")


@dataclass(frozen=True)
class Token(Partition):
    """Each token by itself (PPO)."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return tokens(rollouts.mask)


@dataclass(frozen=True)
class Response(Partition):
    """The whole response (GRPO, GSPO, RLOO)."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return response(rollouts.mask)


@dataclass(frozen=True)
class FixedLength(Partition):
    """Runs of a fixed number of tokens."""

    size: int

    def __post_init__(self) -> None:
        _check_size(self.size)

    def __call__(self, rollouts: Rollouts) -> Segments:
        return fixed_length(rollouts.mask, self.size)
