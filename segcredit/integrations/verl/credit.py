"""Segments, advantages and value targets from verl's columns, and verl's loss averages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.algorithms.policy_gradient import PolicyGradient
from segcredit.core.advantages import explained_variance
from segcredit.core.segments import Segments, last_position
from segcredit.types import Batch, Rollouts

ENDS, RATIO_ENDS, VALUE_MASK = "segment_ends", "segment_ratio_ends", "segment_value_mask"
"""Columns we add: ends of the credit segments and of the ratio segments; tokens where V is read."""
NEEDED = ("responses", "response_mask", "old_log_probs", "entropy", "values", "rm_scores")


def rollouts_of(
    columns: Mapping[str, Tensor], pieces: Sequence[Sequence[str]] | None = None
) -> Rollouts:
    """Convert verl's padded columns. Every row must have a token on its mask."""
    mask = columns["response_mask"].bool()
    return Rollouts(
        tokens=columns["responses"].long(),
        mask=mask,
        logp_old=columns["old_log_probs"].float(),
        reward=columns["rm_scores"].float().sum(dim=1),
        group=torch.arange(len(mask)),
        truncated=torch.zeros(len(mask), dtype=torch.bool),
        entropy=columns["entropy"].float(),
        value=columns["values"].float(),
        pieces=pieces,
    )


def rewards_on_mask(
    reward: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return rewards per token; rewards after the policy's last token move to that token."""
    inside = torch.where(mask, reward, 0.0)
    outside = torch.where(mask, 0.0, reward).sum(dim=1, keepdim=True)
    return inside.scatter_add(1, last_position(mask), outside)


def assign(
    method: PolicyGradient,
    columns: Mapping[str, Tensor],
    reward_name: str,
    pieces: Sequence[Sequence[str]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Compute segments and credit once, under π_old; return new columns and metrics.

    verl pads batches with rows without any valid token: those get zeros and are ignored.
    """
    mask = columns["response_mask"].bool()
    rows = mask.any(dim=1).nonzero().flatten()
    if len(rows) == 0:
        raise ValueError(
            f"none of {len(mask)} responses has a token in its response_mask, so there is "
            f"nothing to train on. Set data.max_response_length above 0 and let the agent loop "
            f"mark the policy's own tokens with 1."
        )
    kept = {name: x[rows] for name, x in columns.items()}
    some = None if pieces is None else [pieces[row] for row in rows.tolist()]
    rollouts = rollouts_of(kept, some)
    reward = rewards_on_mask(kept[reward_name].float(), rollouts.mask)
    batch = method.prepare_rewarded(rollouts, reward)
    new = _columns(batch)
    padded = {name: x.new_zeros(mask.shape).index_copy(0, rows, x) for name, x in new.items()}
    return padded, _metrics(batch)


def _columns(batch: Batch) -> dict[str, Tensor]:
    credit, ratio = batch.credit, batch.ratio_segments
    assert credit is not None
    assert credit.value_target is not None
    assert ratio is not None
    read = credit.segments.start if credit.value_at == "start" else credit.segments.end
    return {
        "advantages": credit.advantage,
        "returns": credit.value_target,
        ENDS: marks(credit.segments, credit.segments.end),
        RATIO_ENDS: marks(ratio, ratio.end),
        VALUE_MASK: marks(credit.segments, read),
    }


def marks(segments: Segments, position: Int[Tensor, "B M"]) -> Int[Tensor, "B T"]:
    """Mark one position of each segment with 1; 0 elsewhere. Integers, like verl's masks."""
    empty = torch.zeros(segments.token_mask.shape, dtype=torch.long)
    return empty.scatter_reduce_(1, position, segments.mask.long(), "amax")


def _metrics(batch: Batch) -> dict[str, float]:
    credit = batch.credit
    assert credit is not None
    segments = credit.segments
    rollouts = batch.rollouts
    assert rollouts.value is not None
    value = segments.read(rollouts.value, credit.value_at)[segments.mask]
    outcome = rollouts.reward[:, None].expand_as(segments.mask)[segments.mask]
    lengths = segments.length[segments.mask].float()
    return {
        "segment/num/mean": float(segments.num.float().mean()),
        "segment/length/mean": float(lengths.mean()),
        "segment/length/max": float(lengths.max()),
        "segment/advantage/mean": float(credit.per_segment[segments.mask].mean()),
        "segment/value_explained_variance": explained_variance(value, outcome),
    }


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Totals:
    """Counts of a mini-batch over all workers."""

    num_workers: int
    """Data-parallel workers, over which gradients are averaged."""
    num_entries: float
    """Number of tokens, or of segment boundaries, in the loss."""
    num_responses: float
    scale: float | None = None
    """Divisor of seq-mean-token-sum-norm; None: the width of the micro-batch."""


def verl_shares(mask: Bool[Tensor, "B N"], mode: str, totals: Totals) -> Float[Tensor, "B N"]:
    """Return the weights such that Σ share · x over a micro-batch equals verl's ``agg_loss`` of x.

    Denominators span all workers; entries are tokens or segment boundaries.
    """
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
