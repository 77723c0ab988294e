"""Where lengths come from, and that it is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from small_models import large_shape

from segcredit.config import Recipe, parse_recipe
from segcredit.plan import Tower
from segcredit.plan.job import IMAGE_SHARE, LONGEST, PROMPT, TEMPLATE, lengths_of

TOWER = large_shape().tower
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
"""The data beside the checkout."""


def recipe(train: Any = "absent.jsonl", **settings: Any) -> Recipe:
    data = {"train": [str(train)]} | settings
    return parse_recipe(
        {
            "model": {"path": "some/model"},
            "data": data,
            "stages": [{"kind": "optimize", "steps": 1}],
            "rollout": {"max_tokens": 1000},
        }
    )


def rows(folder: Path, *texts: str, size: tuple[int, int] | None = None) -> Path:
    """A file of prompts, with a picture each if a size is given."""
    lines = []
    for number, text in enumerate(texts):
        row: dict[str, Any] = {"problem": text, "answer": "1"}
        if size is not None:
            Image.new("RGB", size).save(folder / f"{number}.png")
            row |= {"problem": f"<image>{text}", "images": [f"{number}.png"]}
        lines.append(json.dumps(row))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_text_and_pictures_of_the_data_are_measured(tmp_path: Path):
    path = rows(tmp_path, "x" * 93, "x" * 193, size=(280, 140))  # "<image>" is seven characters
    found = lengths_of(recipe(path), TOWER)
    text = (25 + 50) / 2 + TEMPLATE
    assert found.images == 50
    assert found.prompt == pytest.approx(text + 50)
    assert found.longest == 50 + TEMPLATE + 50
    assert "first 2 prompts of the data" in found.prompt_from


def test_a_text_model_has_no_pictures(tmp_path: Path):
    found = lengths_of(recipe(rows(tmp_path, "x" * 400)), None)
    assert (found.prompt, found.images) == (100 + TEMPLATE, 0)


def test_the_suffix_counts(tmp_path: Path):
    path = rows(tmp_path, "x" * 40)
    longer = lengths_of(recipe(path, suffix="y" * 399), None)
    assert longer.prompt == lengths_of(recipe(path), None).prompt + 100


def test_bad_rows_are_passed_over(tmp_path: Path):
    path = rows(tmp_path, "x" * 40)
    path.write_text(path.read_text() + "no json\n" + '{"problem": ""}\n')
    assert lengths_of(recipe(path), None).prompt == 10 + TEMPLATE


def test_absent_data_is_said_and_assumed():
    found = lengths_of(recipe(), TOWER)
    assert (found.prompt, found.longest) == (PROMPT, PROMPT * LONGEST)
    assert found.images == pytest.approx(PROMPT * IMAGE_SHARE)
    assert "assumed, since the data is not here" in found.prompt_from
    assert "assumed: 50% of rollout.max_tokens" in found.response_from
    assert found.response == 500


def test_the_longest_prompt_is_bounded_as_the_data_is():
    found = lengths_of(recipe(max_prompt_tokens=300), TOWER)
    assert (found.prompt, found.longest) == (PROMPT, 300)
    found = lengths_of(recipe(max_prompt_tokens=64), TOWER)
    assert (found.prompt, found.longest) == (64, 64)


def test_what_is_given_is_taken(tmp_path: Path):
    path = rows(tmp_path, "x" * 4000)
    found = lengths_of(recipe(path), TOWER, 240, 700, 200, 321)
    assert (found.prompt, found.longest, found.images, found.response) == (240, 700, 200, 321)
    assert found.prompt_from == "--prompt-tokens 240"
    assert found.response_from == "--mean-length 321"


def test_what_is_given_by_halves_is_said():
    found = lengths_of(recipe(), TOWER, prompt=240)
    assert found.prompt_from == "--prompt-tokens 240; assumed: the longest and images"


@pytest.mark.parametrize(
    ("path", "tower", "mean", "ratio"),
    [
        ("geometry3k/train.jsonl", TOWER, 220, 4.2),
        ("gsm8k/train.jsonl", None, 80, 2.0),
        ("math500/test.jsonl", None, 69, 6.5),
    ],
)
def test_real_prompts(path: str, tower: Tower | None, mean: float, ratio: float):
    """Assumptions quote these."""
    if not (DATA / path).is_file():
        pytest.skip("needs the data beside the checkout")
    found = lengths_of(recipe(DATA / path), tower)
    assert found.prompt == pytest.approx(mean, abs=1)
    assert found.longest / found.prompt == pytest.approx(ratio, abs=0.05)
    if tower is not None:
        assert found.images / found.prompt == pytest.approx(IMAGE_SHARE, abs=0.005)


def test_a_world_is_asked_for_prompts():
    made = parse_recipe(
        {
            "model": {"path": "some/model"},
            "data": {"world": "shape_grid"},
            "stages": [{"kind": "optimize", "steps": 1}],
        }
    )
    found = lengths_of(made, TOWER)
    assert "64 prompts of shape_grid" in found.prompt_from
    assert found.images == 9  # three by three cells of 28 pixels


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"response": 1001.0}, "--mean-length: .*rollout.max_tokens=1000.*1001"),
        ({"prompt": 100.0, "images": 101.0}, "--image-tokens: .*100 tokens.*101"),
        ({"tower": None, "images": 5.0}, "--image-tokens: this model reads text only"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str):
    tower = given.pop("tower", TOWER)
    with pytest.raises(ValueError, match=said):
        lengths_of(recipe(), tower, **given)


def test_a_longest_prompt_is_not_shorter_than_the_mean():
    assert lengths_of(recipe(), TOWER, prompt=200, longest=100).longest == 200
