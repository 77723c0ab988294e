"""Whitening and clamping: separate, named, and off unless an algorithm asks."""

from jaxtyping import Bool, Float
from torch import Tensor

from segcredit.core.checks import (
    Claim,
    accumulation_dtype,
    at_least_float32,
    keep,
    require,
    require_mask,
    require_positive,
    require_shape,
)


def whiten(
    x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], eps: float = 1e-8
) -> Float[Tensor, "B T"]:
    """(x − mean) / √(var + ε) over all valid entries, unbiased variance; 0 off the mask.

    Entries weigh equally: over tokens, a long segment counts once per token.
    """
    require_mask("mask", mask)
    require_shape("x", x, "mask", mask)
    x = at_least_float32(x)
    count = mask.sum()
    require(
        Claim(
            count,
            lambda number: number > 1,
            lambda: (
                f"whitening needs at least two valid entries; got {int(count)}. "
                f"Use a larger batch or leave whitening out."
            ),
        )
    )
    exact = keep(mask, x).to(accumulation_dtype(x))
    centred = keep(mask, exact - exact.sum() / count)
    variance = centred.square().sum() / (count - 1)
    return (centred / (variance + eps).sqrt()).to(x.dtype)


def clamp(x: Float[Tensor, "B T"], limit: float) -> Float[Tensor, "B T"]:
    """x limited to ±limit (the authors' code: advantages to ±5 after whitening)."""
    require_positive("limit", limit, "The authors' code uses 5.")
    return x.clamp(-limit, limit)
