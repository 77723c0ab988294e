"""Training steps with images on tiny checkpoints of many families, and their exact resumption."""

import json
import re
import shutil
import struct
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked_cli import run
from safetensors.torch import load_file
from tiny_families import VISION_FAMILIES, require, save_text, save_vision
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("glm4v", marks=pytest.mark.slow), "gemma3", "qwen3"])
def test_bad_images_are_found_before_training(name: str, tmp_path: Path) -> None:
    """With file and line for every row, by the processor's own rule; skipping them goes on."""
    require(name)
    vision = name in VISION_FAMILIES
    (save_vision if vision else save_text)(name, tmp_path / "model")
    sizes = {"good": (60, 40), "long": (2000, 4), "dot": (1, 1), "wide": (10_000, 60)}
    for key, size in sizes.items():
        (tmp_path / f"{key}.png").write_bytes(picture(*size))
    (tmp_path / "huge.png").write_bytes(huge())
    rows = [
        *(("<image>list ?", x) for x in ("good", "long", "dot", "wide", "huge")),
        ("<image>list <image>?", "good"),
        *(("<image>list ?", "good") for _ in range(80)),
    ]
    lines = [{"prompt": x, "images": [f"{y}.png"], "answer": "1"} for x, y in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    recipe = {
        "name": "check",
        "model": {"path": "model"},
        "data": {"train": ["rows.jsonl"]},
        "reward": "exact",
        "algorithm": "sapo",
        "stages": [{"kind": "optimize", "steps": 1}],
        "rollout": {"prompts": 4, "max_tokens": 8},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = run(tmp_path, "train", "recipe.yaml", "--check")
    assert done.code != 0
    found = dict(re.findall(r"^rows\.jsonl:(\d+): (.*)$", done.complained, re.MULTILINE))
    assert "at most 89,478,485 pixels" in found["5"]
    assert "expected one <image> in the prompt per image; got 2 <image> and 1" in found["6"]
    if not vision:
        assert "this model reads text only" in found["1"]
        return
    assert set(found) == ({"2", "5", "6"} if name == "glm4v" else {"5", "6"})
    if name == "glm4v":
        assert "rejects an image of 2000×4 pixels (absolute aspect ratio must be" in found["2"]
    done = run(tmp_path, "train", "recipe.yaml", "--check", "--skip-bad-rows")
    assert done.code == 0, done.complained
    assert f"prompts: {len(rows) - len(found)}" in done.said
    assert "no model family here" not in done.complained


def test_the_notice_on_a_terminal(shared: Path, tmp_path: Path) -> None:
    require("fast_vlm")
    model = place(shared, "fast_vlm") / "model"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "list ?", "answer": "1"}\n')
    call = ("evaluate", model, "--data", "rows.jsonl", "--reward", "exact", "--samples", 1)
    done = run(tmp_path, *call, "--max-tokens", 4)
    assert done.code == 0, done.complained
    lines = [x for x in done.complained.splitlines() if "no model family here" in x]
    assert len(lines) == 1
    assert lines[0].startswith("warning: no model family here describes models of type 'fast_vlm'")


def huge() -> bytes:
    """A PNG whose header says 10,000 × 10,000; the pixels are never read."""
    header = struct.pack(">IIBBBBB", 10_000, 10_000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x))
        for kind, x in parts
    )
