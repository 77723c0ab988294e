"""Triton kernels of a decoder layer on CUDA: rotary embedding, gated MLP, decoding step.

A small model's time is spent launching kernels. transformers' rotary embedding takes ten launches
and eighteen in the backward pass, here one each; its decoding step takes nine per layer, here two.
The torch code of transformers defines what is computed; these kernels compute in float32 and round
once. :func:`agree` compares the two on a GPU before they are first used,
tests/test_gpu_layers.py in detail.
"""

import warnings
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import next_power_of_2

from segcredit.core.head_kernels import draw

WIDEST = 256
"""Largest head dimension that the kernels support."""


@triton.jit
def _rotate(
    source,
    target,
    cos,
    sin,
    source_row,
    source_head,
    target_row,
    target_head,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    """Rotate all heads of one token; ``BACK`` applies the transposed rotation."""
    head = tl.arange(0, HEADS_BLOCK)[:, None].to(tl.int64)
    j = tl.arange(0, HALF_BLOCK)
    use = j < HALF
    both = (head < HEADS) & use[None, :]
    c1 = tl.load(cos + j, mask=use, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + HALF + j, mask=use, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + j, mask=use, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + HALF + j, mask=use, other=0.0).to(tl.float32)[None, :]
    place = source + source_row + head * source_head + j[None, :]
    x1 = tl.load(place, mask=both, other=0.0).to(tl.float32)
    x2 = tl.load(place + HALF, mask=both, other=0.0).to(tl.float32)
    if BACK:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    place = target + target_row + head * target_head + j[None, :]
    tl.store(place, y1.to(target.dtype.element_ty), mask=both)
    tl.store(place + HALF, y2.to(target.dtype.element_ty), mask=both)


@triton.jit
def _rotary(
    q,
    k,
    new_q,
    new_k,
    cos,
    sin,
    width,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    Q_HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    """One program per token; results are contiguous as (batch, tokens, heads, head_dim)."""
    place = tl.program_id(0).to(tl.int64)
    row, t = place // width, place % width
    own_cos = cos + row * cos_batch + t * cos_token
    own_sin = sin + row * sin_batch + t * sin_token
    size: tl.constexpr = 2 * HALF
    _rotate(
        q,
        new_q,
        own_cos,
        own_sin,
        row * q_batch + t * q_token,
        q_head,
        place * Q_HEADS * size,
        size,
        Q_HEADS,
        Q_BLOCK,
        HALF,
        HALF_BLOCK,
        BACK,
    )
    _rotate(
        k,
        new_k,
        own_cos,
        own_sin,
        row * k_batch + t * k_token,
        k_head,
        place * K_HEADS * size,
        size,
        K_HEADS,
        K_BLOCK,
        HALF,
        HALF_BLOCK,
        BACK,
    )


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    batch, q_heads, width, size = q.shape
    k_heads = k.shape[1]
    new_q = q.new_empty(batch, width, q_heads, size).transpose(1, 2)
    new_k = k.new_empty(batch, width, k_heads, size).transpose(1, 2)
    with torch.cuda.device_of(q):
        _rotary[(batch * width,)](
            q,
            k,
            new_q,
            new_k,
            cos,
            sin,
            width,
            *q.stride()[:3],
            *k.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0,  # positions that all rows share
            cos.stride(1),
            sin.stride(0) if sin.shape[0] > 1 else 0,
            sin.stride(1),
            Q_HEADS=q_heads,
            Q_BLOCK=next_power_of_2(q_heads),
            K_HEADS=k_heads,
            K_BLOCK=next_power_of_2(k_heads),
            HALF=size // 2,
            HALF_BLOCK=next_power_of_2(size // 2),
            BACK=back,
            num_warps=4,
        )
    return new_q, new_k


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_q: Tensor, to_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if to_q.stride(-1) != 1:
            to_q = to_q.contiguous()
        if to_k.stride(-1) != 1:
            to_k = to_k.contiguous()
        return *_turn(to_q, to_k, cos, sin, back=True), None, None


def rotary_fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether :func:`rotary` supports these tensors."""
    if not all(isinstance(x, Tensor) for x in (q, k, cos, sin)) or not q.is_cuda:
        return False
    size = q.shape[-1]
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == sin.dim() == 3
        and size <= WIDEST
        and size % 2 == 0
        and cos.shape[-1] == k.shape[-1] == size
        and (k.shape[0], k.shape[2]) == (q.shape[0], q.shape[2])
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[2]
        and q.dtype == k.dtype == torch.result_type(q, cos) == torch.result_type(q, sin)
        and not (cos.requires_grad or sin.requires_grad)
        and all(x.stride(-1) == 1 for x in (q, k, cos, sin))
    )


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys.

    Queries and keys are (batch, heads, tokens, head_dim), cos and sin (batch, tokens, head_dim).
    """
    found: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return found


@triton.jit
def _gate(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    a = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + i, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(to_out, gate, up, to_gate, to_up, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g = tl.load(to_out + i, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gate + i, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + i, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(to_up + i, (g * a * s).to(to_up.dtype.element_ty), mask=inside)
    slope = s * (1 + a * (1 - s))
    tl.store(to_gate + i, (g * b * slope).to(to_gate.dtype.element_ty), mask=inside)


GATE_BLOCK = 1024


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    count = gate.numel()
    with torch.cuda.device_of(gate):
        _gate[(triton.cdiv(count, GATE_BLOCK),)](gate, up, out, count, BLOCK=GATE_BLOCK)
    return out


def _gated_slopes(to_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    with torch.cuda.device_of(gate):
        _gate_back[(triton.cdiv(count, GATE_BLOCK),)](
            to_out, gate, up, to_gate, to_up, count, BLOCK=GATE_BLOCK
        )
    return to_gate, to_up


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_out: Tensor) -> tuple[Tensor, Tensor]:
        return _gated_slopes(to_out.contiguous(), *ctx.saved_tensors)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) · up."""
    found: Tensor = _GatedSilu.apply(gate, up)  # type: ignore[no-untyped-call]
    return found


@triton.jit
def _decode(
    query,
    keys,
    values,
    bias,
    out,
    columns,
    scale,
    q_batch,
    q_head,
    k_batch,
    k_head,
    k_column,
    v_batch,
    v_head,
    v_column,
    bias_batch,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and key head: softmax over the columns, block by block."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, 16)  # query heads of this key head; a matrix product needs sixteen rows
    d = tl.arange(0, SIZE_BLOCK)
    own = (g < GROUP)[:, None] & (d < SIZE)[None, :]
    q_place = query + row * q_batch + (head * GROUP + g)[:, None] * q_head + d[None, :]
    q = tl.load(q_place, mask=own, other=0.0)
    most = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    found = tl.zeros((16, SIZE_BLOCK), tl.float32)
    for first in range(0, columns, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < columns
        use = inside[:, None] & (d < SIZE)[None, :]
        k_place = keys + row * k_batch + head * k_head + c[:, None] * k_column + d[None, :]
        k = tl.load(k_place, mask=use, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_BIAS:
            b = tl.load(bias + row * bias_batch + c, mask=inside, other=float("-inf"))
            x += b.to(tl.float32)[None, :]
        else:
            x = tl.where(inside[None, :], x, float("-inf"))
        new = tl.maximum(most, tl.max(x, axis=1))
        shift = tl.where(new == float("-inf"), 0.0, new)  # all columns so far are masked
        e = tl.exp(x - shift[:, None])
        kept = tl.where(most == float("-inf"), 0.0, tl.exp(most - shift))
        v_place = values + row * v_batch + head * v_head + c[:, None] * v_column + d[None, :]
        v = tl.load(v_place, mask=use, other=0.0)
        found = found * kept[:, None] + tl.dot(e.to(v.dtype), v, input_precision=PRECISION)
        total = total * kept + tl.sum(e, axis=1)
        most = new
    found = found / total[:, None]
    heads = tl.num_programs(1) * GROUP
    o_place = out + (row * heads + (head * GROUP + g)[:, None]) * SIZE + d[None, :]
    tl.store(o_place, found.to(out.dtype.element_ty), mask=own)


def decode_fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether :func:`decode` supports these tensors, and is fast with them."""
    batch, heads, _, size = query.shape
    key_heads, columns = key.shape[1], key.shape[2]
    small = batch * key_heads < 64 and columns > 1024  # few programs with long loops
    return (
        query.is_cuda
        and not small
        and size <= WIDEST
        and heads // key_heads <= 16
        and key.shape == value.shape
        and key.shape[-1] == size
        and query.dtype == key.dtype == value.dtype
        and all(x.stride(-1) == 1 for x in (query, key, value))
        and (mask is None or (mask.shape == (batch, 1, 1, columns) and mask.stride(-1) == 1))
    )


def decode(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Compute attention of one token per row.

    ``query`` is (batch, heads, 1, head_dim), the result (batch, 1, heads, head_dim); ``bias``
    (batch, 1, 1, columns) is added to the scores.
    """
    batch, heads, _, size = query.shape
    key_heads, columns = key.shape[1], key.shape[2]
    out = torch.empty((batch, 1, heads, size), dtype=query.dtype, device=query.device)
    wide = next_power_of_2(max(size, 16))
    with torch.cuda.device_of(query):
        _decode[(batch, key_heads)](
            query,
            key,
            value,
            bias if bias is not None else query,
            out,
            columns,
            scale,
            query.stride(0),
            query.stride(1),
            *key.stride()[:3],
            *value.stride()[:3],
            bias.stride(0) if bias is not None else 0,
            GROUP=heads // key_heads,
            SIZE=size,
            SIZE_BLOCK=wide,
            HAS_BIAS=bias is not None,
            PRECISION="ieee",
            # consumer GPUs have 99 KB of shared memory
            BLOCK=max(16, min(64, 16384 // (wide * query.element_size()))),
            num_warps=4,
        )
    return out


@triton.jit
def _store_column(
    keys,
    values,
    key,
    value,
    column,
    key_batch,
    key_head,
    key_column,
    value_batch,
    value_head,
    value_column,
    k_batch,
    k_head,
    v_batch,
    v_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    at = tl.load(column)
    d = tl.arange(0, BLOCK)
    use = d < SIZE
    k = tl.load(key + row * k_batch + head * k_head + d, mask=use)
    v = tl.load(value + row * v_batch + head * v_head + d, mask=use)
    tl.store(keys + row * key_batch + head * key_head + at * key_column + d, k, mask=use)
    tl.store(values + row * value_batch + head * value_head + at * value_column + d, v, mask=use)


def store_fits(key: Tensor, value: Tensor) -> bool:
    """Whether :func:`store_column` supports these tensors."""
    return key.shape == value.shape and key.stride(-1) == value.stride(-1) == 1


def store_column(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, column: Tensor) -> None:
    """Write one column of a KV cache: keys[:, :, column] = key, values[:, :, column] = value."""
    rows, heads, _, size = key.shape
    with torch.cuda.device_of(keys):
        _store_column[(rows, heads)](
            keys,
            values,
            key,
            value,
            column,
            *keys.stride()[:3],
            *values.stride()[:3],
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            SIZE=size,
            BLOCK=next_power_of_2(size),
            num_warps=1,
        )


@cache
@torch.no_grad()
def agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels equal torch on a small example, tried once; warn if not.

    They are compiled for the GPU and by the Triton at hand, so a fault there must not reach a run.
    """
    try:
        wrong = _disagreements(device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler may fail in any way
        wrong = [" ".join(str(error).split())[:200] or type(error).__name__]
    if wrong:
        warnings.warn(
            f"expected the fused kernels to equal torch on {torch.cuda.get_device_name(device)}; "
            f"got a difference: {'; '.join(wrong)}. The run continues without them, more slowly. "
            f"To avoid this warning, set SEGCREDIT_KERNELS=off.",
            stacklevel=2,
        )
    return not wrong


@torch.inference_mode(False)
def _disagreements(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Name the kernels whose results differ from those of torch.

    Gradients are compared without autograd: this may run inside a layer that is recomputed.
    """
    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-4 if dtype == torch.float32 else 0.02

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    def differ(found: Tensor, expected: Tensor) -> bool:
        found, expected = found.double().cpu(), expected.double().cpu()
        return not float((found - expected).abs().max() / expected.abs().max()) < tolerance

    wrong = []
    q, k, cos, sin = random(2, 5, 6, 64), random(2, 5, 2, 64), random(2, 5, 64), random(2, 5, 64)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    c, s = cos[:, None].double(), sin[:, None].double()
    for name, x, found in zip(
        ("queries", "keys"), (q, k), _turn(q, k, cos, sin, False), strict=True
    ):
        x = x.double()
        if differ(found, x * c + torch.cat([-x[..., 32:], x[..., :32]], dim=-1) * s):
            wrong.append(f"rotary embedding of {name}")
    part = q.double() * s
    back = q.double() * c + torch.cat([part[..., 32:], -part[..., :32]], dim=-1)
    if differ(_turn(q, k, cos, sin, back=True)[0], back):
        wrong.append("gradient of the rotary embedding")

    gate, up, to = random(3, 70), random(3, 70), random(3, 70)
    a, b, g = gate.double(), up.double(), to.double()
    sigmoid = a.sigmoid()
    expected = (a * sigmoid * b, g * b * sigmoid * (1 + a * (1 - sigmoid)), g * a * sigmoid)
    if any(map(differ, (_gated(gate, up), *_gated_slopes(to, gate, up)), expected)):
        wrong.append("gated MLP")

    one = random(2, 6, 1, 128)
    keys, values = random(2, 2, 70, 128), random(2, 2, 70, 128)
    store_column(keys, values, one[:, :2], one[:, 2:4], torch.tensor([3], device=device))
    if not (
        torch.equal(keys[:, :, 3:4], one[:, :2]) and torch.equal(values[:, :, 3:4], one[:, 2:4])
    ):
        wrong.append("KV cache")
    bias = torch.zeros(2, 1, 1, 70, device=device, dtype=dtype)
    bias[:, :, :, 5:20] = -torch.inf
    scores = one.double().view(2, 2, 3, 128) @ keys.double().transpose(2, 3) * 128**-0.5
    exact = (scores + bias.double()).softmax(dim=-1) @ values.double()
    if differ(decode(one, keys, values, bias, 128**-0.5), exact.view(2, 1, 6, 128)):
        wrong.append("decoding attention")

    logits, uniform = 3.0 * random(6, 5000), torch.linspace(0.0, 0.99, 6)
    tokens, logp, entropy = (x.cpu() for x in draw(logits, uniform.to(device), None, 0.7))
    log_pi = (logits.cpu().double() / 0.7).log_softmax(dim=-1)
    chosen = log_pi.gather(1, tokens[:, None]).squeeze(1)
    after = log_pi.exp().cumsum(dim=1).gather(1, tokens[:, None]).squeeze(1)
    right = (after - chosen.exp() - 1e-5 <= uniform) & (uniform <= after + 1e-5)
    if not right.all() or differ(logp, chosen) or differ(entropy, -(log_pi.exp() * log_pi).sum(1)):
        wrong.append("sampling")
    return wrong
