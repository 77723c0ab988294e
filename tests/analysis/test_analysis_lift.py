"""Lift against the golden numbers, a naive oracle, its bounds, and invariances."""

import math
from fractions import Fraction

import numpy as np
import oracles as o
import pytest
import torch
from each import each
from hypothesis import given
from hypothesis import strategies as st
from strategies import tenths

from segcredit_lab.analysis.lift import (
    TokenPool,
    lift,
    lift_of_draws,
    lift_over_responses,
    make_pool,
    mean_over_steps,
    measure,
    stage_slices,
)
from segcredit_lab.analysis.reading import AnalysisSettings

TIED = st.integers(0, 6).map(lambda n: n / 4)


def pool_of(entropy: list[float], jump: list[float], owner: list[int] | None = None) -> TokenPool:
    whose = np.arange(len(entropy)) if owner is None else np.array(owner)
    return TokenPool(whose, np.array(entropy, float), np.array(jump, float), int(whose.max()) + 1)


def one_lift(pool: TokenPool, q: float, d: float) -> float:
    return float(lift(pool, np.array([q]), np.array([d]))[0, 0])


@st.composite
def pools(draw: st.DrawFn) -> TokenPool:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
    count = sum(lengths)
    numbers = st.lists(TIED, min_size=count, max_size=count)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return TokenPool(owner, np.array(draw(numbers)), np.array(draw(numbers)), len(lengths))


# ── An oracle that counts ────────────────────────────────────────────────────────────────────────


def oracle_quantile(values: list[float], q: str) -> Fraction:
    """Linear, in exact arithmetic."""
    ordered = sorted(map(Fraction, values))
    place = (len(ordered) - 1) * Fraction(q)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def oracle_lift(entropy: list[float], jump: list[float], q: str, d: str) -> float:
    edge_h, edge_v = oracle_quantile(entropy, q), oracle_quantile(jump, d)
    in_a = in_d = in_both = 0
    for h, v in zip(entropy, jump, strict=True):
        in_a += h >= edge_h
        in_d += v >= edge_v
        in_both += h >= edge_h and v >= edge_v
    return (in_both / in_a) / (in_d / len(entropy))


QS, DS = ("0.5", "0.55", "0.7", "0.95"), ("0.7", "0.8", "0.9")


@given(pools())
def test_it_is_the_oracles(pool: TokenPool) -> None:
    found = lift(pool, np.array([float(q) for q in QS]), np.array([float(d) for d in DS]))
    expected = [
        [oracle_lift(pool.entropy.tolist(), pool.jump.tolist(), q, d) for q in QS] for d in DS
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_quantile_that_falls_on_a_token_keeps_it() -> None:
    """100 · .55 is 55 and not 55.00000000000001, which would leave that token out."""
    values = [n / 4 if n < 56 else 1e6 * n for n in range(101)]
    assert np.quantile(values, 0.55) > values[55], "what is avoided"
    found = one_lift(pool_of(values, values), 0.55, 0.9)
    assert found == pytest.approx(oracle_lift(values, values, "0.55", "0.9"))


@pytest.mark.parametrize(("q", "expected"), [(0.5, 4 / 3), (0.7, 20 / 9), (0.9, 10 / 3)])
def test_golden_numbers(q: float, expected: float) -> None:
    entropy = [n / 10 for n in range(1, 11)]
    jump = [0.05, 0.3, 0.1, 0.02, 0.2, 0.01, 0.15, 0.03, 0.4, 0.25]
    assert one_lift(pool_of(entropy, jump), q, 0.7) == pytest.approx(expected, abs=1e-9)


# ── What must hold ───────────────────────────────────────────────────────────────────────────────


@given(pools(), st.sampled_from([0.3, 0.5, 0.7, 0.9, 0.95]), st.sampled_from([0.5, 0.8, 0.9]))
def test_bounds(pool: TokenPool, q: float, d: float) -> None:
    assert one_lift(pool, 0.0, d) == pytest.approx(1.0), "all tokens are in A"
    found = one_lift(pool, q, d)
    in_a = np.mean(pool.entropy >= float(oracle_quantile(pool.entropy.tolist(), str(q))))
    in_d = np.mean(pool.jump >= float(oracle_quantile(pool.jump.tolist(), str(d))))
    assert 0.0 <= found <= min(1 / in_a, 1 / in_d) + 1e-12


@given(pools(), st.randoms(use_true_random=False))
def test_the_order_of_responses_and_tokens_is_nothing(pool: TokenPool, random: object) -> None:
    order = list(range(len(pool.owner)))
    random.shuffle(order)  # type: ignore[attr-defined]
    names = np.arange(pool.num_responses)[::-1]
    other = TokenPool(
        names[pool.owner[order]], pool.entropy[order], pool.jump[order], pool.num_responses
    )
    q, d = np.array([0.5, 0.8]), np.array([0.9])
    np.testing.assert_array_equal(lift(pool, q, d), lift(other, q, d))


@given(pools(), st.data())
def test_a_draw_is_the_pool_with_responses_repeated(pool: TokenPool, data: st.DataObject) -> None:
    """Drawn 0, 1 or more times, tokens and quantiles are those of the pool written out."""
    many = st.lists(st.integers(0, 3), min_size=pool.num_responses, max_size=pool.num_responses)
    counts = np.array(data.draw(st.lists(many, min_size=1, max_size=3)))
    q, d = np.array([0.5, 0.55, 0.9]), np.array([0.7, 0.95])
    found = lift_of_draws(pool, counts, q, d)
    for number, count in enumerate(counts):
        again = np.repeat(np.arange(len(pool.owner)), count[pool.owner])
        written = TokenPool(np.zeros(len(again), int), pool.entropy[again], pool.jump[again], 1)
        np.testing.assert_allclose(found[number], lift(written, q, d), rtol=1e-12)
        assert np.isnan(found[number]).all() == (len(again) == 0)


def test_draws_are_made_in_parts_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pool = TokenPool(np.repeat(np.arange(9), 5), rng.random(45), rng.random(45), 9)
    q, d = np.array([0.7]), np.array([0.9])
    whole = lift_over_responses([pool], q, d, 50)
    monkeypatch.setattr("segcredit_lab.analysis.lift.ENTRIES", 7 * 45)
    np.testing.assert_array_equal(lift_over_responses([pool], q, d, 50), whole)


# ── What is compared ─────────────────────────────────────────────────────────────────────────────


def test_the_last_token_of_a_response_is_left_out() -> None:
    owner, value = np.array([0, 0, 0, 1, 2, 2]), np.array([0.1, 0.4, 0.3, 0.9, 0.5, 0.5])
    pool = make_pool(owner, np.arange(6.0), value, 3)
    assert pool.owner.tolist() == [0, 0, 2]
    assert pool.entropy.tolist() == [0.0, 1.0, 4.0]
    assert pool.jump.tolist() == pytest.approx([0.3, 0.1, 0.0])
    assert (pool.num_responses, pool.left_out) == (3, 0)


def test_numbers_that_are_not_finite_are_left_out_and_counted() -> None:
    nan, inf = math.nan, math.inf
    value = np.array([0.1, nan, 0.3, 0.9, inf, inf, 0.5, 0.4])
    entropy = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, nan, 1.0])
    pool = make_pool(np.zeros(8, int), entropy, value, 1)
    assert pool.jump.tolist() == pytest.approx([0.6])
    assert pool.left_out == 6


