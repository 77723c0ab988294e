"""Smoothing, Spearman's ρ and slopes by hand."""

import numpy as np
import pytest
from each import each
from hypothesis import given
from hypothesis import strategies as st

from segcredit_lab.analysis.reading import ranks, slope, slope_over_steps, smooth, spearman

NAN = float("nan")


def test_ranks_share_ties() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 3.0, 2.0])).tolist() == [4.0, 1.0, 4.0, 4.0, 2.0]


@each(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 25], 0.8),  # 1 − 6 · 2 / (4 · 15)
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 7], 0.8207826816681233),  # one tie: 8 / √95
        ([1, 2, 3, 4], [2, 2, 1, 1], -0.8944271909999159),  # −4 / √20
        ([1, 2, 3], [9, 4, 1], -1.0),
        ([1, 2, 3], [5, 5, 5], NAN),
        ([1, 2, 3, 4], [1, NAN, 2, 3], 1.0),
        ([1], [1], NAN),
        ([], [], NAN),
    ],
)
def test_spearman(x: list[float], y: list[float], expected: float) -> None:
    found = spearman(np.array(x, float), np.array(y, float))
    assert found == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=9))
def test_spearman_sees_ranks_only(x: list[int]) -> None:
    y, time = np.array(x, float), np.arange(len(x), dtype=float)
    assert spearman(time, y) == pytest.approx(spearman(time, np.exp(y)), nan_ok=True)


def test_smooth() -> None:
    x = np.array([1.0, 2.0, 6.0, NAN, 10.0])
    assert smooth(x, 1)[:3].tolist() == [1.0, 2.0, 6.0]
    assert smooth(x, 3).tolist() == [1.5, 3.0, 4.0, 8.0, 10.0]
    assert smooth(x, 4).tolist() == [3.0, 3.0, 6.0, 8.0, 10.0]
    assert smooth(x, 99).tolist() == [4.75] * 5
    assert np.isnan(smooth(np.array([NAN, NAN]), 3)).all()


def test_slope() -> None:
    x, once = np.array([1.0, 2.0, 4.0]), np.ones(3)
    assert slope(x, 3 * x - 1, once) == pytest.approx(3.0)
    assert slope(x, np.array([1.0, NAN, 7.0]), once) == pytest.approx(2.0)
    y = np.array([0.0, 1.0, 5.0])
    assert slope(x, y, once) == pytest.approx(np.polyfit(x, y, 1)[0])
    twice = np.array([2.0, 1.0, 1.0])
    assert slope(x, y, twice) == pytest.approx(np.polyfit([1, 1, 2, 4], [0, 0, 1, 5], 1)[0])
    assert np.isnan(slope(x, y, np.array([3.0, 0.0, 0.0]))), "one step has no slope"


def test_slopes_of_steps_drawn_again_lie_around_the_slope() -> None:
    rng = np.random.default_rng(0)
    x = np.arange(40.0)
    y = 0.5 * x + rng.normal(size=40)
    found = slope_over_steps(x, y, 300)
    assert found.mean() == pytest.approx(0.5, abs=0.02)
    assert 0.005 < found.std() < 0.03
