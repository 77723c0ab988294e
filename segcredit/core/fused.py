"""Whole losses on CUDA, their gradients made together with their values.

A loss is a scalar, so its gradient is known, up to one factor, when its value is. Each function
here is one kernel forward and one product backward, where the plain torch code takes dozens.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from segcredit.core import kernels

if TYPE_CHECKING:
    from segcredit.core.segments import Segments


class PolicyLoss(torch.autograd.Function):
    """Σ share · clipped surrogate of the geometric-mean ratio; mean ratio and clip fraction."""

    @staticmethod
    def forward(
        ctx: Any,
        logp: Tensor,
        logp_old: Tensor,
        advantage: Tensor,
        segments: "Segments",
        share: Tensor | None,
        bounds: tuple[float, float, float],
    ) -> tuple[Tensor, Tensor]:
        places = (segments.token_mask, segments.slot, segments.num)
        sums, grad = kernels.policy_loss(logp, logp_old, advantage, share, *places, bounds)
        ctx.save_for_backward(grad)
        loss, watched = sums[0].to(logp.dtype), sums[1:].to(logp.dtype)
        ctx.mark_non_differentiable(watched)
        return loss, watched

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad, None, None, None, None, None


class ValueLoss(torch.autograd.Function):
    """factor · Σ share · (V − R̂)² at segment starts."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        target: Tensor,
        segments: "Segments",
        share: Tensor | None,
        factor: float,
    ) -> Tensor:
        places = (segments.start, segments.num)
        loss, grad = kernels.value_loss(value, target, share, *places, factor)
        ctx.save_for_backward(grad)
        return loss.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad, None, None, None, None
