"""Curves of several runs: who is averaged, over which steps, with which interval."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each import each
from recorded_runs import metric_lines, write_run

from segcredit.runlog import read_run
from segcredit_lab.analysis import AnalysisSettings, analyze_runs
from segcredit_lab.analysis.compare import group_runs, t_interval, t_quantile

ONLY = ["value_loss", "entropy", "length"]


def numbers_of(*runs: Path, window: int = 1) -> dict[str, Any]:
    found = analyze_runs([read_run(run) for run in runs], AnalysisSettings(window=window), ONLY)
    return {x.name: x.numbers for x in found.done}


def test_seeds_of_one_configuration_are_averaged(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, f"r{seed}", metrics=metric_lines(5, level), seed=seed, name=f"n{seed}")
        for seed, level in enumerate([1.0, 2.0, 6.0])
    ]
    other = write_run(tmp_path, "other", metrics=metric_lines(4, 9.0, first=3), algorithm="ppo")
    found = numbers_of(*runs, other)
    assert list(found) == ONLY
    mine, its = found["entropy"]["curves"]
    assert mine["label"] == "sapo, 3 seeds"
    assert mine["runs"] == [str(run) for run in runs]
    assert mine["step"] == [1, 2, 3, 4, 5], "from the first step of optimization"
    assert mine["mean"] == pytest.approx([3, 4, 5, 6, 7])
    error = 4.3027 * np.std([1, 2, 6], ddof=1) / np.sqrt(3)
    assert mine["low"] == pytest.approx([n - error for n in (3, 4, 5, 6, 7)], rel=1e-5)
    assert mine["high"][0] == pytest.approx(3 + error, rel=1e-5)
    assert (its["label"], its["step"], its["mean"]) == ("other", [1, 2, 3, 4], [9, 10, 11, 12])
    assert its["low"] == [None] * 4, "one run has no interval"
    assert found["length"]["curves"][0]["each"][2] == [60] * 5


def test_groups_with_the_same_method_are_told_apart(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, f"{name}-{seed}", algorithm={"name": "sapo", "lam": lam}, seed=seed)
        for name, lam in (("low", 0.5), ("high", 1.0))
        for seed in (0, 1)
    ]
    groups = group_runs([read_run(run) for run in runs], [run.name for run in runs])
    assert [x.label for x in groups] == ["sapo (low-0, …), 2 seeds", "sapo (high-0, …), 2 seeds"]


def test_one_seed_twice_counts_once(tmp_path: Path) -> None:
    """A run that was repeated is no second seed."""
    runs = [write_run(tmp_path, name, metrics=metric_lines(3)) for name in ("a", "b")]
    (curve,) = numbers_of(*runs)["entropy"]["curves"]
    assert (curve["label"], curve["low"]) == ("a", [None] * 3)


def test_runs_of_different_lengths_are_compared_as_far_as_both_go(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, str(n), metrics=metric_lines(n, float(n)), seed=n) for n in (3, 7)]
    (curve,) = numbers_of(*runs)["entropy"]["curves"]
    assert curve["step"] == [1, 2, 3]
    assert curve["mean"] == pytest.approx([5, 6, 7])


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    lines = metric_lines(5)
    lines[11]["entropy"], lines[12]["entropy"] = float("inf"), float("nan")
    (curve,) = numbers_of(write_run(tmp_path, metrics=lines), window=3)["entropy"]["curves"]
    assert curve["each"] == [[1, None, None, 4, 5]]
    assert curve["mean"] == pytest.approx([1, 1, 4, 4.5, 4.5])


def test_a_metric_that_some_runs_lack(tmp_path: Path) -> None:
    bare = [{k: x for k, x in line.items() if k != "value_loss"} for line in metric_lines(3)]
    runs = [
        write_run(tmp_path, "grpo", metrics=bare, algorithm="grpo"),
        write_run(tmp_path, "sapo", metrics=metric_lines(3)),
    ]
    found = numbers_of(*runs)
    assert [x["label"] for x in found["value_loss"]["curves"]] == ["sapo"]
    assert [x["label"] for x in found["entropy"]["curves"]] == ["grpo", "sapo"]
    alone = analyze_runs([read_run(runs[0])], AnalysisSettings(), ["value_loss"])
    assert not alone.done
    assert alone.skipped[0].reason == "no run recorded value_loss during optimization."


def test_fluctuation_is_what_smoothing_takes_away(tmp_path: Path) -> None:
    steady, nervous = metric_lines(40), metric_lines(40)
    for n, line in enumerate(nervous[10:]):
        line["entropy"] += (-1) ** n
    runs = [
        write_run(tmp_path, "steady", metrics=steady),
        write_run(tmp_path, "nervous", metrics=nervous, algorithm="ppo"),
    ]
    one, other = numbers_of(*runs, window=4)["entropy"]["curves"]
    assert one["fluctuation"] < 0.6 < 0.9 < other["fluctuation"]


@each(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (30, 2.0423), (31, 2.0395), (100, 1.9840)]
)
def test_students_t(freedom: int, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, abs=1e-4)


def test_t_intervals_cover() -> None:
    rng = np.random.default_rng(0)
    mean, (low, high) = t_interval(rng.normal(size=(4, 4000)))
    assert mean == pytest.approx((low + high) / 2)
    assert np.mean((low < 0) & (high > 0)) == pytest.approx(0.95, abs=0.012)
