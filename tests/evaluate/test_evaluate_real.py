"""Real rows of Geometry3K, GSM8K and MATH500, asked of a tiny model with random weights."""

import json
from pathlib import Path

import pytest

from segcredit.data.prepare import prepare
from segcredit.data.worlds import make_world
from segcredit.evaluate.checkpoint import evaluate_checkpoint
from segcredit.models import Policy

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the data beside the checkout")
SETS = {"geo3k": "geometry3k", "gsm8k": "gsm8k", "math": "math500"}


def first_rows(name: str, folder: Path) -> Path:
    """Some of the held-out rows; pictures are found where they are."""
    place = DATA / SETS[name]
    with (place / "test.jsonl").open() as lines:
        rows = [json.loads(line) for _, line in zip(range(4), lines, strict=False)]
    for row in rows:
        if "image" in row:
            row["image"] = str(place / row["image"])
    file = folder / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", SETS)
def test_a_few_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, world = (
        ("qwen2_5_vl", "shape_grid") if name == "geo3k" else ("qwen2", "derived_variables")
    )
    tokenizer = make_world(world).tokenizer()
    Policy.tiny(kind, tokenizer, hidden=32, layers=1, heads=4).save(tmp_path / "model")
    source = f"test={first_rows(name, tmp_path)}"
    prepare(name, f"data/{name}", source=source, allow_outside=True)
    found = evaluate_checkpoint(
        "./model",
        data=[name],
        prompts=3,
        samples=2,
        temperature=0.6,
        top_p=0.95,
        max_tokens=8,
        output=tmp_path / "said.jsonl",
    )
    assert (found.prompts, found.samples, found.sampled) == (3, 2, 0.0)
    assert found.sampled_interval[1] > 0.5, "three prompts say little"
    assert len((tmp_path / "said.jsonl").read_text().splitlines()) == 3 * (2 + 1)
    assert all(row["answer"] for row in found.rows)
