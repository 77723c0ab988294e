"""The next token by inverse transform, and the nucleus, on hand numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_policies import encoded, engine, fresh_policy, seeded
from torch import Tensor

from segcredit.rollout.sampling import choose, nucleus
from segcredit.types import Sampling


def log(p: list[float]) -> Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


def chosen(p: list[float], u: float) -> int:
    return int(choose(log(p), torch.tensor([u], dtype=torch.float64)))


ALMOST_ONE = math.nextafter(1.0, 0.0)


def test_hand_numbers() -> None:
    p = [0.125, 0.5, 0.25, 0.125]  # sums 0.125, 0.625, 0.875, 1
    for u, want in [(0, 0), (0.124, 0), (0.126, 1), (0.624, 1), (0.626, 2), (0.874, 2), (0.876, 3)]:
        assert chosen(p, u) == want, u
    assert chosen(p, ALMOST_ONE) == 3


def test_a_token_of_no_probability_is_never_chosen() -> None:
    p = [0.0, 0.0, 0.5, 0.0, 0.5, 0.0, 0.0]
    for u, want in [(0.0, 2), (0.499, 2), (0.5, 4), (ALMOST_ONE, 4)]:
        assert chosen(p, u) == want, u
    largest = torch.tensor([1 - 2**-24])  # that torch.rand gives in float32
    assert largest < 1
    assert choose(log(p).float(), largest).item() == 4
    assert choose(log(p).float(), torch.zeros(1)).item() == 2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 1, exclude_max=True))
def test_any_distribution_and_any_draw(weights: list[float], u: float) -> None:
    if sum(weights) < 1e-6:
        weights = [*weights, 1.0]
    p = [x / math.fsum(weights) for x in weights]
    token = chosen(p, u)
    assert p[token] > 0
    before = math.fsum(p[:token])
    assert before <= u * (1 + 1e-9) + 1e-12
    assert u <= before + p[token] + 1e-9


def test_probabilities_that_do_not_sum_to_one_are_scaled() -> None:
    """What the nucleus leaves over."""
    half = [0.25, 0.25, 0.0, 0.0]
    assert [chosen(half, u) for u in (0.0, 0.49, 0.5, ALMOST_ONE)] == [0, 0, 1, 1]


def test_the_tail_of_a_large_vocabulary_can_be_drawn() -> None:
    """In float32 sums near 1, steps of 1e-9 would be lost."""
    size = 200_000
    p = torch.full((1, size), 1e-9, dtype=torch.float64)
    p[0, 0] = 1 - 1e-9 * (size - 1)
    for want in (1, 77_777, size - 1):
        u = p[0, 0] + 1e-9 * (want - 0.5)
        assert choose(p.log(), u.view(1)).item() == want


def test_frequencies() -> None:
    p = torch.tensor([0.4, 0.0, 0.3, 0.15, 0.1, 0.05])
    num = 20_000
    uniform = torch.rand(num, generator=torch.Generator().manual_seed(0))
    tokens = choose(p.log().expand(num, -1), uniform)
    counts = tokens.bincount(minlength=6).double()
    assert counts[1] == 0
    there = p > 0
    expected = num * p[there].double()
    chi_square = float(((counts[there] - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: 0.1 %


def test_each_row_by_its_own_number() -> None:
    logp = torch.tensor([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5]]).log()
    uniform = torch.tensor([0.5, 0.5, 0.1])
    assert choose(logp, uniform).tolist() == [1, 0, 0]
    assert choose(logp.flip(0), uniform.flip(0)).tolist() == [0, 0, 1]


# ── The nucleus ──────────────────────────────────────────────────────────────────────────────────

P = [0.1, 0.4, 0.05, 0.3, 0.15]


def kept(p: list[float], **settings: float) -> list[int]:
    out = nucleus(log(p), **settings)
    stay = out > -math.inf
    assert torch.equal(out[stay], log(p)[stay])  # what stays is as it was
    return stay[0].nonzero().flatten().tolist()


def test_nothing_is_left_out_unless_asked_for() -> None:
    assert kept(P) == [0, 1, 2, 3, 4]
    assert kept(P, top_k=5) == kept(P, top_k=99) == [0, 1, 2, 3, 4]


def test_the_likeliest_k() -> None:
    assert kept(P, top_k=1) == [1]
    assert kept(P, top_k=3) == [1, 3, 4]


def test_the_fewest_tokens_that_reach_p() -> None:
    assert kept(P, top_p=0.01) == [1]  # the likeliest always stays
    assert kept(P, top_p=0.39) == [1]
    assert kept(P, top_p=0.41) == [1, 3]
    assert kept(P, top_p=0.8) == [1, 3, 4]
    assert kept(P, top_p=0.99) == [0, 1, 2, 3, 4]


def test_both_together_leave_what_each_would_leave() -> None:
    assert kept(P, top_p=0.8, top_k=2) == [1, 3]
    assert kept(P, top_p=0.41, top_k=4) == [1, 3]


def test_ties() -> None:
    """By k, equals stay together (as in transformers); by p, the first of equals are enough."""
    equal = [0.25, 0.25, 0.25, 0.25]
    assert kept(equal, top_k=2) == [0, 1, 2, 3]
    assert kept(equal, top_p=0.3) == [0, 1]
    assert kept(equal, top_p=0.6) == [0, 1, 2]
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=3) == [0, 1, 2, 3]
    assert kept([0.2, 0.3, 0.2, 0.3], top_k=2) == [1, 3]


def test_banned_tokens_stay_out() -> None:
    p = [0.0, 0.7, 0.0, 0.3]
    assert kept(p, top_k=3) == [1, 3]
    assert kept(p, top_p=0.999) == [1, 3]
    assert kept(p, top_p=0.5, top_k=3) == [1]


def test_rows_are_cut_each_for_itself() -> None:
    logp = torch.tensor([[0.9, 0.05, 0.05], [0.3, 0.3, 0.4]]).log()
    out = nucleus(logp, top_p=0.65) > -math.inf
    assert out.tolist() == [[True, False, False], [True, False, True]]


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_as_transformers_cuts(top_k: int) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logp = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)).mul(2).log_softmax(-1)
    ids = torch.zeros(20, 1, dtype=torch.long)
    top_p = 0.2 * top_k
    assert torch.equal(nucleus(logp, top_k=top_k), TopKLogitsWarper(top_k)(ids, logp))
    assert torch.equal(nucleus(logp, top_p=top_p), TopPLogitsWarper(top_p)(ids, logp))


def test_a_damaged_model_is_named() -> None:
    owner = fresh_policy("llama")
    with torch.no_grad():
        owner.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"response 0 has log π = nan at token 0.*checkpoint"):
        engine(owner).sample(encoded("llama"), Sampling(4), seeded())
