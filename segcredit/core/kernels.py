"""Triton kernels for partition, credit and losses on CUDA.

Credit is little arithmetic on large batches: in plain torch, its time on a GPU is spent launching
more than a hundred kernels. Here each step is one launch. The torch code defines what is computed
and runs on all other devices; tests/test_gpu.py compares the two.

A program processes one response in blocks of tokens. Data per segment is kept in scratch memory as
wide as the response, so the number of segments need not be known.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

UNITS = 1024
"""Segments per block of the scan."""


def _blocks(width: int) -> dict[str, int]:
    """Tokens per block, and warps per program."""
    tokens = min(4096, max(256, next_power_of_2(width)))
    return {"TOKENS": tokens, "num_warps": 16 if tokens == 4096 else 8}


@triton.jit
def _top_entropy(
    entropy, mask, table, slot, start, starts, num, bad, reached, width, BLOCK: tl.constexpr
):
    """Find the n largest entropies of a response, ties by position, and number its segments."""
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    inside = t < width
    here = row * width + t
    valid = tl.load(mask + here, mask=inside, other=0) != 0
    h = tl.load(entropy + here, mask=valid, other=0.0)
    tl.atomic_add(bad, tl.sum((valid & ((h != h) | (tl.abs(h) == float("inf")))).to(tl.int64)))
    # the bits of a float, read as an integer of the float's order; −0.0 counts as 0.0
    bits = tl.where(h == 0, 0.0, h).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    wanted = tl.load(table + tl.sum(valid.to(tl.int32))).to(tl.int32)
    # the n-th largest key, two bits at a time from the top: three counts packed into one sum
    wide = key.to(tl.int64)
    threshold = tl.full((), -2147483648, tl.int64)
    for step in range(16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        packed = (wide >= threshold + unit).to(tl.int64)
        packed += (wide >= threshold + 2 * unit).to(tl.int64) << 20
        packed += (wide >= threshold + 3 * unit).to(tl.int64) << 40
        counts = tl.sum(tl.where(valid, packed, 0), axis=0)
        enough = ((counts & 0xFFFFF) >= wanted).to(tl.int64)
        enough += (((counts >> 20) & 0xFFFFF) >= wanted).to(tl.int64)
        enough += ((counts >> 40) >= wanted).to(tl.int64)
        threshold += enough * unit
    above = valid & (wide > threshold)
    tied = (valid & (wide == threshold)).to(tl.int32)
    room = wanted - tl.sum(above.to(tl.int32))
    end = (above | ((tied != 0) & (tl.cumsum(tied, 0) <= room))).to(tl.int32)

    index = tl.cumsum(end, 0) - end
    count = tl.max(tl.where(valid, index + 1, 0), axis=0)
    tl.store(num + row, count.to(tl.int64))
    elsewhere = t % tl.maximum(count, 1)
    tl.store(slot + here, tl.where(valid, index, elsewhere).to(tl.int64), mask=inside)
    # a token starts its segment if no valid token before it has its number
    tl.store(
        reached + here, tl.associative_scan(tl.where(valid, index, -1), 0, _larger), mask=inside
    )
    tl.debug_barrier()
    before = tl.load(reached + here - 1, mask=inside & (t > 0), other=-1)
    first = valid & (index > before)
    tl.store(starts + here, first.to(tl.int8), mask=inside)
    tl.store(start + row * width + index, t.to(tl.int64), mask=first)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _after(later_factor, later, factor, here):
    """Compute here + factor · later, as an associative composition of affine maps."""
    return later_factor * factor, here + factor * later


def top_entropy(
    entropy: Tensor, mask: Tensor, table: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return slot, start and starts of ``Segments``, all of width T, and a vector.

    The vector holds each response's number of segments and, last, the number of entropies that are
    not finite.
    """
    rows, width = mask.shape
    info = torch.zeros(rows + 1, dtype=torch.long, device=mask.device)  # num, and the bad ones
    slot = torch.empty((rows, width), dtype=torch.long, device=mask.device)
    start = torch.zeros_like(slot)
    starts = torch.empty_like(mask)
    reached = torch.empty((rows, width), dtype=torch.int32, device=mask.device)
    block = next_power_of_2(width)
    with torch.cuda.device_of(mask):
        _top_entropy[(rows,)](
            entropy.contiguous(),
            mask,
            table,
            slot,
            start,
            starts,
            info,
            info[rows:],
            reached,
            width,
            BLOCK=block,
            num_warps=min(32, max(4, block // 512)),
        )
    return slot, start, starts, info


@triton.jit
def _segment_gae(
    reward,
    value,
    mask,
    slot,
    starts,
    num,
    decay,
    reward_seg,
    value_seg,
    advantage,
    target,
    bad,
    width,
    decay_stride,
    gamma: tl.constexpr,  # a plain float argument would be rounded to float32
    outcome: tl.constexpr,  # one reward per response, not per token
    TOKENS: tl.constexpr,
    UNITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = row * width
    columns = tl.load(num + row)
    for offset in range(0, columns, TOKENS):
        m = offset + tl.arange(0, TOKENS)
        tl.store(reward_seg + base + m, 0.0, mask=m < columns)
    tl.debug_barrier()

    # r_m = Σ r_t, and V at the first token
    for offset in range(0, width, TOKENS):
        t = offset + tl.arange(0, TOKENS)
        here = base + t
        valid = tl.load(mask + here, mask=t < width, other=0) != 0
        v = tl.load(value + here, mask=valid, other=0.0)
        if outcome:
            r = tl.zeros([TOKENS], dtype=tl.float32)
        else:
            r = tl.load(reward + here, mask=valid, other=0.0)
        both = r + v
        broken = valid & ((both != both) | (tl.abs(both) == float("inf")))
        if tl.sum(broken.to(tl.int32)) > 0:
            tl.atomic_add(bad, 1)
        index = tl.load(slot + here, mask=valid, other=0)
        first = tl.load(starts + here, mask=valid, other=0) != 0
        tl.atomic_add(reward_seg + base + index, r, mask=valid & (r != 0.0))
        tl.store(value_seg + base + index, v, mask=first)
    tl.debug_barrier()
    if outcome:
        r_end = tl.load(reward + row)
        if (r_end != r_end) | (tl.abs(r_end) == float("inf")):
            tl.atomic_add(bad, 1)
        tl.store(reward_seg + base + columns - 1, r_end)
        tl.debug_barrier()

    # δ and its reverse scan, block by block from the last segment to the first
    unit = tl.arange(0, UNITS)
    factor = tl.load(decay + row * decay_stride) + tl.zeros([UNITS], dtype=tl.float64)
    incoming = tl.zeros((), dtype=tl.float64)
    num_blocks = (columns + UNITS - 1) // UNITS
    for step in range(num_blocks):
        m = (num_blocks - 1 - step) * UNITS + unit
        real = m < columns
        v = tl.load(value_seg + base + m, mask=real, other=0.0).to(tl.float64)
        ahead = tl.load(value_seg + base + m + 1, mask=m + 1 < columns, other=0.0).to(tl.float64)
        r = tl.load(reward_seg + base + m, mask=real, other=0.0).to(tl.float64)
        td_error = tl.where(real, r - v + gamma * ahead, 0.0)
        reach, y = tl.associative_scan((factor, td_error), 0, _after, reverse=True)
        y += reach * incoming
        incoming = tl.sum(tl.where(unit == 0, y, 0.0), axis=0)
        tl.debug_barrier()  # every thread has read the rewards that are overwritten now
        tl.store(reward_seg + base + m, y.to(tl.float32), mask=real)
    tl.debug_barrier()

    # Â_m and R̂_m to every token
    for offset in range(0, width, TOKENS):
        t = offset + tl.arange(0, TOKENS)
        here = base + t
        valid = tl.load(mask + here, mask=t < width, other=0) != 0
        index = tl.load(slot + here, mask=valid, other=0)
        a = tl.load(reward_seg + base + index, mask=valid, other=0.0)
        v = tl.load(value_seg + base + index, mask=valid, other=0.0)
        tl.store(advantage + here, a, mask=t < width)
        tl.store(target + here, a + v, mask=t < width)


def segment_gae(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    slot: Tensor,
    starts: Tensor,
    num: Tensor,
    decay: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Â and R̂ per token, and how many blocks of tokens have non-finite numbers.

    ``decay`` is γλ in float64: one number, or one per response.
    """
    rows, width = mask.shape
    scratch = reward.new_empty(2, rows, width)
    advantage, target = reward.new_empty(2, rows, width)
    bad = torch.zeros(1, dtype=torch.int32, device=mask.device)
    with torch.cuda.device_of(mask):
        _segment_gae[(rows,)](
            reward.contiguous(),
            value.contiguous(),
            mask.contiguous(),
            slot.contiguous(),
            starts.contiguous(),
            num,
            decay,
            scratch[0],
            scratch[1],
            advantage,
            target,
            bad,
            width,
            decay.ndim,
            gamma=gamma,
            outcome=reward.ndim == 1,
            UNITS=UNITS,
            **_blocks(width),
        )
    return advantage, target, bad


@triton.jit
def _policy_loss(
    logp,
    logp_old,
    advantage,
    share,
    mask,
    slot,
    num,
    total,
    length,
    pull,
    grad,
    sums,
    width,
    low: tl.constexpr,
    high: tl.constexpr,
    ceiling: tl.constexpr,
    weighted: tl.constexpr,  # shares given; else the mean over responses of token means
    TOKENS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = row * width
    columns = tl.load(num + row)
    for offset in range(0, columns, TOKENS):
        m = offset + tl.arange(0, TOKENS)
        tl.store(total + base + m, 0.0, mask=m < columns)
        tl.store(length + base + m, 0.0, mask=m < columns)
        tl.store(pull + base + m, 0.0, mask=m < columns)
    tl.debug_barrier()

    # Σ x_t and |z_m|
    tokens = tl.zeros((), dtype=tl.int32)
    for offset in range(0, width, TOKENS):
        t = offset + tl.arange(0, TOKENS)
        here = base + t
        valid = tl.load(mask + here, mask=t < width, other=0) != 0
        index = tl.load(slot + here, mask=valid, other=0)
        x = tl.load(logp + here, mask=valid, other=0.0)
        x -= tl.load(logp_old + here, mask=valid, other=0.0)
        tl.atomic_add(total + base + index, x, mask=valid)
        tl.atomic_add(length + base + index, 1.0, mask=valid)
        tokens += tl.sum(valid.to(tl.int32), axis=0)
    tl.debug_barrier()

    # the surrogate of each token, and its gradient with respect to the segment's mean log-ratio
    loss = tl.zeros((), dtype=tl.float64)
    mean_ratio = tl.zeros((), dtype=tl.float64)
    fraction = tl.zeros((), dtype=tl.float64)
    for offset in range(0, width, TOKENS):
        t = offset + tl.arange(0, TOKENS)
        here = base + t
        valid = tl.load(mask + here, mask=t < width, other=0) != 0
        index = tl.load(slot + here, mask=valid, other=0)
        mean = tl.load(total + base + index, mask=valid, other=0.0)
        mean /= tl.load(length + base + index, mask=valid, other=1.0)
        extreme = tl.abs(mean) > 80.0  # where float32 would overflow
        ratio = tl.exp(tl.minimum(tl.maximum(mean, -80.0), 80.0))
        a = tl.load(advantage + here, mask=valid, other=0.0)
        if weighted:
            w = tl.load(share + here, mask=valid, other=0.0)
        else:
            w = tl.where(valid, 1.0 / (tokens * tl.num_programs(0)).to(tl.float32), 0.0)
        least = tl.where(a < 0, tl.full([TOKENS], low, tl.float32), float("-inf"))
        most = tl.where(
            a > 0, tl.full([TOKENS], high, tl.float32), tl.full([TOKENS], ceiling, tl.float32)
        )
        clipped = (ratio < least) | (ratio > most)
        bounded = tl.where(ratio < least, least, tl.where(ratio > most, most, ratio))
        loss += tl.sum((-a * bounded * w).to(tl.float64), axis=0)
        mean_ratio += tl.sum((ratio * w).to(tl.float64), axis=0)
        fraction += tl.sum(tl.where(clipped & (a != 0), w, 0.0).to(tl.float64), axis=0)
        force = tl.where(clipped | extreme, 0.0, -a * w * ratio)
        tl.atomic_add(pull + base + index, force, mask=valid & (force != 0.0))
    tl.atomic_add(sums, loss)
    tl.atomic_add(sums + 1, mean_ratio)
    tl.atomic_add(sums + 2, fraction)
    tl.debug_barrier()

    # ∂/∂log π_t: the gradient of the mean is divided equally among the segment's tokens
    for offset in range(0, width, TOKENS):
        t = offset + tl.arange(0, TOKENS)
        here = base + t
        valid = tl.load(mask + here, mask=t < width, other=0) != 0
        index = tl.load(slot + here, mask=valid, other=0)
        force = tl.load(pull + base + index, mask=valid, other=0.0)
        force /= tl.load(length + base + index, mask=valid, other=1.0)
        tl.store(grad + here, force, mask=t < width)


def policy_loss(
    logp: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    share: Tensor | None,
    mask: Tensor,
    slot: Tensor,
    num: Tensor,
    bounds: tuple[float, float, float],
) -> tuple[Tensor, Tensor]:
    """Return [loss, mean ratio, clip fraction] and the gradient of the loss in logp."""
    total, length, pull, grad = logp.new_empty(4, *logp.shape)
    sums = torch.zeros(3, dtype=torch.float64, device=logp.device)
    low, high, ceiling = bounds
    width = logp.shape[1]
    with torch.cuda.device_of(mask):
        _policy_loss[(len(logp),)](
            logp.contiguous(),
            logp_old.contiguous(),
            advantage.contiguous(),
            logp if share is None else share.contiguous(),
            mask.contiguous(),
            slot.contiguous(),
            num.contiguous(),
            total,
            length,
            pull,
            grad,
            sums,
            width,
            low=low,
            high=high,
            ceiling=ceiling,
            weighted=share is not None,
            **_blocks(width),
        )
    return sums, grad


@triton.jit
def _value_loss(
    value,
    target,
    share,
    start,
    num,
    grad,
    loss,
    width,
    columns,
    stride,
    size,
    scale,
    weighted: tl.constexpr,  # shares given; else each response's mean
    TOKENS: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = unit < size
    row = unit // columns
    m = unit % columns
    segments = tl.load(num + row, mask=inside, other=1)
    real = inside & (m < segments)
    place = row * width + tl.load(start + row * stride + m, mask=real, other=0)
    error = tl.load(value + place, mask=real, other=0.0)
    error -= tl.load(target + place, mask=real, other=0.0)
    if weighted:
        w = tl.load(share + unit, mask=real, other=0.0) * scale
    else:
        w = tl.where(real, scale / segments.to(tl.float32), 0.0)
    tl.atomic_add(loss, tl.sum((w * error * error).to(tl.float64), axis=0))
    tl.store(grad + place, 2.0 * w * error, mask=real)


def value_loss(
    value: Tensor, target: Tensor, share: Tensor | None, start: Tensor, num: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """Compute factor · Σ share · (value − target)² at the boundaries, and its gradient."""
    grad = value.new_zeros(value.shape)
    loss = torch.zeros((), dtype=torch.float64, device=value.device)
    size = start.numel()
    with torch.cuda.device_of(value):
        _value_loss[(cdiv(size, 1024),)](
            value.contiguous(),
            target.contiguous(),
            value if share is None else share.contiguous(),
            start,
            num.contiguous(),
            grad,
            loss,
            value.shape[1],
            start.shape[1],
            start.stride(0),
            size,
            factor if share is not None else factor / len(value),
            weighted=share is not None,
            TOKENS=1024,
        )
    return loss, grad
