"""On a CUDA device: the kernels of a decoder layer and of sampling equal the torch code."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

from segcredit.core.logits import entropy
from segcredit.models import layers
from segcredit.models.layers import fuse_gates, fuse_norms, fuse_rotary
from segcredit.rollout.sampling import draw, pick
from segcredit.types import Sampling

pytestmark = pytest.mark.gpu

CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the size of the numbers."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max())


def tiny_llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to("cuda", dtype).eval()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "keys", "size"), [(9, 3, 64), (4, 4, 48), (16, 2, 128)])
def test_rotary(heads: int, keys: int, size: int, dtype: torch.dtype) -> None:
    from segcredit.core.layer_kernels import rotary, rotary_fits

    angles = seeded(1, 7, size // 2, seed=3).double().cpu()
    angles = torch.cat([angles, angles], dim=-1).cuda()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    given = [seeded(2, 7, n, size, dtype=dtype, seed=n).transpose(1, 2) for n in (heads, keys)]
    to = [seeded(2, n, 7, size, dtype=dtype, seed=n + 50) for n in (heads, keys)]
    found = []
    for function in (apply_rotary_pos_emb, rotary):
        q, k = (x.detach().clone().requires_grad_() for x in given)
        assert rotary_fits(q, k, cos, sin)
        outputs = function(q, k, cos, sin)
        found.append([*outputs, *torch.autograd.grad(outputs, (q, k), to)])
    for plain, fused in zip(*found, strict=True):
        assert difference(fused, plain) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
def test_gated_silu(dtype: torch.dtype) -> None:
    from segcredit.core.layer_kernels import gated_silu

    given = [seeded(3, 701, dtype=dtype, seed=n) for n in (1, 2)]
    to = seeded(3, 701, dtype=dtype, seed=5)
    found = []
    for fused in (False, True):
        gate, up = (x.clone().requires_grad_() for x in given)
        output = gated_silu(gate, up) if fused else torch.nn.functional.silu(gate) * up
        found.append([output, *torch.autograd.grad(output, (gate, up), to)])
    for plain, fused_one in zip(*found, strict=True):
        assert difference(fused_one, plain) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", [48, 64, 128, 256])
@pytest.mark.parametrize("columns", [5, 64, 200])
@pytest.mark.parametrize("masked", [True, False])
def test_one_decoding_step(size: int, columns: int, masked: bool, dtype: torch.dtype) -> None:
    from segcredit.core.layer_kernels import decode, decode_fits

    query = seeded(6, 9, 1, size, dtype=dtype)
    keys, values = (
        seeded(6, 3, columns + 20, size, dtype=dtype, seed=n)[:, :, :columns] for n in (1, 2)
    )
    bias = None
    if masked:
        open_columns = seeded(6, columns, seed=4) > 0
        open_columns[:, -1] = True
        bias = torch.zeros(6, 1, 1, columns, device="cuda", dtype=dtype)
        bias = bias.masked_fill(~open_columns[:, None, None], -torch.inf)
        values = values.clone()
        values[~open_columns[:, None].expand(6, 3, columns)] = 1e4  # must not be read
    assert decode_fits(query, keys, values, bias)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query.double(),
        keys.double(),
        values.double(),
        attn_mask=None if bias is None else bias.double(),
        enable_gqa=True,
    ).transpose(1, 2)
    found = decode(query, keys, values, bias, size**-0.5)
    assert found.dtype == dtype
    assert difference(found.double(), plain) < CLOSE[dtype]


def test_one_column_is_written() -> None:
    from segcredit.core.layer_kernels import store_column

    keys, values = (seeded(4, 3, 20, 48, seed=n)[:, :, :16] for n in (1, 2))
    key, value = (seeded(4, 1, 3, 48, seed=n).transpose(1, 2) for n in (3, 4))
    expected = keys.clone(), values.clone()
    column = torch.tensor([5], device="cuda")
    expected[0].index_copy_(2, column, key)
    expected[1].index_copy_(2, column, value)
    store_column(keys, values, key, value, column)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.parametrize("dtype", [*CLOSE, torch.float16])
def test_a_kernel_that_differs_is_not_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segcredit.core import layer_kernels

    device = torch.device("cuda", torch.cuda.current_device())
    assert layer_kernels._disagreements(device, dtype) == []
    monkeypatch.setattr(layer_kernels, "decode", lambda q, *_: q.transpose(1, 2))
    with pytest.warns(UserWarning, match="got a difference: decoding attention"):
        assert not layer_kernels.agree.__wrapped__(device, dtype)


def test_the_first_use_may_be_inside_a_recomputed_layer() -> None:
    """The comparison with torch then runs in the middle of a checkpointed forward pass."""
    from segcredit.core import layer_kernels

    model = tiny_llama().train()
    tokens = torch.arange(20, device="cuda")[None]
    found = []
    for fused in (False, True):
        if fused:
            fuse_rotary(model)
            fuse_gates(model)
            layer_kernels.agree.cache_clear()
            layers.recompute_activations(model)
        model.zero_grad()
        model(tokens, use_cache=False).logits.square().mean().backward()
        found.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    for plain, fused_one in zip(*found, strict=True):
        assert difference(fused_one, plain) < 1e-4


@pytest.mark.parametrize("width", [40, 4096, 49_152, 262_144])
@pytest.mark.parametrize("with_banned", [True, False])
def test_draw(width: int, with_banned: bool) -> None:
    logits = 4.0 * seeded(300, width)
    uniform = torch.rand(300, device="cuda")
    uniform[0], uniform[1] = 0.0, 1 - 2**-24
    banned = torch.rand(width, device="cuda") < 0.3 if with_banned else None
    sampling = Sampling(5, 0.7)
    log_pi, tokens = pick(logits, uniform, sampling, banned)
    found, logp, h = draw(logits, uniform, sampling, banned)
    # log π is rounded before the exponential in one and not in the other
    same = found == tokens
    assert float(same.float().mean()) > 0.98
    if banned is not None:
        assert not bool(banned[found].any())
    chosen = log_pi.gather(1, found[:, None]).squeeze(1)
    torch.testing.assert_close(logp, chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, entropy(log_pi), rtol=1e-4, atol=1e-4)
    total = log_pi.double().exp().cumsum(1)
    below = total.gather(1, found[:, None]).squeeze(1) - chosen.double().exp()
    after = total.gather(1, found[:, None]).squeeze(1)
    assert bool((below - 1e-5 <= uniform.double() * total[:, -1]).all())
    assert bool((uniform.double() * total[:, -1] <= after + 1e-5).all())


def test_draws_have_the_right_frequencies() -> None:
    logits = seeded(1, 12).expand(200_000, 12).contiguous()
    generator = torch.Generator("cuda").manual_seed(0)
    uniform = torch.rand(200_000, device="cuda", generator=generator)
    tokens, _, _ = draw(logits, uniform, Sampling(1), None)
    counts = torch.bincount(tokens, minlength=12) / 200_000
    assert float((counts - logits[0].softmax(0)).abs().max()) < 0.004


def test_logits_that_are_not_finite_give_no_finite_log_probability() -> None:
    logits = seeded(4, 9000)
    logits[1, 3], logits[2, 4], logits[3] = torch.nan, torch.inf, -torch.inf
    _, logp, _ = draw(logits, torch.full((4,), 0.5, device="cuda"), Sampling(1), None)
    assert logp.isfinite().tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_fused_model_equals_the_plain_one(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype)
    tokens = torch.randint(0, 50, (3, 50), device="cuda")
    found = []
    for fused in (False, True):
        if fused:
            assert (fuse_norms(model), fuse_rotary(model), fuse_gates(model)) == (5, 2, 2)
        model.zero_grad()
        logits = model(tokens, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 7].sum().backward()
        found.append([logits, *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    assert len(found[0]) > 15
    for plain, fused_one in zip(*found, strict=True):
        assert difference(fused_one, plain) < (1e-4 if dtype == torch.float32 else 0.05)


def test_the_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the same calls go to torch."""
    monkeypatch.setattr(layers, "has_layer_kernels", lambda x: False)
    model = tiny_llama()
    tokens = torch.arange(20, device="cuda")[None]
    plain = model(tokens).logits
    fuse_rotary(model)
    fuse_gates(model)
    assert torch.equal(model(tokens).logits, plain)
