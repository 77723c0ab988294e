"""The base class of partitions: frozen objects that read rollouts and return their segments."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

from jaxtyping import Bool
from torch import Tensor

from segcredit.columns import Needs
from segcredit.core.checks import require_mask
from segcredit.core.segments import Segments, first_token
from segcredit.types import Rollouts


@dataclass(frozen=True)
class Partition:
    """Base class of all partitions. A subclass declares ``needs`` and defines ``__call__``.

    Partitions are frozen dataclasses: equal settings compare equal, so each distinct partition is
    computed once per batch. The first line of a subclass's docstring describes it to users
    (``segcredit segment --list``, the report page), and its fields are its settings in recipes.
    """

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Example settings for lists; the first must hold every setting that has no default."""

    @property
    def needs(self) -> Needs:
        """Columns of the rollouts that it reads."""
        return frozenset()

    def __call__(self, rollouts: Rollouts) -> Segments:
        """Compute the segments of every response."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(rollouts)")

    def estimated(self, rollouts: Rollouts, segments: Segments) -> Bool[Tensor, "B M"]:
        """Select segments at whose start Monte-Carlo methods estimate a value; by default all."""
        return segments.mask

    @classmethod
    def description(cls) -> str:
        """Return the first line of its docstring, without the period."""
        return (cls.__doc__ or cls.__name__).strip().partition("\n")[0].removesuffix(".")

    @classmethod
    def setting_fields(cls) -> dict[str, Field[Any]]:
        """Return its settings in recipes, by name.

        A function, such as a rounding rule, can be set in Python only.
        """
        return {x.name: x for x in fields(cls) if not callable(x.default)}

    def settings(self) -> dict[str, Any]:
        """Return the values of its settings."""
        return {name: getattr(self, name) for name in self.setting_fields()}

    def label(self) -> str:
        """Format description and settings as a heading."""
        settings = ", ".join(f"{name} = {x}" for name, x in self.settings().items())
        return f"{self.description()}{settings and ': '}{settings}"


def require_count(name: str, x: object, what: str = "a whole number", hint: str = "") -> None:
    """Raise ValueError unless a setting is a positive integer."""
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise ValueError(f"{name} must be {what}, at least 1; got {x!r}.{hint}")


def tokens(mask: Bool[Tensor, "B T"]) -> Segments:
    """Make each token a segment."""
    require_mask("mask", mask)
    return Segments.from_trusted_starts(mask, mask)


def response(mask: Bool[Tensor, "B T"]) -> Segments:
    """Make each response one segment."""
    require_mask("mask", mask)
    return Segments.from_trusted_starts(first_token(mask), mask)


def fixed_length(mask: Bool[Tensor, "B T"], size: int) -> Segments:
    """Cut after every ``size`` tokens; the last segment may be shorter: ends L−1, 2L−1, …, T−1."""
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
