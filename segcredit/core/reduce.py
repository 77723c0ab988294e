"""Reductions of losses with explicit denominators.

Every reduction is a choice of per-token *shares*: the loss of a mini-batch is Σ share · x. Shares
are computed once per mini-batch and sliced with it, so splitting it into micro-batches cannot
change the gradient. Each function works on tokens (B, T) and on segments (B, M) alike.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.checks import (
    at_least_float32,
    keep,
    no_empty_row,
    require,
    require_mask,
    require_positive,
    require_shape,
)


def response_shares(
    mask: Bool[Tensor, "B T"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B T"]:
    """Return 1/(B · T_i): the mean over responses of each one's mean (Eq. 9; segments: Eq. 10).

    A response without any token in the mask still counts in B, and contributes 0 to the loss.
    """
    return mask / (_count(mask, 1, dtype).clamp(min=1) * mask.shape[0])


def token_shares(
    mask: Bool[Tensor, "B T"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B T"]:
    """Return 1/N with N = Σ_i T_i: the mean over all tokens. All zero if there are none."""
    return mask / _count(mask, (0, 1), dtype).clamp(min=1)


def constant_shares(
    mask: Bool[Tensor, "B T"], length: float = 1.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B T"]:
    """Return 1/(B · length): each response's sum over a constant, then the mean over responses.

    length = 1 gives the plain sum per response (REINFORCE over whole responses).
    """
    require_positive("length", length, "Pass 1 for sums per response.")
    return mask.to(dtype) / (mask.shape[0] * length)


def micro_batch_token_shares(
    mask: Bool[Tensor, "B T"], micro_batch: Int[Tensor, " B"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B T"]:
    """Token mean inside each micro-batch, micro-batches weighted equally.

    The gradient depends on how a mini-batch is divided, unlike all other reductions; the authors'
    code does this. Rows with equal numbers in ``micro_batch`` form a micro-batch.
    """
    numbers, micro_batch = micro_batch.unique(return_inverse=True)
    num = len(numbers)
    per_response = _count(mask, 1, dtype)
    tokens = per_response.new_zeros(num, 1).index_add(0, micro_batch, per_response)
    return mask / (tokens[micro_batch].clamp(min=1) * num)


def weighted_sum(x: Float[Tensor, "B T"], shares: Float[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Compute Σ share · x. Where the share is 0, x must still be finite."""
    return (x * shares).sum()


def response_mean(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Average over responses each response's mean, (1/B) Σ_i (1/T_i) Σ_t x_{i,t}."""
    x = _checked(x, mask)
    return weighted_sum(x, response_shares(mask, x.dtype))


def token_mean(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Average over all tokens, (1/Σ_i T_i) Σ_i Σ_t x_{i,t}."""
    x = _checked(x, mask)
    return weighted_sum(x, token_shares(mask, x.dtype))


def constant_mean(
    x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], length: float = 1.0
) -> Float[Tensor, ""]:
    """Average over responses each sum divided by a constant, (1/(B · length)) Σ_i Σ_t x_{i,t}."""
    x = _checked(x, mask)
    return weighted_sum(x, constant_shares(mask, length, x.dtype))


def _count(mask: Tensor, dim: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return mask.sum(dim=dim, keepdim=True, dtype=dtype)


def _checked(x: Tensor, mask: Tensor) -> Tensor:
    require_mask("mask", mask)
    require_shape("x", x, "mask", mask)
    require(no_empty_row(mask))
    return keep(mask, at_least_float32(x))
