"""Losses per token or per segment, to be minimized, and their reductions.

Every reduction is a choice of per-token *shares* with an explicit denominator: the loss of a
mini-batch is Σ share · x. Shares are computed once per mini-batch and sliced with it, so splitting
it into micro-batches cannot change the gradient. The reductions work on tokens (B, T) and on
segments (B, M) alike.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from segcredit.core.checks import (
    at_least_float32,
    constant,
    has_kernels,
    keep,
    no_empty_row,
    require,
    require_mask,
    require_positive,
    require_shape,
)
from segcredit.core.ratios import geometric_mean_ratio
from segcredit.core.segments import Segments, ValueAt


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


def clipped_surrogate(
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, "B T"]:
    """Compute PPO's clipped loss per token (Eq. 3; over segments Eq. 9).

    The loss is −min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â).

    ``dual_clip`` c > 1 bounds the loss by −c Â where Â < 0 (the authors' code and verl: c = 3).
    """
    require_shape("advantage", advantage, "ratio", ratio)
    check_clip(clip_low, clip_high, dual_clip)
    advantage = advantage.detach()
    # the minimum is ρ Â inside an interval that depends only on the sign of Â, and the value at its
    # end outside: one clamp, one product
    low, high, ceiling = _bounds(clip_low, clip_high, dual_clip)
    number = partial(constant, dtype=ratio.dtype, device=ratio.device)
    least = torch.where(advantage < 0, number(low), number(-torch.inf))
    most = torch.where(advantage > 0, number(high), number(ceiling))
    return -advantage * ratio.clamp(least, most)


def _bounds(
    clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[float, float, float]:
    """Return the minimum ratio where Â < 0, maximum where Â > 0, maximum where Â < 0."""
    return 1.0 - clip_low, 1.0 + clip_high, torch.inf if dual_clip is None else dual_clip


def segment_policy_loss(
    logp: Float[Tensor, "B T"],
    logp_old: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    segments: Segments,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    shares: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Compute Σ share · clipped_surrogate(geometric_mean_ratio) (Eq. 8–9), and metrics to log.

    Without ``shares``, the loss is Eq. 9's mean over responses of token means. On CUDA one kernel
    computes the loss and its gradient.
    """
    check_clip(clip_low, clip_high, dual_clip)
    columns = {"logp": logp, "logp_old": logp_old, "advantage": advantage}
    if shares is not None:
        columns["shares"] = shares
    for name, x in columns.items():
        require_shape(name, x, "the token mask", segments.token_mask)
    # with one segment per response, all tokens of a row would add to one address
    if segments.width > 1 and has_kernels(*columns.values()):
        bounds = _bounds(clip_low, clip_high, dual_clip)
        loss, metrics = PolicyLossFunction.apply(  # type: ignore[no-untyped-call]
            logp, logp_old, advantage, segments, shares, bounds
        )
        return loss, {"ratio": metrics[0], "clip_fraction": metrics[1]}
    if shares is None:
        shares = response_shares(segments.token_mask, at_least_float32(logp).dtype)
    ratio = geometric_mean_ratio(logp, logp_old, segments)
    per_token = clipped_surrogate(ratio, advantage, clip_low, clip_high, dual_clip)
    loss = weighted_sum(keep(segments.token_mask, per_token), shares)
    ratio = ratio.detach()
    clipped = is_clipped(ratio, advantage, clip_low, clip_high, dual_clip).to(ratio.dtype)
    return loss, {
        "ratio": weighted_sum(ratio, shares),
        "clip_fraction": weighted_sum(clipped, shares),
    }


def check_clip(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    """Raise ValueError unless the clips are distances from 1 and the dual clip is above 1."""
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low must be in [0, 1] and clip_high ≥ 0; got {clip_low} and {clip_high}. "
            f"Pass distances from 1, e.g. 0.2 and 0.28, not the bounds 0.8 and 1.28."
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be greater than 1; got {dual_clip}. verl uses 3.0.")


def is_clipped(
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Bool[Tensor, "B T"]:
    """True where clipping stops the gradient: the ratio left the interval in Â's direction."""
    above = (ratio > 1.0 + clip_high) & (advantage > 0)
    below = (ratio < 1.0 - clip_low) & (advantage < 0)
    if dual_clip is not None:
        below = below | ((ratio > dual_clip) & (advantage < 0))
    return above | below


def probability_mask(
    logp_old: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], threshold: float = 0.9
) -> Bool[Tensor, "B T"]:
    """True at tokens sampled with π_old < threshold: only these enter SPO's loss."""
    require_shape("logp_old", logp_old, "mask", mask)
    return mask & (logp_old.exp() < threshold)


def boundary_value_loss(
    value: Float[Tensor, "B T"],
    value_old: Float[Tensor, "B T"],
    value_target: Float[Tensor, "B T"],
    segments: Segments,
    value_at: ValueAt = "start",
    clip: float | None = None,
    half: bool = False,
    reduce: Callable[[Tensor, Tensor], Tensor] = response_mean,
    shares: Float[Tensor, "B M"] | None = None,
) -> Float[Tensor, ""]:
    """Compute (1/M) Σ_m (V_φ(s_m) − R̂_m)² (Eq. 10), at segment boundaries only.

    Args:
        clip: also square the error of V_old + clip(V − V_old, ±clip) and keep the larger
            (the authors' code and verl: .5).
        half: the factor ½ of the authors' code and verl.
        reduce: (per-segment errors, segment mask) → scalar. The default is Eq. 10's; the authors'
            code averages over all boundaries: token_mean.
        shares: instead of ``reduce``, the share of each segment.
    """
    mask = segments.mask
    columns = {"value": value, "value_old": value_old, "value_target": value_target}
    for name, x in columns.items():
        require_shape(name, x, "the token mask", segments.token_mask)
    if shares is not None:
        require_shape("shares", shares, "the segment mask", mask)
    value_old, value_target = value_old.detach(), value_target.detach()
    known = shares is not None or reduce is response_mean  # reductions that the kernel supports
    given = (value, value_target) if shares is None else (value, value_target, shares)
    if known and value_at == "start" and clip is None and has_kernels(*given):
        factor = 0.5 if half else 1.0
        return ValueLossFunction.apply(  # type: ignore[no-untyped-call]
            value, value_target, segments, shares, factor
        )
    current = segments.read(at_least_float32(value), value_at)
    error = keep(mask, current - segments.read(value_target, value_at))
    loss = error.square()
    if clip is not None:
        moved = keep(mask, current - segments.read(at_least_float32(value_old), value_at))
        near = error - moved + moved.clamp(-clip, clip)
        loss = torch.maximum(loss, near.square())
    loss = 0.5 * loss if half else loss
    return reduce(loss, mask) if shares is None else weighted_sum(loss, shares)


def nll(logp: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Compute −log π_θ(y_t) (RestEM; VAPO's term on correct responses)."""
    return -at_least_float32(logp)


def k1(logp: Float[Tensor, "B T"], logp_ref: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Estimate the KL by log π − log π_ref: unbiased, may be negative. π_ref is a constant."""
    return at_least_float32(logp) - at_least_float32(logp_ref.detach())


def k2(logp: Float[Tensor, "B T"], logp_ref: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Estimate the KL by ½ (log π − log π_ref)²: biased, never negative."""
    return 0.5 * k1(logp, logp_ref).square()


def k3(
    logp: Float[Tensor, "B T"],
    logp_ref: Float[Tensor, "B T"],
    limit: float | None = None,
    log_ratio_limit: float | None = None,
) -> Float[Tensor, "B T"]:
    """Estimate the KL by e^u − u − 1 with u = log π_ref − log π: unbiased, never negative.

    Args:
        limit: clamps the result to [0, limit] (VinePPO: 10; verl: 10).
        log_ratio_limit: clamps u to ±log_ratio_limit first (SPO: 10; verl: 20).
    """
    u = -k1(logp, logp_ref)
    if log_ratio_limit is not None:
        u = u.clamp(-log_ratio_limit, log_ratio_limit)
    # e^u overflows above 88; a clamped result, or a token with share 0, would then have 0 · ∞
    u = u.clamp(max=80.0)
    estimate = torch.expm1(u) - u
    return estimate if limit is None else estimate.clamp(0.0, limit)


def dpo(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], beta: float
) -> Float[Tensor, " P"]:
    """Compute the DPO loss −log σ(β(Δ_w − Δ_l)), with Δ = Σ_t (log π − log π_ref)."""
    return -logsigmoid(beta * (chosen - rejected))


def dpo_positive(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"], beta: float, penalty: float = 50.0
) -> Float[Tensor, " P"]:
    """Compute the loss of DPO+ (DPOP), −log σ(β(Δ_w − Δ_l − λ max(0, −Δ_w))).

    The hinge is inside the sigmoid.
    """
    return -logsigmoid(beta * (chosen - rejected - penalty * (-chosen).clamp(min=0.0)))


def capped_weight(log_ratio: Float[Tensor, "B M"], cap: float) -> Float[Tensor, "B M"]:
    """Compute DVO's weight in SPO's code, min(exp Σ_{t ∈ step} (log π − log π_old), cap).

    It is a constant: it has no gradient.
    """
    return log_ratio.detach().exp().clamp(max=cap)


def direct_value(
    log_ratio: Float[Tensor, "B M"], target: Float[Tensor, "B M"], beta: float
) -> Float[Tensor, "B M"]:
    """Compute DVO's squared error per step, ½ (β Σ_{t ∈ step} (log π − log π_ref) − target)².

    target = r_m + V(s_{m+1}) − V(s_m). Do not whiten it: the loss fits its absolute scale.
    """
    return 0.5 * (beta * log_ratio - target).square()


class PolicyLossFunction(torch.autograd.Function):
    """Kernel of ``segment_policy_loss``: loss, and mean ratio with clip fraction."""

    @staticmethod
    def forward(
        ctx: Any,
        logp: Tensor,
        logp_old: Tensor,
        advantage: Tensor,
        segments: Segments,
        share: Tensor | None,
        bounds: tuple[float, float, float],
    ) -> tuple[Tensor, Tensor]:
        places = (segments.token_mask, segments.slot, segments.num)
        from segcredit.core import kernels  # needs Triton

        sums, grad = kernels.policy_loss(logp, logp_old, advantage, share, *places, bounds)
        ctx.save_for_backward(grad)
        loss, metrics = sums[0].to(logp.dtype), sums[1:].to(logp.dtype)
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad, None, None, None, None, None


class ValueLossFunction(torch.autograd.Function):
    """Kernel of ``boundary_value_loss``: factor · Σ share · (V − R̂)² at segment starts."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        target: Tensor,
        segments: Segments,
        share: Tensor | None,
        factor: float,
    ) -> Tensor:
        places = (segments.start, segments.num)
        from segcredit.core import kernels  # needs Triton

        loss, grad = kernels.value_loss(value, target, share, *places, factor)
        ctx.save_for_backward(grad)
        return loss.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * grad, None, None, None, None
