"""Gradients of the CUDA kernels: what autograd derives by itself from the plain torch code."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from segcredit.core import kernels

if TYPE_CHECKING:
    from segcredit.core.segments import Segments


class GeometricMeanRatio(torch.autograd.Function):
    """s = exp(P(logp − logp_old)), P the segment mean. ∂ = P(grad · s), since P is symmetric."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, logp_old: Tensor, segments: "Segments") -> Tensor:
        places = (segments.token_mask, segments.slot, segments.num)
        ratio, length = kernels.geometric_mean(logp, logp_old, *places)
        ctx.save_for_backward(ratio, length, *places)
        return ratio

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ratio, length, mask, slot, num = ctx.saved_tensors
        return kernels.mean_of_product(grad, ratio, mask, slot, num, length), None, None


class ClippedSurrogate(torch.autograd.Function):
    """−Â · clamp(ρ); ∂/∂ρ = −Â inside the interval, 0 outside."""

    @staticmethod
    def forward(
        ctx: Any, ratio: Tensor, advantage: Tensor, low: float, high: float, ceiling: float
    ) -> Tensor:
        loss, slope = kernels.clipped(ratio, advantage, low, high, ceiling)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None, None, None


class BoundarySquaredError(torch.autograd.Function):
    """(V − R̂)² at boundaries; ∂/∂V = 2 (V − R̂) there, 0 at every other token."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, target: Tensor, start: Tensor, num: Tensor) -> Tensor:
        error, loss = kernels.boundary_error(value, target, start, num)
        ctx.save_for_backward(error, start, num)
        ctx.width = value.shape[1]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        error, start, num = ctx.saved_tensors
        return kernels.boundary_gradient(grad, error, start, num, ctx.width), None, None, None
