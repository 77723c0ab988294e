"""Scale small from start to end with a tiny model: files, shared starts, avg@8, the rate rule."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from forked_cli import run

from segcredit.config.recipe import ModelSettings
from segcredit.data.worlds import make_world
from segcredit.models import Policy

WORLD = {"given": 2, "derived": 1, "needed": [1, 1], "modulus": 2}
PROMPTS = 24
"""Rows of every file."""
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "model.path": "model",
    "model.dtype": "float32",
    "model.device": "cpu",
    "data.train": "[gsm8k/train.jsonl, words/train.jsonl]",
    "data.test": "[gsm8k/test.jsonl, words/test.jsonl]",
    "data.template": '"{question}"',
    "reward": "exact",
    "stages.0.steps": 40,
    "stages.0.batch": 16,
    "stages.0.lr": 1e-2,
    "stages.1.steps": 1,
    "stages.1.prompts": 16,
    "stages.2.steps": 4,
    "rollout.prompts": 16,
    "rollout.max_tokens": 20,
    "update.minibatches": 2,
    "optimizer.lr": 1e-3,
    "evaluation.every": 2,
    "save.rollouts_every": 1,
}
"""What a tiny model on a CPU needs; everything else is the scale's."""


def write_files(folder: Path) -> None:
    """A tiny model with random weights, and demonstrations and prompts of one world in files."""
    world = make_world("derived_variables", **WORLD)
    sizes = ModelSettings(tiny="qwen2", hidden=32, layers=1, heads=2).sizes
    Policy.tiny("qwen2", world.tokenizer(), seed=0, **sizes).save(folder / "model")
    for part, name in enumerate(("gsm8k", "words")):
        (folder / name).mkdir()
        for split in ("train", "test"):
            rows = []
            for n in range(PROMPTS):
                shown = world.demonstration(n + 100 * part, "solve")
                prompt = shown.prompt
                if split == "test":
                    prompt = world.prompts("test", n + 100 * part, 1)[0]
                row = {"question": prompt.messages[-1]["content"], "answer": prompt.answer}
                rows.append(row | ({"response": shown.response} if split == "train" else {}))
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(lines)


def study(folder: Path, *arguments: str) -> str:
    given = [x for key, value in SETTINGS.items() for x in ("--set", f"{key}={value}")]
    call = run(folder, "study", *arguments, "--scale", "small", "--seeds", "0", *given)
    assert call.wait() == 0, call.said + call.complained
    return call.said


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_files(folder)
    study(folder, "table2")
    return folder


def metrics(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


def rows_of(path: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(path.read_text().splitlines())]


@pytest.mark.slow
def test_starts_are_shared_and_train_on_the_files(small: Path) -> None:
    places = sorted((small / "studies" / "runs").glob("*-s*"))
    names = [x.name.rpartition("-")[0] for x in places]
    starts = [f"warm-{kind}-s{seed}" for kind in ("critic", "start") for seed in (0, 1000, 1001)]
    tuning = [f"tune-segment-s{seed}" for seed in (1000, 1001) for _ in range(3)]
    assert sorted(names) == sorted(["segment-s0", "token-s0", *starts, *tuning])
    by_name = dict(zip(names, places, strict=True))
    warm = [x for x in metrics(by_name["warm-start-s0"]) if x["stage"] == "warm_start"]
    assert len(warm) == 40
    assert warm[-1]["nll"] < 0.5 * warm[0]["nll"], "it imitates the rows' responses"
    critic = by_name["warm-critic-s0"].name
    for arm in ("segment-s0", "token-s0"):
        config = (by_name[arm] / "config.yaml").read_text()
        assert critic in config, "policy and critic come from the shared run"
        assert {x["stage"] for x in metrics(by_name[arm])} == {"optimize", "evaluation"}


@pytest.mark.slow
def test_both_test_sets_are_evaluated_with_eight_samples(small: Path) -> None:
    (place,) = (small / "studies" / "runs").glob("token-s0-*")
    evaluated = [x for x in metrics(place) if x["stage"] == "evaluation"]
    assert len(evaluated) == 3, "before, after two steps, after four"
    for row in evaluated:
        both = (row["sampled/gsm8k"] + row["sampled/words"]) / 2
        assert row["sampled"] == pytest.approx(both), "both files have as many prompts"
        assert "pass@8" in row
    first = json.loads((place / "evaluations" / "step-000000.jsonl").read_text().splitlines()[7])
    assert first["sample"] == 7
    rows = rows_of(small / "studies" / "table2-small" / "sets.csv")
    assert {row["set"] for row in rows} == {"gsm8k", "words"}
    starts = {(row["set"], row["accuracy"]) for row in rows if row["step"] == "0"}
    assert len(starts) == 2, "both arms start from one model"


@pytest.mark.slow
def test_the_page_has_the_rule_the_rates_and_the_sets(small: Path) -> None:
    place = small / "studies" / "table2-small"
    page = (place / "study.md").read_text()
    assert "The rule: the largest rate at which no tuning run loses accuracy" in page
    for rate in ("0.001", "0.002", "0.004"):
        assert f"| {rate} |" in page
    assert page.count("chosen") == 1
    for words in ("## Test sets", "| gsm8k |", "| words |", "reward in training", "test_sets.png"):
        assert words in page
    assert "Budgets of optimization are equal" in page or "are not equal" in page
    arm, _ = rows_of(place / "study.csv")
    assert arm["scale"] == "small"
    assert float(arm["pretraining_tokens"]) > 0


@pytest.mark.slow
def test_the_runs_can_be_analyzed(small: Path) -> None:
    (place,) = (small / "studies" / "runs").glob("segment-s0-*")
    only = [x for name in ("lift", "jumps", "targets") for x in ("--only", name)]
    call = run(small, "analyze", str(place), *only, "-B", "20")
    assert call.wait() == 0, call.said + call.complained
    for name in ("lift", "jumps", "targets"):
        assert (place / "analysis" / f"{name}.png").stat().st_size > 0
    numbers = json.loads((place / "analysis" / "targets.json").read_text())["numbers"]
    assert numbers["tokens_per_segment"] > 1
    assert numbers["equal_pieces"][0]["mean_ratio"] == pytest.approx(1.0)
