"""The head in chunks equals the head at once, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from segcredit.core.logits import head_logp_and_entropy, token_logp_and_entropy


def made(
    count: int, width: int, vocabulary: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, vocabulary, (count,), generator=generator)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return leaves[0], leaves[1], leaves[2], tokens


def gradients(numbers: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a sum that weighs every entry differently."""
    logp, entropy = numbers
    weight = torch.linspace(-1.0, 2.0, len(logp), dtype=logp.dtype)
    total = (logp * weight).sum() + (entropy * weight.flip(0)).sum()
    return list(torch.autograd.grad(total, leaves))


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 9),
    vocabulary=st.integers(3, 12),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    bans=st.booleans(),
    seed=st.integers(0, 5),
)
def test_equals_all_logits_at_once(
    count: int, vocabulary: int, chunk: int, temperature: float, bans: bool, seed: int
) -> None:
    hidden, weight, bias, tokens = made(count, 4, vocabulary, seed)
    banned = None
    if bans:
        banned = torch.zeros(vocabulary, dtype=torch.bool)
        banned[-1] = True
        tokens = tokens % (vocabulary - 1)
    leaves = [hidden, weight, bias]
    ours = head_logp_and_entropy(hidden, weight, tokens, temperature, banned, bias, chunk)
    theirs = token_logp_and_entropy(hidden @ weight.T + bias, tokens, temperature, banned)
    for a, b in zip(
        [*ours, *gradients(ours, leaves)], [*theirs, *gradients(theirs, leaves)], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_gradients_by_differences() -> None:
    hidden, weight, bias, tokens = made(5, 3, 7)
    banned = torch.tensor([False, True, False, False, False, False, True])
    tokens = torch.tensor([0, 2, 3, 4, 5])
    assert torch.autograd.gradcheck(
        lambda h, w, b: head_logp_and_entropy(h, w, tokens, 0.7, banned, b, 2),
        (hidden, weight, bias),
    )


def test_an_extreme_softmax_stays_finite() -> None:
    hidden, weight, _, tokens = made(4, 3, 6, dtype=torch.float32)
    sharp = (hidden * 1e4).detach().requires_grad_()
    numbers = head_logp_and_entropy(sharp, weight, tokens)
    found = gradients(numbers, [sharp, weight])
    assert all(bool(x.isfinite().all()) for x in [*numbers, *found])
    assert float(numbers[1].detach().abs().max()) < 1e-3, "a point has no entropy"


def test_bfloat16_is_as_good_as_the_logits_at_once() -> None:
    exact = made(64, 32, 500)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact[:2]]
    double = [x.detach().double().requires_grad_() for x in rounded]
    tokens = exact[3]
    truth = token_logp_and_entropy(double[0] @ double[1].T, tokens)
    right = [*truth, *gradients(truth, double)]
    worst = []
    for way in (
        lambda h, w: head_logp_and_entropy(h, w, tokens, chunk=9),
        lambda h, w: token_logp_and_entropy(h @ w.T, tokens),
    ):
        numbers = way(*rounded)
        found = [*numbers, *gradients(numbers, rounded)]
        assert numbers[0].dtype == torch.float32
        worst.append(
            [
                float((a.double() - b).detach().abs().max())
                for a, b in zip(found, right, strict=True)
            ]
        )
    for ours, theirs in zip(*worst, strict=True):
        assert ours <= 1.05 * theirs


def test_only_what_is_asked_gets_a_gradient() -> None:
    hidden, weight, _, tokens = made(4, 3, 6)
    frozen = weight.detach()
    logp, _ = head_logp_and_entropy(hidden, frozen, tokens)
    logp.sum().backward()
    assert hidden.grad is not None
    assert frozen.grad is None


def test_memory_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    import segcredit.core.logits as head

    seen: list[int] = []
    original = head._logits

    def counted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(hidden))
        return original(hidden, weight, bias)

    monkeypatch.setattr(head, "_logits", counted)
    monkeypatch.setattr(head, "CHUNK", 30)
    hidden, weight, _, tokens = made(11, 3, 6)
    logp, _ = head_logp_and_entropy(hidden, weight, tokens)
    logp.sum().backward()
    assert seen == [5, 5, 1, 5, 5, 1]


def test_a_temperature_of_zero_is_refused() -> None:
    hidden, weight, _, tokens = made(2, 3, 6)
    with pytest.raises(ValueError, match="temperature"):
        head_logp_and_entropy(hidden, weight, tokens, 0.0)
