"""Training steps with images on tiny checkpoints of many families, and their exact resumption."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import VISION_FAMILIES, require, save_vision
from tiny_policies import picture
from tiny_runs import REWARD, assert_same_run, changed
from transformers import AutoModelForImageTextToText

from segcredit.config import parse_recipe
from segcredit.train.trainer import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:no model family here describes"),
    pytest.mark.filterwarnings("ignore:__array"),  # in some stock processors
]
METHODS: dict[str, dict[str, Any]] = {
    "sapo": {},
    "ppo": {},
    "grpo": {"rollout__samples": 2, "rollout__prompts": 4},
}
QUICK = (("gemma3", "sapo"), ("fast_vlm", "grpo"))
QUESTIONS = ("<image>list ?", "count <image>red circle plus <image>blue square ?", "list ?")


@cache
def place(folder: Path, name: str) -> Path:
    """A folder with the tiny checkpoint, rows with 0 to 2 images, and the reward."""
    here = folder / name
    save_vision(name, here / "model")
    rows = []
    for number, question in enumerate(QUESTIONS * 2):
        images = []
        for n in range(question.count("<image>")):
            file = here / f"{number}-{n}.png"
            file.write_bytes(picture(40 + 17 * number, 90 - 9 * n, seed=number))
            images.append(file.name)
        rows.append({"id": str(number), "prompt": question, "images": images, "answer": "1"})
    (here / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    (here / "reward.py").write_text(REWARD)
    return here


def recipe(here: Path, method: str, steps: int = 2) -> Any:
    return parse_recipe(
        changed(
            **{
                "model": {"path": str(here / "model")},
                "data": {key: [str(here / "rows.jsonl")] for key in ("train", "test")},
                "reward": f"{here}/reward.py:by_length",
                "algorithm": method,
                "stages": [{"kind": "optimize", "steps": steps}],
                "rollout": {"prompts": 6, "max_tokens": 6},
                "evaluation": {"prompts": 2, "every": 2},
                "save": {"every": 1, "rollouts_every": 1, "rollouts": 2},
                **METHODS[method],
            }
        )
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        if (name, method) in QUICK
        else pytest.param(name, method, marks=pytest.mark.slow)
        for name in VISION_FAMILIES
        for method in METHODS
    ],
)
def test_steps_change_the_weights_and_resume_exactly(
    name: str, method: str, shared: Path, tmp_path: Path
) -> None:
    require(name)
    here = place(shared, name)
    made = recipe(here, method)
    Trainer.from_recipe(made).train(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000002")
    Trainer.from_recipe(made).train(tmp_path / "cut", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000002"
    before = load_file(here / "model" / "model.safetensors")
    after = load_file(checkpoint / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    tower = VISION_FAMILIES[name].tower
    moved = {key for key, x in after.items() if not torch.equal(x, before[key])}
    assert any(tower in key.split(".") for key in moved), "no gradient reached the vision tower"
    assert any("q_proj" in key or "in_proj" in key for key in moved)
    assert (checkpoint / "critic").is_dir() == (method != "grpo")
    _, info = AutoModelForImageTextToText.from_pretrained(
        checkpoint / "policy", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
