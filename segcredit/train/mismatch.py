"""Mismatch between sampler and trainer: the two compute π slightly differently."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from segcredit.types import Batch, Rollouts

TOO_FAR = 1.0
"""KL per token above which the two cannot be the same model."""


@torch.no_grad()
def describe_mismatch(rollouts: Rollouts) -> dict[str, float]:
    """Compare π_old as recomputed by the trainer with the sampler's probabilities.

    ``sampler_kl`` estimates KL(π_sampler ‖ π_old) per token by r − 1 − log r with
    r = π_old / π_sampler, which is never negative. Tokens without a sampler probability are left
    out. Returns nothing if π_old was not recomputed.
    """
    if rollouts.logp_sampler is None:
        return {}
    known = rollouts.mask & ~rollouts.logp_sampler.isnan()
    log_ratio = _log_ratio(rollouts)[known]
    kl = float((log_ratio.expm1() - log_ratio).mean())
    if not kl < TOO_FAR:
        raise ValueError(
            f"the sampler draws from another model than is trained: KL = {kl:.3g} per token. "
            f"With vLLM, weights did not reach it as they should: set rollout.engine=hf. With hf, "
            f"set rollout.graphs=false. And tell us which model this is."
        )
    return {
        "agreement/sampler_kl": kl,
        "agreement/sampler_difference": float(log_ratio.abs().mean()),
        "agreement/sampler_largest": float(log_ratio.abs().max()),
    }


@torch.no_grad()
def weighted(batch: Batch, cap: float) -> tuple[Batch, dict[str, float]]:
    """Weight each token's policy loss by min(π_old / π_sampler, cap) (truncated importance).

    The weight multiplies the token's loss term, not its credit, so whitening does not change it.
    Value targets and other loss terms are not weighted.
    """
    if batch.credit is None:
        raise ValueError(
            "rollout.mismatch_cap weighs credit, and this method has none. Remove the setting."
        )
    weight = _log_ratio(batch.rollouts).exp()
    cut = weight[batch.rollouts.mask] > cap
    weight = weight.clamp(max=cap).to(batch.credit.advantage.dtype)
    return replace(batch, weight=weight), {"agreement/weights_cut": float(cut.float().mean())}


def _log_ratio(rollouts: Rollouts) -> Float[Tensor, "B T"]:
    """log π_old − log π_sampler; 0 off the mask."""
    sampled = rollouts.column("logp_sampler", "the comparison of sampler and trainer")
    return (rollouts.logp_old - sampled).masked_fill(~rollouts.mask, 0.0)
