"""The same methods, killed and resumed, and on two processes: still the same run."""

from pathlib import Path
from typing import Any

import pytest
from forked_cli import run_several
from tiny_runs import assert_same_run, metrics, write_recipe
from train.test_train_resume import after_lines, finish, kill, make, undisturbed
from train.test_train_sharded import assert_close

UNITS = {"name": "fixed", "size": 3}
SHORT: dict[str, Any] = {
    "stages": [{"kind": "warm_start", "steps": 1, "batch": 4}, {"kind": "optimize", "steps": 4}],
    "evaluation": {"prompts": 2, "every": 2, "greedy": False, "watch": 2},
    "save__every": 1,
}
SOME = {"threshold": 0.5}
"""Of rewards 0, ⅓, ⅔ and 1: there is always something to learn, and not everything."""
METHODS: dict[str, dict[str, Any]] = {
    "vineppo": {
        "algorithm": {"name": "vineppo", "samples": 2, "partition": UNITS},
        "rollout__prefixes": 20,
    },
    "spo_chain": {"algorithm": {"name": "spo_chain", "samples": 2}},
    "spo_tree": {
        "algorithm": "spo_tree",
        "rollout__prompts": 3,
        "rollout__tree": {"branching": [3, 2, 2], "tokens": 3},
    },
    "restem": {"algorithm": {"name": "restem", **SOME}, "rollout__samples": 2},
    "dpo": {"algorithm": {"name": "dpo", "pairs_per_prompt": 1}, "rollout__samples": 3},
    "dvo": {"algorithm": {"name": "dvo", "samples": 2, "partition": UNITS}},
    "vppo": {
        "algorithm": "vppo",
        "rollout__samples": 2,
        "model": {"tiny": "qwen2_5_vl", "hidden": 32, "layers": 1, "heads": 2},
        "data": {
            "world": "shape_grid",
            "settings": {"size": 2, "colors": 2, "shapes": 2, "terms": 1, "twice": False},
        },
    },
}
SHARED: dict[str, dict[str, Any]] = {
    **METHODS,
    "single_stream_spo": {"algorithm": "single_stream_spo", "data__size": 12},
}
"""The same and one whose resumption test_train_resume.py has."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["vineppo", "spo_tree", "restem", "dpo", "spo_chain", "dvo", "vppo"],
)
def test_killed_and_resumed_it_is_the_same_run(method: str, tmp_path: Path) -> None:
    changes = {**SHORT, **METHODS[method]}
    whole = undisturbed(make(tmp_path / "whole"), **changes)
    folder = make(tmp_path / "killed")
    write_recipe(folder, **changes)
    kill(folder, after_lines(5), 0.0)
    finish(folder)
    assert_same_run(folder / "run", whole)
    steps = [x for x in metrics(whole) if x["stage"] == "optimize"]
    assert len(steps) == 4
    assert any(x.get("policy/grad_norm", 0.0) > 0.0 for x in steps), "something was learned"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["vineppo", "spo_tree", "restem", "dpo", "single_stream_spo", "vppo"]
)
def test_two_processes_make_the_run_of_one(method: str, tmp_path: Path) -> None:
    changes = {
        **SHORT,
        **SHARED[method],
        "update__tokens_per_micro": 150,
        "optimizer__eps": 1e-3,  # or weights without a gradient would go where rounding sends them
        "save__every": 9,
    }
    made = write_recipe(tmp_path, **changes)
    run_several(tmp_path, 1, "train", made, "--folder", "one")
    run_several(tmp_path, 2, "train", made, "--folder", "two")
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["restem", "spo_tree", "single_stream_spo", "vppo"])
def test_divided_models_make_the_run_of_one(method: str, tmp_path: Path) -> None:
    changes = {
        **SHORT,
        **SHARED[method],
        "update__tokens_per_micro": 150,
        "optimizer__eps": 1e-3,
        "save__every": 9,
    }
    made = write_recipe(tmp_path, **changes)
    run_several(tmp_path, 1, "train", made, "--folder", "one")
    run_several(tmp_path, 2, "train", made, "--folder", "two", "memory.shard=true")
    assert_close(tmp_path / "one", tmp_path / "two")
