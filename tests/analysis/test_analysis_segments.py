"""Shapes of segments, and the variance within them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import row, some_rollouts, write_run

from segcredit.runlog import read_run
from segcredit_lab.analysis import AnalysisSettings, analyze_runs
from segcredit_lab.analysis.reading import read_steps
from segcredit_lab.analysis.segments import (
    bars,
    decompose,
    equal_cut,
    shapes_of,
    token_advantages,
    unit_lengths,
    unit_of,
)

OWNER = np.array([0, 0, 0, 0, 0, 1, 1, 2])
SEGMENT = np.array([0, 0, 1, 2, 2, 0, 0, 0])


# ── Shapes ───────────────────────────────────────────────────────────────────────────────────────


def test_shapes_by_hand() -> None:
    found = shapes_of(OWNER, SEGMENT)
    assert found.length.tolist() == [2, 1, 2, 2, 1]
    assert found.position.tolist() == pytest.approx([2 / 5, 3 / 5])
    assert found.per_response.tolist() == [3, 1, 1]


def test_tokens_off_all_segments_are_as_if_they_were_not_there() -> None:
    owner = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3])
    segment = np.array([-1, 0, 0, 1, 2, -1, 2, 0, 0, -1, 0, -1])
    assert unit_of(owner, segment).tolist() == [-1, 0, 0, 1, 2, -1, 2, 3, 3, -1, 4, -1]
    holes, plain = shapes_of(owner, segment), shapes_of(OWNER, SEGMENT)
    assert holes.length.tolist() == plain.length.tolist()
    assert holes.position.tolist() == plain.position.tolist()
    assert holes.per_response.tolist() == plain.per_response.tolist()
    assert len(shapes_of(owner, np.full(12, -1)).length) == 0


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30))
def test_bars_count_everything_once(x: list[int]) -> None:
    found = bars(np.array(x))
    assert found["count"].sum() == len(x)
    assert len(found["from"]) <= 33
    for first, count in zip(found["from"], found["count"], strict=True):
        assert count == sum(first <= n < first + found["width"] for n in x)


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (lambda n: [0] * n, "every segment is a whole response."),
        (lambda n: list(range(n)), "every segment is one token."),
        (lambda n: [-1] * n, "it needs segment; the rollouts have no segment"),
    ],
)
def test_shapes_that_say_nothing(
    tmp_path: Path, segment: Callable[[int], list[int]], reason: str
) -> None:
    rows = [row(np.random.default_rng(0), n) for n in range(2)]
    for made in rows:
        made["segment"] = segment(len(made["tokens"]))
    run = read_run(write_run(tmp_path, rollouts={11: rows}, algorithm="grpo"))
    (skipped,) = analyze_runs([run], AnalysisSettings(), ["segments"]).skipped
    assert reason in skipped.reason


def test_the_analysis_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, rollouts=some_rollouts(3, responses=5)))
    (analysis,) = analyze_runs([run], AnalysisSettings(), ["segments"]).done
    steps = [run.rollouts(step) for step in run.rollout_steps]
    numbers = analysis.numbers
    assert numbers["responses"] == 15
    assert numbers["segments"] == sum(len({*r["segment"]}) for rows in steps for r in rows)
    assert sum(numbers["end_position"]["segments"]) == numbers["segments"] - 15
    assert numbers["length"]["mean"] * numbers["segments"] == pytest.approx(
        sum(len(r["tokens"]) for rows in steps for r in rows), rel=1e-5
    )


# ── Variance within ──────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-20, 20)), min_size=1, max_size=30))
def test_within_and_between_add_up(pairs: list[tuple[int, int]]) -> None:
    unit, x = np.array(sorted(pairs)).T
    _, unit = np.unique(unit, return_inverse=True)
    found = decompose(x / 7, unit)
    assert found.within + found.between == pytest.approx(found.total, abs=1e-9)
    assert found.total == pytest.approx(len(x) * np.var(x / 7), abs=1e-9)
    assert decompose(x / 7, np.arange(len(x))).within == 0.0
    assert decompose(x / 7, np.zeros(len(x), int)).between == pytest.approx(0.0, abs=1e-9)


def test_decomposition_by_hand() -> None:
    found = decompose(np.array([1.0, 3.0, 99.0, 6.0]), np.array([0, 0, -1, 1]))
    assert found.within == pytest.approx(2.0)
    assert found.between == pytest.approx(2 * (4 / 3) ** 2 + (8 / 3) ** 2)
    assert found.share_within == pytest.approx(2.0 / (38 / 3))
    assert np.isnan(decompose(np.array([2.0, 2.0]), np.array([0, 1])).share_within)


def test_equal_cut() -> None:
    unit = unit_of(OWNER, SEGMENT)
    assert equal_cut(OWNER, unit).tolist() == [0, 0, 1, 1, 2, 3, 3, 4]
    owner, holes = np.zeros(7, int), np.array([0, -1, 0, 0, 1, 1, -1])
    assert equal_cut(owner, holes).tolist() == [0, -1, 0, 0, 1, 1, -1]
    thirds = equal_cut(np.zeros(12, int), np.array([0, 1, *[2] * 10]))
    assert unit_lengths(thirds).tolist() == [4, 4, 4]
    assert unit_lengths(equal_cut(owner, np.full(7, -1))).tolist() == []


def test_token_advantages_are_those_of_ppo() -> None:
    """The golden batch: γ = 1, λ = .9."""
    owner = np.array([0] * 6 + [1] * 2)
    value = np.array([0.5, 0.6, 0.4, 0.3, 0.7, 0.8, 0.2, 0.4])
    expected = [0.314308, 0.23812, 0.4868, 0.652, 0.28, 0.2, -0.16, -0.4]
    found, good = token_advantages(owner, value, np.array([1.0, 0.0]), 1.0, 0.9)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert good.all()
    each, _ = token_advantages(owner, value, np.array([1.0, 0.0]), 1.0, np.array([0.9, 0.0]))
    assert each[:6].tolist() == pytest.approx(expected[:6], abs=1e-6)
    assert each[6:].tolist() == pytest.approx([0.2, -0.4])


def test_responses_with_a_number_that_is_not_finite_are_left_out() -> None:
    owner = np.array([0, 0, 1, 1, 3])
    value = np.array([0.5, np.nan, 0.2, 0.4, 0.1])
    reward = np.array([1.0, 0.0, 1.0, np.inf])
    found, good = token_advantages(owner, value, reward, 1.0, 0.9)
    assert good.tolist() == [False, False, True, True, False]
    assert found[good].tolist() == pytest.approx([-0.16, -0.4])
    assert np.isnan(found[~good]).all()
    nothing, good = token_advantages(owner, np.full(5, np.nan), reward, 1.0, 0.9)
    assert not good.any()
    assert np.isnan(nothing).all()


@pytest.mark.parametrize("algorithm", [{"name": "sapo", "lam": 0.9}, "vapo"])
def test_variance_within_segments_of_a_run(tmp_path: Path, algorithm: object) -> None:
    run = read_run(write_run(tmp_path, rollouts=some_rollouts(4), algorithm=algorithm))
    (analysis,) = analyze_runs([run], AnalysisSettings(window=1), ["within"]).done
    numbers = analysis.numbers
    assert numbers["step"] == [11, 12, 13, 14]
    assert all(0 < x < 1 for x in numbers["share_within"] + numbers["share_within_equal_cut"])
    if algorithm == "vapo":
        assert numbers["alpha"] == 0.05
        return
    step = read_steps(run)[2]
    advantage, _ = token_advantages(step.owner, step.value, step.reward, 1.0, 0.9)
    expected = decompose(advantage, unit_of(step.owner, step.segment)).share_within
    assert numbers["share_within"][2] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("without", "config", "reason"),
    [
        (("value",), {}, "the rollouts have no value: the method has no critic."),
        (("segment",), {}, "it needs value and segment; the rollouts have no segment"),
        (("reward",), {}, "no recorded response has segments, finite values and a reward."),
        ((), {"algorithm": "grpo"}, "credit is not generalized advantage estimation."),
    ],
)
def test_runs_without_it(tmp_path: Path, without: tuple[str, ...], config: dict, reason: str):
    run = read_run(write_run(tmp_path, rollouts=some_rollouts(2, without=without), **config))
    found = analyze_runs([run], AnalysisSettings(), ["within"])
    assert not found.done
    assert reason in found.skipped[0].reason


def test_single_tokens_have_nothing_within(tmp_path: Path) -> None:
    made = row(np.random.default_rng(0), 0)
    made["segment"] = list(range(len(made["tokens"])))
    run = read_run(write_run(tmp_path, rollouts={11: [made]}, algorithm="ppo"))
    (skipped,) = analyze_runs([run], AnalysisSettings(), ["within"]).skipped
    assert skipped.reason == "every segment is one token, so there is no variance within segments."


def test_equal_rewards_and_values_have_nothing_within(tmp_path: Path) -> None:
    """No table without rows, as for a model that never answers correctly."""
    made = row(np.random.default_rng(0), 0)
    made |= {"value": [0.0] * len(made["tokens"]), "reward": 0.0}
    run = read_run(write_run(tmp_path, rollouts={11: [made]}, algorithm="ppo"))
    (skipped,) = analyze_runs([run], AnalysisSettings(), ["within"]).skipped
    assert skipped.reason == "all tokens of a step have the same advantage."
