"""The mean ratio against the product: golden numbers, the bound, clip decisions, units."""

import math
from pathlib import Path

import numpy as np
import oracles as o
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import row, some_rollouts, write_run
from strategies import tenths

from segcredit.algorithms import PolicyGradient, make_algorithm
from segcredit.runlog import read_run
from segcredit_lab.analysis import AnalysisSettings, analyze_runs
from segcredit_lab.analysis.ratio_bias import (
    RatioBias,
    log_bound,
    log_gap,
    outside,
    ratio_units,
    units_of_step,
)
from segcredit_lab.analysis.reading import read_steps


def test_golden_numbers() -> None:
    length, mean = np.array([3]), np.array([0.2])
    product, average = math.exp(0.6), math.exp(0.2)
    assert (product, average) == pytest.approx((1.822119, 1.221403), abs=1e-6)
    assert math.exp(log_gap(length, mean)[0]) == pytest.approx(0.600716, abs=1e-6)
    assert math.exp(log_bound(length, mean)[0]) == pytest.approx(0.728848, abs=1e-6)


@given(st.integers(1, 400), st.floats(-1.0, 1.0))
def test_the_gap_is_right_and_below_its_bound(length: int, mean: float) -> None:
    gap = log_gap(np.array([length]), np.array([mean]))[0]
    bound = log_bound(np.array([length]), np.array([mean]))[0]
    assert gap <= bound + 1e-9
    expected = abs(math.exp(length * mean) - math.exp(mean))
    if expected > 1e-6:
        assert math.exp(gap) == pytest.approx(expected, rel=1e-6)
    if length == 1 or mean == 0.0:
        assert gap == -math.inf


@given(st.lists(tenths, min_size=1, max_size=8))
def test_gap_and_bound_against_the_oracle(x: list[float]) -> None:
    length, mean = np.array([len(x)]), np.array([sum(x) / len(x)])
    with np.errstate(divide="ignore"):
        gap, bound = np.exp(log_gap(length, mean))[0], np.exp(log_bound(length, mean))[0]
    _, _, want_gap, want_bound = o.ratio_bias(len(x), sum(x) / len(x))
    assert gap == pytest.approx(want_gap, rel=1e-9, abs=1e-12)
    assert bound == pytest.approx(want_bound, rel=1e-9, abs=1e-12)
    assert gap <= bound * (1 + 1e-9) + 1e-12


def test_products_beyond_all_numbers() -> None:
    """e^4000 is no float64, its logarithm is."""
    gap = log_gap(np.array([4001, 4001]), np.array([1.0, -1.0]))
    assert gap.tolist() == pytest.approx([4001.0, -1.0])


def test_outside_the_clip_range() -> None:
    at = np.log([0.7, 0.79999, 0.80001, 1.0, 1.27999, 1.28001, 9.0])
    assert outside(at, 0.2, 0.28).tolist() == [True, True, False, False, False, True, True]
    assert outside(np.array([-99.0, 99.0]), 1.0, 0.2).tolist() == [False, True]


@given(st.integers(1, 50), st.floats(-2, 2))
def test_what_the_mean_clips_the_product_clips(length: int, mean: float) -> None:
    """Both lie on the same side of 1, the product farther away."""
    bias = RatioBias(np.array([length]), np.array([mean]), 0.2, 0.28)
    assert bias.product_clipped[0] or not bias.mean_clipped[0]


def test_units_are_read_off_the_rows() -> None:
    unit = np.array([0, 0, 1, 2, 2, -1, 3, 3, 4])
    ratio = np.array([1.1, 1.1, 0.9, 1.2, 1.3, 5.0, math.nan, math.nan, 0.0])
    length, mean = units_of_step(unit, ratio)
    assert length.tolist() == [2, 1], "no unit with two ratios, none, or zero"
    assert np.exp(mean).tolist() == pytest.approx([1.1, 0.9])


# ── Whose units ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sapo", "segments"),
        ("sapo_authors", "other segments"),
        ("sapo_token_ratio", "tokens"),
        ("gspo", "responses"),
        ("ppo", "tokens"),
    ],
)
def test_the_units_of_a_method(tmp_path: Path, name: str, kind: str) -> None:
    """Read off the rows where credit has the same units, else cut again as the method cuts."""
    without = ("segment",) if name in ("gspo", "ppo") else ()
    rollouts = some_rollouts(1, without=without)
    (step,) = read_steps(read_run(write_run(tmp_path, rollouts=rollouts)))
    method = make_algorithm(name)
    assert isinstance(method, PolicyGradient)
    unit = ratio_units(method, step)
    assert (unit >= 0).all()
    assert (np.diff(unit) >= 0).all()
    changes = np.diff(unit) > 0
    if kind == "segments":
        new = (np.diff(step.segment) != 0) | (np.diff(step.owner) != 0)
        assert (changes == new).all()
    elif kind == "tokens":
        assert changes.all()
    elif kind == "responses":
        assert (unit == step.owner).all()
    else:  # about three tokens of ten end one
        assert 0.3 < changes.mean() < 0.5
        assert changes[np.diff(step.owner) > 0].all()


def test_the_analysis_of_a_run(tmp_path: Path) -> None:
    long = row(np.random.default_rng(0), 0)
    count = len(long["tokens"])
    long |= {"segment": [0] * count, "ratio": [1.25] * count}  # 1.25^T is beyond 1.3, 1.25 is not
    run = read_run(write_run(tmp_path, rollouts={11: [long]}))
    found = analyze_runs([run], AnalysisSettings(), ["ratio_bias"])
    (analysis,) = found.done
    numbers = analysis.numbers
    assert numbers["epsilon"] == {"low": 0.2, "high": 0.3}, "the run's own"
    assert (numbers["units"], numbers["above_bound"]) == (1, 0)
    assert (numbers["mean_clipped"], numbers["product_clipped"]) == (0.0, 1.0)
    assert numbers["decisions_differ"] == 1.0
    assert numbers["gap"]["max"] == pytest.approx(1.25**count - 1.25, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"algorithm": "sapo_token_ratio"}, "every unit of the ratio is one token"),
        ({"algorithm": {"name": "dpo"}}, "DirectPreference has neither segments nor a ratio"),
        ({"algorithm": "nonsense"}, "the algorithm of its config.yaml is not known: "),
        ({"algorithm": {"name": "sapo", "wrong": 1}}, "is not known: "),
        ({"algorithm": 7}, "its config.yaml names no algorithm"),
        ({"given_in_python": {"algorithm": "mine"}}, "was passed as a Python object"),
    ],
)
def test_methods_without_it(tmp_path: Path, config: dict, reason: str) -> None:
    run = read_run(write_run(tmp_path, rollouts=some_rollouts(1), **config))
    found = analyze_runs([run], AnalysisSettings(), ["ratio_bias"])
    assert not found.done
    (skipped,) = found.skipped
    assert reason in skipped.reason
