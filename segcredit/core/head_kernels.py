"""Triton kernels of the language-model head: forward and gradient over a chunk of logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _numbers(
    logits,
    tokens,
    banned,
    chosen,
    normalizer,
    entropy,
    width,
    stride,
    inverse,
    HAS_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: running maximum m, Σ e^(x−m) and Σ e^(x−m)(x−m)."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    m = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for first in range(0, width, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < width
        if HAS_BANNED:
            inside = inside & (tl.load(banned + j, mask=inside, other=1) == 0)
        x = tl.load(start + j, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        new = tl.maximum(m, tl.max(x, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        # rescale the sums from the old maximum to the new one
        moved = tl.where(m == float("-inf"), 0.0, m - shift)
        scale = tl.where(m == float("-inf"), 0.0, tl.exp(moved))
        e = tl.where(inside, tl.exp(x - shift), 0.0)
        weighted = scale * (weighted + total * moved) + tl.sum(
            tl.where(e > 0.0, e * (x - shift), 0.0), axis=0
        )
        total = scale * total + tl.sum(e, axis=0)
        m = new
    y = tl.load(tokens + row)
    x_y = tl.load(start + y).to(tl.float32) * inverse
    if HAS_BANNED:
        x_y = tl.where(tl.load(banned + y) != 0, float("-inf"), x_y)
    log_total = tl.log(total)
    tl.store(chosen + row, x_y)
    tl.store(normalizer + row, m + log_total)
    tl.store(entropy + row, log_total - weighted / total)


@triton.jit
def _slope(
    logits,
    tokens,
    normalizer,
    entropy,
    to_logp,
    to_entropy,
    banned,
    width,
    stride,
    inverse,
    HAS_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row; writes the gradient over the logits."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < width
    place = logits + row * stride + j
    x = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32) * inverse
    if HAS_BANNED:
        x = tl.where(tl.load(banned + j, mask=inside, other=1) != 0, float("-inf"), x)
    a = tl.load(to_logp + row)
    b = tl.load(to_entropy + row)
    log_p = x - tl.load(normalizer + row)
    p = tl.exp(log_p)
    found = -p * (a + b * (log_p + tl.load(entropy + row)))
    found = tl.where(p > 0.0, found, 0.0)
    found += tl.where(j == tl.load(tokens + row), a, 0.0)
    tl.store(place, (found * inverse).to(logits.dtype.element_ty), mask=inside)


def numbers(
    logits: Tensor, tokens: Tensor, banned: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for each row the token's scaled logit, log Σ exp and the entropy."""
    rows, width = logits.shape
    found = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3)]
    with torch.cuda.device_of(logits):
        _numbers[(rows,)](
            logits,
            tokens,
            banned if banned is not None else tokens,
            *found,
            width,
            logits.stride(0),
            1.0 / temperature,
            HAS_BANNED=banned is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return found[0], found[1], found[2]


def slope_in_place(
    logits: Tensor,
    tokens: Tensor,
    normalizer: Tensor,
    entropy: Tensor,
    to_logp: Tensor,
    to_entropy: Tensor,
    banned: Tensor | None,
    temperature: float,
) -> Tensor:
    """Compute the gradient with respect to the logits, in place."""
    rows, width = logits.shape
    with torch.cuda.device_of(logits):
        _slope[(rows, triton.cdiv(width, BLOCK))](
            logits,
            tokens,
            normalizer,
            entropy,
            to_logp.float().contiguous(),
            to_entropy.float().contiguous(),
            banned if banned is not None else tokens,
            width,
            logits.stride(0),
            1.0 / temperature,
            HAS_BANNED=banned is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return logits


@triton.jit
def _draw(
    logits,
    uniform,
    banned,
    picked,
    logp,
    entropy,
    width,
    stride,
    inverse,
    HAS_BANNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: log Σ exp, H, and the token at which the cumulative sum exceeds u."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    m = tl.full((), float("-inf"), tl.float32)
    for first in range(0, width, BLOCK):
        x = _block(start, banned, first, width, inverse, HAS_BANNED, BLOCK)
        m = tl.maximum(m, tl.max(x, axis=0))
    total = tl.zeros((), tl.float64)
    weighted = tl.zeros((), tl.float32)
    for first in range(0, width, BLOCK):
        x = _block(start, banned, first, width, inverse, HAS_BANNED, BLOCK)
        e = tl.exp(x - m)
        total += tl.sum(e.to(tl.float64), axis=0)
        weighted += tl.sum(tl.where(e > 0.0, e * (x - m), 0.0), axis=0)
    log_total = tl.log(total.to(tl.float32))
    threshold = tl.load(uniform + row).to(tl.float64) * total
    before = tl.zeros((), tl.float64)
    token = tl.full((), 0, tl.int64)
    found = tl.full((), 0, tl.int32)
    for first in range(0, width, BLOCK):
        x = _block(start, banned, first, width, inverse, HAS_BANNED, BLOCK)
        e = tl.exp(x - m).to(tl.float64)
        after = before + tl.sum(e, axis=0)
        if (found == 0) & (after > threshold):
            low = (before + tl.cumsum(e, 0) <= threshold).to(tl.int64)
            # rounding may leave the whole block below: then its last token that has a probability
            last = tl.max(tl.where(e > 0.0, tl.arange(0, BLOCK), 0), axis=0).to(tl.int64)
            token = first + tl.minimum(tl.sum(low, axis=0), last)
            found = tl.full((), 1, tl.int32)
        before = after
    x = tl.load(start + token).to(tl.float32) * inverse
    tl.store(picked + row, token)
    tl.store(logp + row, x - m - log_total)
    tl.store(entropy + row, log_total - weighted / total.to(tl.float32))


@triton.jit
def _block(start, banned, first, width, inverse, HAS_BANNED: tl.constexpr, BLOCK: tl.constexpr):
    """Scaled logits of a block of the vocabulary; −∞ where there is no token or it is banned."""
    j = first + tl.arange(0, BLOCK)
    inside = j < width
    if HAS_BANNED:
        inside = inside & (tl.load(banned + j, mask=inside, other=1) == 0)
    x = tl.load(start + j, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(inside, x * inverse, float("-inf"))


def draw(
    logits: Tensor, uniform: Tensor, banned: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token per row by its random number; return tokens, log π and H.

    The token is the first at which the cumulative probability, in float64, exceeds u. Logits that
    are not finite give a log π that is not finite.
    """
    rows, width = logits.shape
    picked = torch.empty(rows, dtype=torch.long, device=logits.device)
    logp, entropy = (torch.empty(rows, device=logits.device) for _ in range(2))
    with torch.cuda.device_of(logits):
        _draw[(rows,)](
            logits,
            uniform,
            banned if banned is not None else uniform,
            picked,
            logp,
            entropy,
            width,
            logits.stride(0),
            1.0 / temperature,
            HAS_BANNED=banned is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return picked, logp, entropy
