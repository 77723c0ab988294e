"""docs/recipes.md: its commands are recipes, its code does what it says, and small they all run."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segcredit import Trainer
from segcredit.algorithms import sapo
from segcredit.config import load_recipe
from segcredit.config.read import shipped_recipes
from segcredit.data import load_prompts
from segcredit.data.prepare import prepare
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.partition import Newline, Partition, ProbabilityAccumulate, StepMarkers

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
COMMANDS = re.findall(r"^segcredit train (.*?)(?:  +#.*)?$", TEXT, re.MULTILINE)
CODE = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SMALL = (
    "model.path=model",
    "threads=1",
    "rollout.max_tokens=6",
    "update.minibatches=2",
    "evaluation.prompts=2",
    "evaluation.every=0",
    "evaluation.watch=1",
)


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_names_a_recipe_with_settings_that_exist(command: str) -> None:
    name, *overrides = [x for x in shlex.split(command) if not x.startswith("--")]
    load_recipe(name, overrides)


def test_every_recipe_has_its_command() -> None:
    named = {command.split()[0] for command in COMMANDS}
    assert named == {name for name in shipped_recipes() if "/" in name}
    sweep = {x for command in COMMANDS for x in command.split() if x.startswith("algorithm.frac")}
    assert sweep == {f"algorithm.fraction={k / 10}" for k in range(1, 11)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a recipe finds what it names: rows as prepared, and a model that is tiny instead."""
    monkeypatch.chdir(tmp_path)
    world = make_world("shape_grid", size=2, colours=1, shapes=1, terms=1, twice=False)
    Policy.tiny("qwen2_5_vl", world.tokenizer(), hidden=32, layers=1, heads=2).save(Path("model"))
    for split in ("train", "test"):
        rows = []
        for number, prompt in enumerate(world.prompts(split, 0, 6)):
            picture = Path(f"{split}-{number}.png")
            picture.write_bytes(prompt.images[0])
            asked = prompt.messages[0]["content"]
            rows.append({"problem": asked, "answer": prompt.answer, "images": [str(picture)]})
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(["train.jsonl", "test.jsonl"], "data/geo3k")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "method"),
    [
        *(("qwen2.5-vl-3b", method) for method in ("sapo", "ppo", "vc-ppo", "grpo")),
        *(("qwen2.5-vl-7b-lora", method) for method in ("sapo", "vc-ppo", "grpo")),
    ],
)
def test_with_a_tiny_model_the_recipes_of_geo3k_run(folder: Path, model: str, method: str) -> None:
    samples = 2 if method == "grpo" else 1
    small = [*SMALL, "rollout.prompts=4", f"rollout.samples={samples}", "stages.0.steps=1"]
    if method == "vc-ppo":
        small.append("stages.1.steps=1")
    trainer = Trainer.from_recipe(load_recipe(f"geo3k/{model}-{method}", small))
    result = trainer.train(folder / "run")
    assert result.model is not None
    assert load_recipe(str(folder / "run" / "config.yaml")) == trainer.recipe


@pytest.mark.parametrize("method", ["sapo", "rloo"])
def test_with_a_tiny_model_the_recipes_of_text_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.chdir(tmp_path)
    world = make_world("derived_variables", given=2, derived=3, needed=[1, 2], modulus=7)
    Policy.tiny("llama", world.tokenizer(), hidden=32, layers=1, heads=4).save(Path("model"))
    Path("data/gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        rows = [
            {"prompt": x.messages[0]["content"], "answer": x.answer}
            for x in world.prompts(split, 0, 6)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path(f"data/gsm8k/{split}-sft.jsonl").write_text(lines)
    small = [*SMALL, "rollout.prompts=4", "rollout.samples=2", "stages.0.steps=1"]
    recipe = load_recipe(f"gsm8k/rhomath-1.1b-{method}", small)
    assert Trainer.from_recipe(recipe).train(tmp_path / "run").model is not None


@pytest.mark.parametrize(
    ("row", "partition"),
    [("newline", Newline()), ("step", StepMarkers()), ("probability", ProbabilityAccumulate())],
)
def test_the_rows_of_table_3(folder: Path, row: str, partition: Partition) -> None:
    made: dict[str, Any] = {}
    exec(CODE[0], made)
    trainer: Callable[..., Trainer] = made["trainer"]
    recipe = "geo3k/qwen2.5-vl-7b-sapo"
    found = trainer(row, recipe, *SMALL, "rollout.prompts=4", "stages.0.steps=1")
    assert found.plan.algorithm == sapo(partition=partition)
    assert found.recipe.data.suffix == (made["STEPS"] if row == "step" else None)
    same = {"rollout", "update", "optimizer", "reward", "memory", "evaluation", "stages"}
    expected = load_recipe(recipe, [*SMALL, "rollout.prompts=4", "stages.0.steps=1"])
    assert found.recipe.model_dump(include=same) == expected.model_dump(include=same)
    if row == "newline":
        assert found.train(folder / "run").model is not None


def test_questions_in_the_prompt_that_the_checkpoints_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "How many\neggs?", "answer": "2 + 2 = 4\n#### 1,004"}]
    for split in ("train", "test"):
        Path(f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare("gsm8k", "data/gsm8k", source=["train.jsonl", "test.jsonl"])
    exec(CODE[1], {})
    recipe = load_recipe("gsm8k/rhomath-1.1b-sapo")
    for files in (recipe.data.train, recipe.data.test):
        (prompt,) = load_prompts(files).prompts
        asked = "[MATH_TASK] Problem:\nHow many\neggs?\n\nSolution:"
        assert prompt.messages == ({"role": "user", "content": asked},)
        assert prompt.answer == "1004"


def test_maths_two_files_make_openais_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files are for training, less what the held-out one has."""
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^segcredit prepare math (.*?\\\n.*?)$", TEXT, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", " "))
    places = [words[i + 1] for i, word in enumerate(words) if word == "--from"]
    assert "--drop-duplicates" in words
    assert [place.partition("=")[0] for place in places] == ["test", "train", "train"]

    def write(name: str, problems: list[str]) -> str:
        rows = [{"problem": x, "solution": r"\boxed{1}"} for x in problems]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return name

    mine = [
        f"test={write('five-hundred.jsonl', ['c'])}",
        f"train={write('train-0.jsonl', ['a', 'b'])}",
        f"train={write('test-0.jsonl', ['c', 'd'])}",
    ]
    report = prepare("math", "data/math", source=mine, drop_duplicates=True)
    assert {x.name: x.written for x in report.splits} == {"train": 3, "test": 1}
