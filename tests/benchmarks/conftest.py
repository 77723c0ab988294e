"""A tiny vision-language model on disk, and a small LogicVista."""

from pathlib import Path

import pytest
from bench import write_logicvista

from segcredit.data.worlds import make_world
from segcredit.models import Policy


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
