"""GAE over any units against the double sum of Eq. 7; the reverse scan at its limits."""

import math

import oracles as o
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import units
from strategies import Case, cases, discount

from segcredit.core.advantages import (
    gae,
    kl_shaped_reward,
    length_adaptive_lambda,
    reverse_scan,
    segment_gae,
    terminal_reward,
)
from segcredit.core.segments import Segments


def made(case: Case) -> Segments:
    return Segments.from_ends(case.place.marks(case.ends), case.place.mask)


@given(cases(), discount, discount)
def test_gae_equals_the_double_sum(case: Case, gamma: float, lam: float) -> None:
    width = max(map(len, case.value))
    reward, value = units(case.reward, width), units(case.value, width)
    mask = units([[1.0] * len(row) for row in case.value], width).bool()
    reward[~mask], value[~mask] = math.nan, math.inf
    got = gae(reward, value, mask, gamma, lam)
    for i in range(len(mask)):
        want = o.gae(case.reward[i], case.value[i], gamma, lam)
        assert got[i][mask[i]].tolist() == pytest.approx(want)
    assert (got[~mask] == 0).all()


@given(cases(), discount, discount, st.sampled_from(["start", "end"]))
def test_segment_gae_equals_the_oracle(case: Case, gamma: float, lam: float, where: str) -> None:
    put = case.place.put
    credit = segment_gae(put(case.reward), put(case.value), made(case), gamma, lam, where)
    advantage, target = case.place.take(credit.advantage), case.place.take(credit.value_target)
    for i, ends in enumerate(case.ends):
        A, R = o.segment_gae(case.reward[i], case.value[i], ends, gamma, lam, where)
        assert advantage[i] == pytest.approx(o.spread(A, ends))
        assert target[i] == pytest.approx(o.spread(R, ends))
    assert (credit.advantage[~case.place.mask] == 0).all()


@given(cases(), discount)
def test_one_reward_per_response_stands_at_its_end(case: Case, lam: float) -> None:
    reward = torch.tensor([row[0] for row in case.reward], dtype=torch.float64)
    value, segments = case.place.put(case.value), made(case)
    short = segment_gae(reward, value, segments, 0.9, lam)
    long = segment_gae(terminal_reward(reward, case.place.mask), value, segments, 0.9, lam)
    assert torch.equal(short.advantage, long.advantage)
    assert torch.equal(short.value_target, long.value_target)


@given(cases(), discount, discount)
def test_decoupled_targets_use_their_own_lambda(case: Case, lam: float, lam_critic: float) -> None:
    put, segments = case.place.put, made(case)
    both = segment_gae(put(case.reward), put(case.value), segments, 1.0, lam, lam_critic=lam_critic)
    actor = segment_gae(put(case.reward), put(case.value), segments, 1.0, lam)
    critic = segment_gae(put(case.reward), put(case.value), segments, 1.0, lam_critic)
    assert torch.equal(both.advantage, actor.advantage)
    assert torch.equal(both.value_target, critic.value_target)


@given(cases())
def test_one_lambda_per_response(case: Case) -> None:
    put, segments = case.place.put, made(case)
    lam = torch.linspace(0.0, 1.0, len(case.ends), dtype=torch.float64)
    got = segment_gae(put(case.reward), put(case.value), segments, 0.9, lam)
    for i, one in enumerate(lam.tolist()):
        want = segment_gae(put(case.reward), put(case.value), segments, 0.9, one)
        assert torch.allclose(got.advantage[i], want.advantage[i], rtol=0, atol=1e-12)


@given(cases(), st.floats(0.0, 1.0))
def test_kl_in_the_reward(case: Case, coef: float) -> None:
    put = case.place.put
    final = torch.tensor([row[-1] for row in case.reward], dtype=torch.float64)
    got = kl_shaped_reward(final, put(case.value), put(case.log_ratio), case.place.mask, coef)
    for i, row in enumerate(case.place.take(got)):
        want = o.token_rewards(final[i].item(), case.value[i], case.log_ratio[i], coef)
        assert row == pytest.approx(want)
    assert (got[~case.place.mask] == 0).all()
    without = kl_shaped_reward(final, put(case.value), put(case.log_ratio), case.place.mask, 0.0)
    assert torch.equal(without, terminal_reward(final, case.place.mask))


def test_length_adaptive_lambda_is_clamped() -> None:
    length = torch.tensor([1, 6, 20, 100, 2000])
    assert length_adaptive_lambda(length, 0.05).tolist() == pytest.approx([0, 0, 0, 0.8, 0.99])


@pytest.mark.parametrize("decay", [0.0, 1e-300, 1e-3, 0.5, 0.95, 0.99, 0.999999, 1.0])
@pytest.mark.parametrize("width", [1, 127, 128, 129, 32_768])
def test_reverse_scan_is_exact(decay: float, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, width, dtype=torch.float64, generator=generator)
    want = torch.zeros_like(x)
    carry = torch.zeros(2, dtype=torch.float64)
    for m in reversed(range(width)):
        carry = x[:, m] + decay * carry
        want[:, m] = carry
    assert torch.allclose(reverse_scan(x, decay), want, rtol=1e-12, atol=1e-10)
    per_row = reverse_scan(x, torch.full((2,), decay, dtype=torch.float64))
    assert torch.allclose(per_row, want, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.999, 1.0])
def test_gae_of_a_long_response_is_finite_and_exact(lam: float) -> None:
    width = 32_768
    mask = torch.ones(1, width, dtype=torch.bool)
    reward = torch.zeros(1, width)
    reward[0, -1] = 1.0
    got = gae(reward, torch.zeros(1, width), mask, 1.0, lam)[0]
    want = torch.tensor(lam, dtype=torch.float64) ** torch.arange(width - 1, -1, -1)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-38)


def test_scan_works_after_a_first_call_in_inference_mode() -> None:
    x = torch.randn(1, 5, dtype=torch.float64)
    with torch.inference_mode():
        reverse_scan(x, 0.123)
    reverse_scan(x.requires_grad_(), 0.123).sum().backward()
    assert x.grad is not None
