"""The head's kernels on a GPU say what plain torch says."""

import pytest
import torch

from segcredit.core.checks import has_head_kernels
from segcredit.core.logits import head_logp_and_entropy, token_logp_and_entropy

pytestmark = pytest.mark.gpu


def leaves(count: int, width: int, vocabulary: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(count, width, device="cuda", generator=generator)
    weight = torch.randn(vocabulary, width, device="cuda", generator=generator) / width**0.5 * 3
    bias = torch.randn(vocabulary, device="cuda", generator=generator)
    return [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("bans", [False, True])
@pytest.mark.parametrize("vocabulary", [7, 4096, 10_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_float64(
    dtype: torch.dtype, vocabulary: int, bans: bool, temperature: float, with_bias: bool
) -> None:
    given = leaves(300, 64, vocabulary, dtype)
    if not with_bias:
        given[2] = given[2].detach()
    tokens = torch.randint(0, vocabulary - 1, (300,), device="cuda")
    banned = None
    if bans:
        banned = torch.zeros(vocabulary, dtype=torch.bool, device="cuda")
        banned[-1] = True
    assert has_head_kernels(given[0])
    bias = given[2] if with_bias else None
    asked = given[: 3 if with_bias else 2]
    weight = torch.linspace(-1, 2, 300, device="cuda")

    def numbers(way, asked, bias):
        logp, h = way(*asked[:2], bias)
        total = (logp * weight).sum() + (h * weight.flip(0)).sum()
        return [logp, h, *torch.autograd.grad(total, asked)]

    def ours(hidden, head, bias):
        return head_logp_and_entropy(hidden, head, tokens, temperature, banned, bias, chunk=128)

    def theirs(hidden, head, bias):
        logits = torch.nn.functional.linear(hidden, head, bias)
        return token_logp_and_entropy(logits, tokens, temperature, banned)

    exact = [x.detach().double().requires_grad_() for x in asked]
    truth = numbers(theirs, exact, exact[2] if with_bias else None)
    plain = numbers(theirs, asked, bias)
    for mine, its, right in zip(numbers(ours, asked, bias), plain, truth, strict=True):
        error = float((mine.double() - right).detach().abs().max())
        allowed = float((its.double() - right).detach().abs().max())
        assert error <= 1.1 * allowed + 1e-5 * float(right.detach().abs().max())
        assert bool(mine.isfinite().all())


def test_an_extreme_softmax_stays_finite() -> None:
    hidden, weight, _ = leaves(8, 16, 5000, torch.float32)
    sharp = (hidden * 1e4).detach().requires_grad_()
    logp, h = head_logp_and_entropy(sharp, weight, torch.arange(8, device="cuda"))
    found = torch.autograd.grad(logp.sum() + h.sum(), (sharp, weight))
    assert all(bool(x.isfinite().all()) for x in (logp, h, *found))
    assert float(h.detach().abs().max()) < 1e-3


def test_memory_is_a_chunk_and_the_gradient() -> None:
    hidden, weight, _ = leaves(8192, 256, 50_000, torch.bfloat16)
    tokens = torch.arange(8192, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, h = head_logp_and_entropy(hidden, weight, tokens, chunk=1024)
    (logp.sum() + h.sum()).backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk, gradient = 1024 * 50_000 * 2, 50_000 * 256 * (4 + 2)
    assert peak < 1.3 * (chunk + gradient)
