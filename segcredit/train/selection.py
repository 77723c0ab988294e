"""What of a batch is learned from: all of it, responses that were kept, pairs, or branches."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.algorithms import asks
from segcredit.train.tree import rows_with_credit
from segcredit.types import Algorithm, Batch, MonteCarlo, NothingToLearn, Rollouts


@dataclass(frozen=True)
class Prepared:
    """A method's batch, for those who learn from it and for those who look at it."""

    shown: Batch
    """All responses in their order; without credit where the method gives none to each."""
    learned: Batch | None
    """What gradient steps are made of; None: there is nothing in it this time."""
    rows: Int[Tensor, " R"] | None = None
    """Which rows of ``shown`` these are; None: they are put together anew, as pairs are."""

    def with_learned(self, logp: Float[Tensor, "R T"]) -> Float[Tensor, "B T"]:
        """log π of all rows: new where they were learned from, π_old's elsewhere."""
        old = self.shown.rollouts.logp_old
        return old if self.rows is None else old.index_copy(0, self.rows, logp.to(old.dtype))


def prepare(
    algorithm: Algorithm,
    rollouts: Rollouts,
    monte_carlo: MonteCarlo,
    generator: torch.Generator,
) -> Prepared:
    """Segments, advantages and targets; and what of it is worth a gradient."""
    plain = Batch(rollouts, rollouts.mask)
    try:
        batch = asks.prepare(algorithm, rollouts, monte_carlo, generator)
    except NothingToLearn:
        return Prepared(plain, None)
    if batch.rollouts is not rollouts:
        return Prepared(plain, batch)
    if rollouts.parent is None:
        return Prepared(batch, batch, torch.arange(len(rollouts), device=rollouts.mask.device))
    rows = rows_with_credit(batch)
    return Prepared(batch, batch.select(rows) if len(rows) else None, rows)


def describe_selection(prepared: Prepared) -> dict[str, float]:
    """How much is learned from; nothing is said where it is everything, as for most methods."""
    if prepared.learned is prepared.shown:
        return {}
    prompts = float(len(prepared.shown.rollouts.group.unique()))
    if prepared.learned is None:
        return {"selected/items": 0.0, "selected/prompts_left_out": prompts}
    learned = prepared.learned
    return {
        "selected/items": len(learned.rollouts) / learned.rows_per_item,
        "selected/prompts_left_out": prompts - len(learned.rollouts.group.unique()),
    }
