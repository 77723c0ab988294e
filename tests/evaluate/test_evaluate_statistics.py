"""pass@k against counting, intervals against what an interval must be."""

from itertools import combinations

import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

from segcredit.evaluate import bootstrap_interval, mean_interval, pass_at_k


@each("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        marks = [True] * right + [False] * (samples - right)
        for k in range(1, samples + 1):
            draws = list(combinations(marks, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(samples, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_at_its_ends() -> None:
    assert pass_at_k(256, 0, 256) == 0.0
    assert pass_at_k(256, 1, 256) == 1.0
    assert pass_at_k(4, 1, 1) == 0.25, "k = 1 is the mean"


@pytest.mark.parametrize("k", [0, 5, -1])
def test_pass_at_k_refuses_more_than_was_drawn(k: int) -> None:
    with pytest.raises(
        ValueError, match=f"pass@k needs k from 1 to the number of samples, 4; got k={k}"
    ):
        pass_at_k(4, 2, k)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=60))
def test_an_interval_holds_the_mean_and_lies_among_the_values(values: list[float]) -> None:
    low, high = bootstrap_interval(values)
    mean = sum(values) / len(values)
    assert min(values) <= low <= high <= max(values)
    assert low - 1e-9 <= mean <= high + 1e-9
    assert bootstrap_interval(values) == (low, high), "the same every time"


def test_more_prompts_make_it_narrower_and_a_smaller_share_too() -> None:
    def width(values: list[float], share: float = 0.95) -> float:
        low, high = bootstrap_interval(values, share)
        return high - low

    few, many = [0.0, 1.0] * 20, [0.0, 1.0] * 500
    assert width(many) < width(few) / 4
    # the normal interval of a mean of 1000 coins: ± 1.96 · 0.5 / √1000
    assert width(many) == pytest.approx(2 * 1.96 * 0.5 / 1000**0.5, rel=0.1)
    assert width(few, 0.5) < width(few)
    assert bootstrap_interval([0.3] * 9) == pytest.approx((0.3, 0.3))


def test_another_seed_draws_others() -> None:
    values = [0.37 * n % 1.0 for n in range(27)]
    assert bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)


def test_no_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="an interval needs at least one value"):
        bootstrap_interval([])


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=20))
def test_where_prompts_differ_the_interval_is_the_bootstraps(values: list[float]) -> None:
    if len(set(values)) > 1 or values[0] == 0.5:
        assert mean_interval(values) == bootstrap_interval(values)


@pytest.mark.parametrize("prompts", [1, 3, 10, 500])
def test_all_wrong_or_all_right_leave_room(prompts: int) -> None:
    """At its upper end, none of so many right has a chance of 2.5 %."""
    low, high = mean_interval([0.0] * prompts)
    assert low == 0.0
    assert (1 - high) ** prompts == pytest.approx(0.025)
    assert mean_interval([1.0] * prompts) == pytest.approx((1 - high, 1.0))
