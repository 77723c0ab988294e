"""Geometry3K, GSM8K and MATH-500 as they are: every row written, and every row that comes twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from miniature import contents

from segcredit.data import load_prompts
from segcredit.data.prepare import KNOWN, Duplicates, Report, prepare
from segcredit.rewards.extract import expected

DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="needs the data beside the checkout"),
]


@pytest.fixture(scope="module", autouse=True)
def without_shape_checks() -> Iterator[None]:
    """A million calls, each of which would be checked: a minute."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def geo3k(without_shape_checks: None, tmp_path_factory: pytest.TempPathFactory) -> Report:
    output = tmp_path_factory.mktemp("geo3k")
    return prepare("geo3k", output, source=str(DATA / "geometry3k"), drop_duplicates=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_geometry3k_holds_twice(geo3k: Report) -> None:
    """172 test rows share an image file with the training data, 300 its pixels, 308 its drawing."""
    across = [shared for shared in geo3k.shared if shared.within != shared.split]
    assert across == [
        Duplicates("validation", "train", 300, question=161, file=87, image=139, alike=147, both=0),
        Duplicates("test", "train", 601, question=284, file=172, image=300, alike=308, both=1),
    ]
    within = {s.split: (s.image, s.both) for s in geo3k.shared if s.within == s.split}
    assert within == {"train": (650, 2), "validation": (20, 0), "test": (68, 0)}
    counts = {s.name: (s.read, sum(s.skipped.values()), s.dropped) for s in geo3k.splits}
    assert counts == {"train": (2101, 0, 1), "validation": (300, 0, 0), "test": (601, 0, 0)}


@pytest.mark.parametrize("place", [0, 1, 2], ids=["train", "validation", "test"])
def test_every_row_of_geometry3k_loads_as_it_was(place: int, geo3k: Report) -> None:
    split = geo3k.splits[place]
    rows = lines(DATA / "geometry3k" / f"{'val' if place == 1 else split.name}.jsonl")
    prompts = load_prompts(split.path).prompts
    assert len(prompts) == len(rows) - split.dropped
    for prompt in prompts:
        row = rows[prompt.columns["index"]]
        (message,) = prompt.messages
        assert message["content"] == f"<image>{row['problem']} {KNOWN['geo3k'].suffix}"
        assert prompt.answer == row["ground_truth"]
        assert prompt.images == ((DATA / "geometry3k" / row["image"]).read_bytes(),)
        assert prompt.columns["id"] == row["id"]
        assert prompt.columns["choices"] == row["choices"]


def test_gsm8k(tmp_path: Path) -> None:
    report = prepare("gsm8k", tmp_path / "one", source=str(DATA / "gsm8k"))
    assert all(shared.question == 0 for shared in report.shared)
    for split in report.splits:
        rows = lines(DATA / "gsm8k" / f"{split.name}.jsonl")
        prompts = load_prompts(split.path).prompts
        assert len(prompts) == len(rows) == {"train": 7473, "test": 1319}[split.name]
        for prompt, row in zip(prompts, rows, strict=True):
            assert prompt.messages[0]["content"] == f"{row['question']} {KNOWN['gsm8k'].suffix}"
            assert prompt.answer == expected(row["answer"])  # as the reward reads it
            assert prompt.columns["answer"] == row["answer"]
    prepare("gsm8k", tmp_path / "two", source=str(DATA / "gsm8k"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_words(tmp_path: Path) -> None:
    """MAWPS and ASDiv-A are for training, SVAMP is for testing, by the names of the files."""
    report = prepare("words", tmp_path, source=str(DATA / "words"))
    assert {x.name: x.written for x in report.splits} == {"train": 3126, "test": 1000}
    for split, file in (("train", "train"), ("test", "svamp")):
        rows = lines(DATA / "words" / f"{file}.jsonl")
        prompts = load_prompts(tmp_path / f"{split}.parquet").prompts
        for prompt, row in zip(prompts, rows, strict=True):
            assert prompt.messages[0]["content"] == f"{row['question']} {KNOWN['words'].suffix}"
            assert prompt.answer == expected(row["answer"])
            assert prompt.columns.get("response") == row.get("response")


def test_math500(tmp_path: Path) -> None:
    report = prepare("math", tmp_path, source=str(DATA / "math500"))
    assert report.data_sources == ["HuggingFaceH4/MATH-500"]
    rows = lines(DATA / "math500" / "test.jsonl")
    prompts = load_prompts(tmp_path / "test.parquet").prompts
    assert len(prompts) == len(rows) == 500
    for prompt, row in zip(prompts, rows, strict=True):
        assert prompt.messages[0]["content"] == f"{row['problem']} {KNOWN['math'].suffix}"
        assert prompt.answer == row["answer"]
        assert prompt.columns["level"] == row["level"]


def test_the_boxes_of_math500_are_its_answers(tmp_path: Path) -> None:
    rows = lines(DATA / "math500" / "test.jsonl")
    for row in rows:
        del row["answer"]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare("math", tmp_path / "out", source=str(path))
    found = [prompt.answer for prompt in load_prompts(tmp_path / "out/test.parquet").prompts]
    given = [row["answer"] for row in lines(DATA / "math500" / "test.jsonl")]
    same = sum("".join(a.split()) == "".join(b.split()) for a, b in zip(found, given, strict=True))
    assert same == 500
