"""Log-probabilities and entropies from logits, at the sampling temperature."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.checks import at_least_float32, has_head_kernels, require_positive

GREEDY = "Greedy choice has no log-probabilities of its own."


def scaled(
    logits: Float[Tensor, "*N V"], temperature: float, banned: Bool[Tensor, " V"] | None = None
) -> Float[Tensor, "*N V"]:
    """Divide logits by the temperature, in float32 or better; banned tokens get −∞."""
    require_positive("temperature", temperature, GREEDY)
    x = at_least_float32(logits)
    if temperature != 1.0:
        x = x / temperature
    return x if banned is None else x.masked_fill(banned, -torch.inf)


def entropy(logp: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """Compute the entropy H = −Σ p log p over the vocabulary; banned tokens add nothing.

    It takes log p as input: where p underflows to 0, the gradient of log(p) would be NaN.
    """
    finite = logp.clamp(min=-1000.0)  # p is 0 long before that, in any precision
    return -(logp.exp() * finite).sum(dim=-1)


def token_logp(
    logits: Float[Tensor, "*N V"],
    tokens: Int[Tensor, "*N"],
    temperature: float = 1.0,
    banned: Bool[Tensor, " V"] | None = None,
) -> Float[Tensor, "*N"]:
    """Compute log π of each given token."""
    x = scaled(logits, temperature, banned)
    chosen = x.gather(-1, tokens[..., None]).squeeze(-1)
    return chosen - x.logsumexp(dim=-1)


def token_logp_and_entropy(
    logits: Float[Tensor, "*N V"],
    tokens: Int[Tensor, "*N"],
    temperature: float = 1.0,
    banned: Bool[Tensor, " V"] | None = None,
) -> tuple[Float[Tensor, "*N"], Float[Tensor, "*N"]]:
    """Compute log π of each given token, and the entropy of its distribution."""
    logp = scaled(logits, temperature, banned).log_softmax(dim=-1)
    return logp.gather(-1, tokens[..., None]).squeeze(-1), entropy(logp)


CHUNK = 320_000_000
"""Number of logits that are computed at once: 0.6 GiB in bfloat16."""


def head_logp_and_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    tokens: Int[Tensor, " N"],
    temperature: float = 1.0,
    banned: Bool[Tensor, " V"] | None = None,
    bias: Float[Tensor, " V"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Compute log π of each token and the entropy from hidden states, without storing all logits.

    The distribution is softmax((W h + b)/temperature).

    The logits of all tokens are never in memory together: ``chunk`` tokens pass the head at once
    (None: as many as fit CHUNK logits). Values and gradients, the entropy's included, equal those
    of :func:`token_logp_and_entropy`. Logits are rounded as the model rounds them (bfloat16); what
    follows is float32 or better.
    """
    require_positive("temperature", temperature, GREEDY)
    if chunk is None:
        chunk = max(1, CHUNK // weight.shape[0])
        chunk = chunk if chunk < 256 else chunk // 256 * 256
    numbers: tuple[Tensor, Tensor] = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, banned, temperature, chunk
    )
    return numbers


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        banned: Tensor | None,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        parts = [
            _numbers(_logits(rows, weight, bias), some, banned, temperature)
            for rows, some in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
        ]
        chosen, normalizer, entropy = (torch.cat(x) for x in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, tokens, banned, normalizer, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, to_logp: Tensor, to_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, banned, normalizer, entropy = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if need_hidden else None
        # summed over chunks, so in float32 whatever the weight's dtype
        to_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if need_weight else None
        to_bias = torch.zeros_like(bias, dtype=_sum_dtype(bias)) if need_bias else None
        for first in range(0, len(hidden), ctx.chunk):
            some = slice(first, first + ctx.chunk)
            logits = _logits(hidden[some], weight, bias)
            slope = _slope(
                logits,
                tokens[some],
                normalizer[some],
                entropy[some],
                to_logp[some],
                to_entropy[some],
                banned,
                ctx.temperature,
            )
            if to_hidden is not None:
                torch.mm(slope, weight, out=to_hidden[some])
            if to_weight is not None:
                _add_product(to_weight, slope, hidden[some])
            if to_bias is not None:
                to_bias += slope.sum(dim=0, dtype=to_bias.dtype)
            del logits, slope
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias)


def _numbers(
    logits: Tensor, tokens: Tensor, banned: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for each row the token's scaled logit x_y, log Σ exp x and the entropy."""
    if has_head_kernels(logits):
        from segcredit.core.head_kernels import numbers

        return numbers(logits, tokens, banned, temperature)
    x = scaled(logits, temperature, banned)
    normalizer = x.logsumexp(dim=-1)
    chosen = x.gather(-1, tokens[:, None]).squeeze(-1)
    log_p = x - normalizer[:, None]
    p = log_p.exp()
    # a banned token has p = 0 and log p = −∞
    return chosen, normalizer, -(p * log_p.masked_fill(p == 0.0, 0.0)).sum(dim=-1)


def _slope(
    logits: Tensor,
    tokens: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    to_logp: Tensor,
    to_entropy: Tensor,
    banned: Tensor | None,
    temperature: float,
) -> Tensor:
    """Compute the gradient with respect to the logits, in place with the kernels.

    ∂ log π_y/∂x_j = 1[j = y] − p_j and ∂H/∂x_j = −p_j (log p_j + H), x = logits/temperature.
    """
    if has_head_kernels(logits):
        from segcredit.core.head_kernels import slope_in_place

        return slope_in_place(
            logits, tokens, normalizer, entropy, to_logp, to_entropy, banned, temperature
        )
    log_p = scaled(logits, temperature, banned) - normalizer[:, None]
    p = log_p.exp()
    found = -p * (to_logp[:, None] + to_entropy[:, None] * (log_p + entropy[:, None]))
    found = found.masked_fill(p == 0.0, 0.0)
    found.scatter_add_(1, tokens[:, None], to_logp[:, None])
    return (found / temperature).to(logits.dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """Add slopeᵀ hidden to ``total``, in place."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.T, hidden)
    elif slope.is_cuda:  # bfloat16 factors, float32 sum, in one pass
        torch.addmm(total, slope.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += slope.T.to(total.dtype) @ hidden.to(total.dtype)
