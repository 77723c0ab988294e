"""A tiny vision-language model on disk, and a small LogicVista."""

import json
from pathlib import Path

import pytest
from tiny_policies import picture

from segcredit.data.worlds import make_world
from segcredit.models import Policy

ANSWERS = ["A", "B", "A, C", "D", "A", "3", "B", "C", "A"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-vl"
    tokenizer = make_world("shape_grid").tokenizer()
    Policy.tiny("qwen2_5_vl", tokenizer, seed=0, hidden=32, heads=4).save(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Nine questions in the layout of LogicVista's repository, and one without a text."""
    return write_logicvista(tmp_path / "bench")


def write_logicvista(folder: Path) -> Path:
    place = folder / "logicvista/data"
    (place / "images").mkdir(parents=True)
    rows = {}
    for n, answer in enumerate(ANSWERS):
        (place / f"images/v1_{n}.png").write_bytes(picture(56, 56, seed=n))
        rows[f"v1_{n}"] = {
            "imagename": f"v1_{n}.png",
            "question": f"Which figure comes next? Number {n}.",
            "answer": answer,
            "skill": ["spatial" if n % 2 else "inductive"],
        }
    rows["v1_9"] = {"imagename": "v1_9.png", "question": "", "answer": "", "skill": ["spatial"]}
    (place / "dataset.json").write_text(json.dumps(rows))
    return folder
