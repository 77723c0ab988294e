"""What the update learns from: all responses, a selection of rows, or pairs of them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.train.collect import Context
from segcredit.train.continuations import MonteCarloValues
from segcredit.train.provider import Providers
from segcredit.types import Batch, NothingToLearn, Rollouts


@dataclass(frozen=True)
class Selection:
    """A batch with credit, and the part of it that the update learns from."""

    shown: Batch
    """All responses in their order; without credit if the method gives none to each of them."""
    learned: Batch | None
    """What gradient steps are computed on; None: there is nothing to learn from in this step."""
    rows: Int[Tensor, " R"] | None = None
    """Rows of ``shown`` that ``learned`` has; None: its rows are arranged anew, as pairs are."""

    def with_learned(self, logp: Float[Tensor, "R T"]) -> Float[Tensor, "B T"]:
        """Return log π of all rows: new where they entered the update, π_old's elsewhere."""
        old = self.shown.rollouts.logp_old
        return old if self.rows is None else old.index_copy(0, self.rows, logp.to(old.dtype))


def prepare(context: Context, columns: Providers, rollouts: Rollouts) -> Selection:
    """Compute segments, advantages and targets, and select the rows to learn from."""
    state = context.state
    plain = Batch(rollouts, rollouts.mask)
    estimator = columns.monte_carlo(context) or MonteCarloValues(context)
    drawn = {}
    if state.requirements.draws:
        drawn["generator"] = context.generator("prepare", *context.purpose)
    try:
        batch = state.algorithm.prepare(rollouts, estimator, **drawn)
    except NothingToLearn:
        return Selection(plain, None)
    if batch.rollouts is not rollouts:
        return Selection(plain, batch)
    rows = columns.select_rows(batch)
    if rows is None:
        return Selection(batch, batch, torch.arange(len(rollouts), device=rollouts.mask.device))
    return Selection(batch, batch.select(rows) if len(rows) else None, rows)


def describe_selection(selection: Selection) -> dict[str, float]:
    """Return how much is learned from; nothing if it is everything, as for most methods."""
    if selection.learned is selection.shown:
        return {}
    prompts = float(len(selection.shown.rollouts.group.unique()))
    if selection.learned is None:
        return {"selected/items": 0.0, "selected/prompts_left_out": prompts}
    learned = selection.learned
    return {
        "selected/items": len(learned.rollouts) / learned.rows_per_item,
        "selected/prompts_left_out": prompts - len(learned.rollouts.group.unique()),
    }
