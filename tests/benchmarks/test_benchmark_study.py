"""``segcredit study`` scores its final models on the study's benchmarks."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_cli import run

from segcredit_lab.study import load_study, shipped_studies

BASE: dict[str, Any] = {
    "threads": 1,
    "model": {"tiny": "qwen2", "hidden": 16, "layers": 1, "heads": 2},
    "data": {
        "world": "derived_variables",
        "settings": {"given": 2, "derived": 1, "needed": [1, 1], "modulus": 2},
    },
    "reward": "exact",
    "algorithm": "grpo",
    "stages": [{"kind": "warm_start", "steps": 1, "batch": 2}, {"kind": "optimize", "steps": 1}],
    "rollout": {"prompts": 2, "samples": 2, "max_tokens": 6},
    "evaluation": {"prompts": 2, "greedy": False, "watch": 0},
}
STUDY: dict[str, Any] = {
    "title": "Mine",
    "asks": "Is it scored?",
    "base": "base.yaml",
    "reference": "grpo",
    "tune": "none",
    "figures": [],
    "benchmarks": ["gsm8k"],
    "arms": {"grpo": {"label": "GRPO"}, "rloo": {"algorithm": "rloo"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(STUDY))
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data/gsm8k/test.jsonl").write_text(text)
    return tmp_path


@pytest.mark.slow
def test_final_models_are_scored(folder: Path) -> None:
    done = run(folder, "study", "mine.yaml", "--benchmark")
    assert done.code == 0, done.complained
    place = folder / "studies/mine-smoke/benchmark"
    table = (place / "table.md").read_text()
    assert "| GRPO, seed 0 | 0.00 |" in table
    assert "| rloo, seed 0 |" in table
    assert len(list(place.glob("*/answers/gsm8k.jsonl"))) == 2
    again = run(folder, "study", "mine.yaml", "--no-run", "--benchmark")
    assert again.code == 0, again.complained
    assert (place / "table.md").read_text() == table


@pytest.mark.slow
def test_missing_data_stops_before_training(folder: Path) -> None:
    (folder / "data/gsm8k/test.jsonl").unlink()
    done = run(folder, "study", "mine.yaml", "--benchmark")
    assert done.code == 2
    assert "expected the data of GSM8K in" in done.complained
    assert "--no-benchmark" in done.complained
    assert not (folder / "studies/runs").exists()


def test_studies_of_the_paper_name_their_tables() -> None:
    found = {name: load_study(name).benchmarks for name in shipped_studies()}
    assert {name: x for name, x in found.items() if x} == {
        "table1": ("table1",),
        "table2": ("table2",),
        "table3": ("table3",),
        "table4": ("table4", "table1"),
        "table5": ("table5",),
        "table6": ("table6",),
    }
