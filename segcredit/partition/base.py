"""What a partition is: a frozen object that reads rollouts and returns their segments."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from segcredit.columns import Needs
from segcredit.core.segments import Segments
from segcredit.types import Rollouts


@dataclass(frozen=True)
class Partition:
    """Base of all partitions. A subclass declares ``needs`` and says how to cut.

    Frozen, so that equal settings compare equal and each distinct partition is computed once.
    """

    @property
    def needs(self) -> Needs:
        """Columns of the rollouts that it reads."""
        return frozenset()

    def __call__(self, rollouts: Rollouts) -> Segments:
        """The segments of every response."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(rollouts)")

    def estimated(self, rollouts: Rollouts, segments: Segments) -> Bool[Tensor, "B M"]:
        """Segments at whose start Monte-Carlo methods estimate a value; all by default."""
        return segments.mask
