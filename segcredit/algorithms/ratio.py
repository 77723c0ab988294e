"""Importance ratios, each over its own units."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from segcredit.core.checks import keep, require_positive
from segcredit.core.ratios import geometric_mean_ratio, gspo_token_ratio, raw_ratio, token_ratio
from segcredit.core.segments import Segments
from segcredit.partition import Partition, Token


@runtime_checkable
class RatioPart(Protocol):
    """Importance ratio: compares π_θ with π_old."""

    @property
    def over(self) -> Partition:
        """The units of the ratio."""
        ...

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        """Compute the ratio of each token's unit."""
        ...


def _check_limit(limit: float | None) -> None:
    if limit is not None:
        require_positive("limit", limit, "The authors' code uses 20; None does not clamp.")


@dataclass(frozen=True)
class TokenRatio:
    """π_θ(y_t) / π_old(y_t) (Eq. 2)."""

    limit: float | None = None
    """Clamp of each token's log-ratio."""

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    @property
    def over(self) -> Partition:
        return Token()

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return token_ratio(logp, logp_old, segments.token_mask, self.limit)


@dataclass(frozen=True)
class GeometricMean:
    """exp of the mean log-ratio in the token's unit (Eq. 8; over responses, GSPO)."""

    over: Partition
    limit: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return geometric_mean_ratio(logp, logp_old, segments, self.limit)


@dataclass(frozen=True)
class RawRatio:
    """exp of the summed log-ratio of the token's unit: exact, with high variance for long units."""

    over: Partition
    limit: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return raw_ratio(logp, logp_old, segments, self.limit)


@dataclass(frozen=True)
class TokenwiseGeometricMean:
    """The geometric mean's value with the token's own gradient (GSPO-token)."""

    over: Partition
    limit: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return gspo_token_ratio(logp, logp_old, segments, self.limit)


@dataclass(frozen=True)
class LogProb:
    """log π_θ in place of the ratio: the score function of REINFORCE, no importance weight."""

    @property
    def over(self) -> Partition:
        return Token()

    def __call__(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        return keep(segments.token_mask, logp)

    def recorded(
        self, logp: Float[Tensor, "B T"], logp_old: Float[Tensor, "B T"], segments: Segments
    ) -> Float[Tensor, "B T"]:
        """Compute the token ratio, which is recorded although the loss has none."""
        return token_ratio(logp, logp_old, segments.token_mask)
