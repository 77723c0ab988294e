"""Real rows of Geometry3K, GSM8K and MATH500 load as they are."""

import json
import re
from pathlib import Path

import pytest

from segcredit.data import Keys, load_prompts
from segcredit.models.images import open_image

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the data beside the checkout")


def num_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k(split: str) -> None:
    path = DATA / "gsm8k" / f"{split}.jsonl"
    loaded = load_prompts(path, suffix='Output the final answer after "####".')
    assert len(loaded.prompts) == num_lines(path)
    for prompt in loaded.prompts:
        assert prompt.answer is not None
        assert re.fullmatch(r"-?\d+(\.\d+)?", prompt.answer)
        assert prompt.messages[0]["content"].endswith(' Output the final answer after "####".')
    assert loaded.prompts[0].id == f"{split}:1"


def test_math500() -> None:
    path = DATA / "math500" / "test.jsonl"
    prompts = load_prompts(path).prompts
    assert len(prompts) == num_lines(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in rows]
    assert [prompt.id for prompt in prompts] == [row["unique_id"] for row in rows]


def test_the_boxed_answer_of_a_worked_solution_is_the_answer_given() -> None:
    prompts = load_prompts(DATA / "math500" / "test.jsonl", keys=Keys(answer=("solution",))).prompts

    def bare(text: str) -> str:
        return "".join(text.split())

    same = sum(bare(prompt.answer or "") == bare(prompt.columns["answer"]) for prompt in prompts)
    assert same > 0.97 * len(prompts)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_geometry3k(split: str) -> None:
    path = DATA / "geometry3k" / f"{split}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:50]]
    prompts = load_prompts(path, limit=50).prompts
    assert len(prompts) == len(rows) == 50
    for row, prompt in zip(rows, prompts, strict=True):
        assert prompt.id == str(row["id"])
        assert prompt.answer == row["ground_truth"]
        assert prompt.messages[0]["content"] == "<image>" + row["problem"]
        assert prompt.images == (path.parent / row["image"],)
        assert prompt.columns["choices"] == row["choices"]
    assert open_image(prompts[0].images[0]).mode == "RGB"


def test_geometry3k_by_letter() -> None:
    path = DATA / "geometry3k" / "val.jsonl"
    prompts = load_prompts(path, limit=5, keys=Keys(answer=("answer",))).prompts
    assert {prompt.answer for prompt in prompts} <= set("ABCD")
