"""Recorded rows as flat columns, whatever stands in them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import write_run

from segcredit.runlog import read_run
from segcredit_lab.analysis.analyses import run_names
from segcredit_lab.analysis.lift import make_pool
from segcredit_lab.analysis.reading import (
    CannotAnalyzeError,
    Step,
    interval_text,
    number_text,
    plain,
    read_steps,
)


def read(folder: Path, *rows: dict[str, Any]) -> Step:
    (step,) = read_steps(read_run(write_run(folder, rollouts={7: list(rows)})))
    return step


def test_columns(tmp_path: Path) -> None:
    first = {"tokens": [5, 6, 7], "entropy": [1, 2, 3], "value": [0.1, "NaN", "Infinity"]}
    second = {"tokens": [8], "segment": [0], "reward": 1.0, "prompt_id": "p", "other": "x"}
    step = read(tmp_path, first, {"tokens": []}, second)
    assert (step.step, step.num_responses) == (7, 2)
    assert step.owner.tolist() == [0, 0, 0, 1]
    assert step.token.tolist() == [5, 6, 7, 8]
    assert step.segment.tolist() == [-1, -1, -1, 0]
    assert step.entropy[:3].tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(step.entropy[3])
    assert step.value[:1].tolist() == [0.1]
    assert math.isnan(step.value[1])
    assert step.value[2] == math.inf
    assert math.isnan(step.reward[0])
    assert step.reward[1] == 1.0
    assert step.rows == ({}, {"prompt_id": "p"})


@pytest.mark.parametrize(
    "wrong", [[1.0], [1.0, 2.0, 3.0], "ab", 7, None, {"a": 1}, [[1], [2]], ["x", 1.0], [10**400, 1]]
)
def test_what_is_no_list_of_numbers_is_nan(tmp_path: Path, wrong: Any) -> None:
    step = read(tmp_path, {"tokens": [1, 2], "value": wrong, "segment": wrong})
    assert np.isnan(step.value).all()
    assert step.segment.tolist() == [-1, -1]


def test_a_row_without_tokens_has_the_length_of_its_numbers(tmp_path: Path) -> None:
    assert read(tmp_path, {"entropy": [1.0, 2.0]}).owner.tolist() == [0, 0]


def test_holes_are_cut_out(tmp_path: Path) -> None:
    """V behind a hole is what follows the token before it; unsegmented responses stay whole."""
    columns = {"entropy": [1, 2, 3, 4], "value": [0.1, 9.0, 0.4, 0.2]}
    hole = {"tokens": [1, 2, 3, 4], "segment": [0, -1, 0, 1], **columns}
    none = {"tokens": [1, 2, 3, 4], **columns}
    step = read(tmp_path, hole, none).without_holes()
    assert step.owner.tolist() == [0, 0, 0, 1, 1, 1, 1]
    pool = make_pool(step.owner, step.entropy, step.value, step.num_responses)
    assert pool.entropy[:2].tolist() == [1.0, 3.0]
    assert pool.jump[:2].tolist() == pytest.approx([0.3, 0.2])
    assert len(pool.jump) == 5


def test_a_run_without_responses(tmp_path: Path) -> None:
    for name, rollouts in (("none", {}), ("empty", {3: []}), ("bare", {3: [{"prompt_id": "p"}]})):
        with pytest.raises(CannotAnalyzeError, match="has no recorded responses"):
            read_steps(read_run(write_run(tmp_path, name, rollouts)))


def test_names(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path, name)) for name in ("a/r", "b/r", "s", "x" * 99)]
    assert run_names(runs) == ["r", "r (2)", "s", "x" * 60 + "…"]


def test_numbers_for_people_and_for_json() -> None:
    assert number_text(-0.256, "+.2f") == "−0.26"
    assert number_text(math.nan, ".2f") == "–"
    assert interval_text(np.array([-1.0, 2.0])) == "−1.00 … 2.00"
    assert interval_text(np.array([1.0, np.nan])) == "–"
    made = {"a": np.array([1.0, np.inf]), 2: (np.int64(3), math.nan, None, "x", True), "c": 1 / 3}
    assert plain(made) == {"a": [1.0, None], "2": [3, None, None, "x", True], "c": 0.333333}
