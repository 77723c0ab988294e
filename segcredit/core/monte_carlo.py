"""Credit from Monte-Carlo values at unit starts (VinePPO, SPO-chain)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from segcredit.core.checks import (
    accumulation_dtype,
    finite,
    keep,
    require,
    require_mask,
    require_shape,
)
from segcredit.core.scan import reverse_scan


def value_difference(
    reward: Float[Tensor, "B M"],
    state_value: Float[Tensor, "B M"],
    mask: Bool[Tensor, "B M"],
    estimated: Bool[Tensor, "B M"] | None = None,
) -> Float[Tensor, "B M"]:
    """A_m = r_m + V̂(s_{m+1}) − V̂(s_m), with V̂ = 0 past the last unit.

    Equal to segment GAE at γ = 1, λ = 0 with these values.

    Args:
        reward: per unit (an outcome reward stands on the last one).
        state_value: mean reward of fresh continuations from the prefix before each unit.
        estimated: where V̂ was estimated (None: everywhere). A unit whose own start was not gets
            A = 0; a next value that was not counts as the return actually observed from there.
            So VinePPO's unestimated tail and the tokens before SPO's first cut get no credit.
    """
    require_mask("mask", mask)
    require_shape("reward", reward, "mask", mask)
    require_shape("state_value", state_value, "mask", mask)
    known = mask if estimated is None else mask & estimated
    require(finite(mask, reward=reward), finite(known, state_value=state_value))
    reward = keep(mask, reward)
    observed = reverse_scan(reward.to(accumulation_dtype(reward)), 1.0).to(reward.dtype)
    value = torch.where(known, state_value, observed)
    return keep(known, reward + pad(value[:, 1:], (0, 1)) - value)
