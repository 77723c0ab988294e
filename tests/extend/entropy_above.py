from dataclasses import dataclass

from segcredit.core.segments import Segments
from segcredit.partition import Partition
from segcredit.types import Rollouts


@dataclass(frozen=True)
class EntropyAbove(Partition):
    """Cut after every token with more than ``nats`` of entropy."""

    nats: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def __call__(self, rollouts: Rollouts) -> Segments:
        entropy = rollouts.column("entropy", "EntropyAbove")
        ends = (entropy > self.nats) & rollouts.mask
        return Segments.from_ends(ends, rollouts.mask)