@each(
    ("num", "sizes"),
    [(1, [1]), (2, [2]), (3, [1, 1, 1]), (4, [1, 1, 2]), (10, [3, 3, 4]), (100, [30, 30, 40])],
)
def test_stages(num: int, sizes: list[int]) -> None:
    stages = stage_slices(num)
    assert [len(range(num)[part]) for part in stages.values()] == sizes
    assert [n for part in stages.values() for n in range(num)[part]] == list(range(num))
    assert list(stages) == (["all"] if num < 3 else ["early", "middle", "late"])


def test_a_planted_rise_is_found() -> None:
    """Early H and ΔV have nothing to do with each other; late they are the same."""
    rng = np.random.default_rng(1)
    made = []
    for step in range(20):
        h, noise = rng.random(600), rng.random(600)
        share = step / 19
        made.append(TokenPool(np.repeat(np.arange(60), 10), h, share * h + (1 - share) * noise, 60))
    curves = measure(made, range(100, 120), AnalysisSettings(resamples=100))
    early, middle, late = curves.stages
    assert [x.num_steps for x in curves.stages] == [6, 6, 8]
    at = curves.quantiles.tolist().index(0.9)
    assert early.over_responses[1, 0, at] < middle.over_responses[0, 0, at]
    assert early.mean[0, at] < 2 < 6 < late.mean[0, at]
    assert (late.over_steps[0] <= late.mean).all()
    assert (late.mean <= late.over_steps[1]).all()
    trend = curves.trend
    assert trend.spearman > 0.9
    assert trend.slope_over_responses[0] > 0 < trend.slope_over_steps[0]
    assert trend.slope_over_steps[0] < trend.slope < trend.slope_over_steps[1]


def test_a_single_step_has_no_interval_over_steps() -> None:
    rng = np.random.default_rng(1)
    pool = TokenPool(np.repeat(np.arange(9), 5), rng.random(45), rng.random(45), 9)
    (stage,) = measure([pool], [3], AnalysisSettings(resamples=20)).stages
    assert np.isnan(stage.over_steps).all()
    assert np.isfinite(stage.over_responses).all()


def test_means_over_steps_leave_out_what_is_not_known() -> None:
    found = mean_over_steps(np.array([[1.0, np.nan], [3.0, 5.0]]), 200)
    assert found.shape == (200, 2)
    assert {*found[:, 0]} == {1.0, 2.0, 3.0}
    assert {*found[np.isfinite(found[:, 1]), 1]} == {5.0}
    assert np.isnan(found[found[:, 0] == 1.0, 1]).all(), "drawn without the step that knows it"


@given(
    st.lists(st.tuples(tenths, tenths), min_size=2, max_size=40),
    st.sampled_from([0.0, 0.5, 0.55, 0.7, 0.9]),
    st.sampled_from([0.5, 0.7, 0.9]),
)
def test_the_shared_oracle(tokens: list[tuple[float, float]], q: float, d: float) -> None:
    entropy, jump = map(list, zip(*tokens, strict=True))
    found = one_lift(pool_of(entropy, jump), q, d)
    assert found == pytest.approx(o.lift(entropy, jump, q, d), abs=1e-9)


def test_many_tokens_of_one_response() -> None:
    generator = torch.Generator().manual_seed(0)
    entropy, jump = torch.rand(2, 500, generator=generator, dtype=torch.float64).tolist()
    pool = pool_of(entropy, jump, [0] * 500)
    assert one_lift(pool, 0.0, 0.9) == pytest.approx(1.0)
    for q in (0.5, 0.55, 0.7, 0.95):
        for d in (0.8, 0.9):
            assert one_lift(pool, q, d) == pytest.approx(o.lift(entropy, jump, q, d))
