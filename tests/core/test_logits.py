"""Log-probabilities and entropies from logits, against sums in plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from segcredit.core.logits import entropy, scaled, token_logp, token_logp_and_entropy

TEMPERATURES = [0.3, 0.7, 1.0, 2.5]


def naive(logits: list[float], temperature: float, banned: list[bool]) -> tuple[list[float], float]:
    """log π over the vocabulary, and H, straight from the definitions."""
    top = max(x for x, out in zip(logits, banned, strict=True) if not out)
    weights = [
        0.0 if out else math.exp((x - top) / temperature)
        for x, out in zip(logits, banned, strict=True)
    ]
    total = math.fsum(weights)
    p = [x / total for x in weights]
    logp = [
        -math.inf if out else (x - top) / temperature - math.log(total)
        for x, out in zip(logits, banned, strict=True)
    ]
    return logp, -math.fsum(a * math.log(a) for a in p if a > 0)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], list[bool], int]:
    size = draw(st.integers(1, 9))
    logits = draw(st.lists(st.floats(-40, 40), min_size=size, max_size=size))
    banned = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    allowed = draw(st.integers(0, size - 1))  # one at least must stay
    banned[allowed] = False
    return logits, banned, allowed


@given(rows(), st.sampled_from(TEMPERATURES), st.booleans())
def test_against_the_definitions(
    row: tuple[list[float], list[bool], int], temperature: float, ban: bool
) -> None:
    logits, banned, token = row
    if not ban:
        banned = [False] * len(logits)
    want_logp, want_h = naive(logits, temperature, banned)
    for dtype, close in ((torch.float64, 1e-11), (torch.float32, 2e-4)):
        x = torch.tensor([logits], dtype=dtype)
        out = torch.tensor(banned) if ban else None
        logp, h = token_logp_and_entropy(x, torch.tensor([token]), temperature, out)
        assert logp.dtype == h.dtype == dtype
        assert logp.item() == pytest.approx(want_logp[token], abs=close)
        assert h.item() == pytest.approx(want_h, abs=close)
        alone = token_logp(x, torch.tensor([token]), temperature, out)
        assert alone.item() == pytest.approx(want_logp[token], abs=close)


def test_hand_numbers() -> None:
    logits = torch.tensor([0.0, math.log(3.0), math.log(4.0)])
    token = torch.tensor(2)
    assert token_logp(logits, token).exp().item() == pytest.approx(4 / 8)
    assert token_logp(logits, token, 0.5).exp().item() == pytest.approx(16 / 26)
    banned = torch.tensor([False, True, False])
    assert token_logp(logits, token, 1.0, banned).exp().item() == pytest.approx(4 / 5)
    _, h = token_logp_and_entropy(logits, token, 0.5, banned)
    assert h.item() == pytest.approx(-(16 / 17 * math.log(16 / 17) + 1 / 17 * math.log(1 / 17)))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_banned_token_has_no_probability_and_the_others_share_all(temperature: float) -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    logits[..., 2] = 90.0  # the likeliest by far, were it allowed
    before = logits.clone()
    banned = torch.zeros(7, dtype=torch.bool)
    banned[[2, 5]] = True
    every = torch.arange(7).expand(2, 3, 7)
    wide = logits[..., None, :].expand(2, 3, 7, 7)
    logp, h = token_logp_and_entropy(wide, every, temperature, banned)
    assert (logp[..., banned] == -math.inf).all()
    assert torch.allclose(logp.exp().sum(-1), torch.ones(2, 3))
    assert torch.equal(token_logp(wide, every, temperature, banned) == -math.inf, logp == -math.inf)
    # what is left is the distribution over a vocabulary without them
    _, without = token_logp_and_entropy(logits[..., ~banned], every[..., 0], temperature)
    assert torch.allclose(h[..., 0], without, atol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_raised_before_anything_is_computed(dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = torch.tensor([0, 7, 200, 299])
    logp, h = token_logp_and_entropy(logits, tokens, 0.7)
    exact, exact_h = token_logp_and_entropy(logits.double(), tokens, 0.7)
    assert logp.dtype == h.dtype == torch.float32
    assert (logp - exact).abs().max() < 1e-5
    assert (h - exact_h).abs().max() < 1e-5


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [-1e30, -1e30, -1e30], [800.0, 799.0, -800.0]])
    logp, h = token_logp_and_entropy(logits, torch.tensor([0, 1, 1]), 0.5)
    assert logp.tolist() == pytest.approx([0.0, -math.log(3), -2.126928], abs=1e-4)
    assert h.tolist() == pytest.approx([0.0, math.log(3), 0.3653], abs=1e-4)


@pytest.mark.parametrize("banned", [None, [True, False, False, True, False]])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_gradients(banned: list[bool] | None, temperature: float) -> None:
    out = None if banned is None else torch.tensor(banned)
    tokens = torch.tensor([[1, 2], [4, 2]])
    logits = torch.randn(2, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits.requires_grad_()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return token_logp_and_entropy(x, tokens, temperature, out)

    assert torch.autograd.gradcheck(both, logits)
    assert torch.autograd.gradcheck(lambda x: token_logp(x, tokens, temperature, out), logits)
    alone, together = (
        torch.autograd.grad(f(logits).sum(), logits)[0]
        for f in (lambda x: token_logp(x, tokens, temperature, out), lambda x: both(x)[0])
    )
    assert torch.allclose(alone, together)
    if out is not None:
        assert (alone[..., out] == 0).all()


def test_gradients_are_finite_where_probabilities_vanish() -> None:
    logits = torch.tensor([[0.0, -300.0, 1.0, 5.0]], requires_grad=True)
    banned = torch.tensor([False, False, False, True])
    logp, h = token_logp_and_entropy(logits, torch.tensor([0]), 1.0, banned)
    (gradient,) = torch.autograd.grad((logp + 1e6 * h).sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, [1, 3]].tolist() == [0.0, 0.0]


def test_entropy_of_certainty_and_of_chance() -> None:
    certain = torch.tensor([[0.0, -math.inf, -math.inf]])
    chance = torch.full((1, 8), -math.log(8))
    assert entropy(certain).item() == 0.0
    assert entropy(chance).item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be positive"):
        scaled(torch.zeros(2), temperature)
