"""verl's ways to average a loss, as shares per entry: denominators span all workers."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Totals:
    """What verl counts over a mini-batch, on all workers together."""

    num_workers: int
    """Data-parallel ones; gradients are averaged over them."""
    num_entries: float
    """Tokens, or segment boundaries, of the loss."""
    num_responses: float
    scale: float | None = None
    """Of seq-mean-token-sum-norm; None: the width of the micro-batch."""


def verl_shares(mask: Bool[Tensor, "B N"], mode: str, totals: Totals) -> Float[Tensor, "B N"]:
    """Σ share · x over a micro-batch equals verl's ``agg_loss`` of x, whatever the units."""
    entries = mask.float() * totals.num_workers
    if mode == "token-mean":
        return entries / max(totals.num_entries, 1)
    if mode == "seq-mean-token-mean":
        return entries / (mask.sum(dim=1, keepdim=True).clamp(min=1) * totals.num_responses)
    if mode == "seq-mean-token-sum":
        return entries / totals.num_responses
    if mode == "seq-mean-token-sum-norm":
        return entries / (totals.num_responses * (totals.scale or mask.shape[1]))
    raise ValueError(f"loss_agg_mode must be one of {', '.join(MODES)}; got {mode!r}.")
