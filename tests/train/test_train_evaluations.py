"""Held-out evaluations of runs that are to be compared."""

from pathlib import Path

import pytest
from forked_cli import run
from tiny_runs import RECIPE, write_recipe

from segcredit.runlog import read_run


def lengths(folder: Path, stages: list[dict[str, object]]) -> list[float]:
    """Of held-out answers, before, between and after."""
    folder.mkdir()
    done = run(folder, "train", write_recipe(folder, stages=stages), "--folder", "run")
    assert done.wait() == 0, done.complained
    return read_run(folder / "run").series("response_length", "evaluation")[1]


@pytest.mark.slow
def test_runs_that_began_otherwise_throw_the_same_dice(tmp_path: Path) -> None:
    """Before the first step of optimization the policy is the same, and so is what it answers."""
    warm, _, pretraining, _ = RECIPE["stages"]
    optimize = {"kind": "optimize", "steps": 4}
    plain = lengths(tmp_path / "plain", [warm, optimize])
    pretrained = lengths(tmp_path / "pretrained", [warm, pretraining, optimize])
    assert len(plain) == len(pretrained) == 3
    assert plain[0] == pretrained[0]
    assert len(set(plain)) > 1
