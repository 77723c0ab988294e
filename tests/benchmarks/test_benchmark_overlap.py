"""Questions whose images are in the training data: found by pixels, by look and by source."""

import base64
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest
from bench import DATA, needs_data, questions
from PIL import Image, ImageDraw, ImageOps
from tables import mathverse_row, mathvista_row, read, write_tsv
from test_benchmark_command import error_of, segcredit

from segcredit.benchmarks import make_benchmark, score
from segcredit.benchmarks.overlap import Overlap, TrainingImages, find_overlap, scores_without
from segcredit.benchmarks.run import Answer, SetResult
from segcredit.data import load_prompts
from segcredit.types import Prompt

GEOMETRY = DATA.parent / "geometry3k"


def drawing(number: int) -> Image.Image:
    image = Image.new("RGB", (200, 150), "white")
    pen = ImageDraw.Draw(image)
    for n in range(4):
        pen.line((20 + 30 * n, 20, 20 + (37 * number * (n + 1)) % 160, 130), "navy", 4)
    return image


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def prompt(id: str, *images: bytes, **columns: object) -> Prompt:
    return Prompt(id, ({"role": "user", "content": "<image>" * len(images)},), images, "A", columns)


def test_by_pixels_by_look_and_by_source() -> None:
    train = [prompt(str(n), png(drawing(n)), data_source="hiyouga/geometry3k") for n in range(3)]
    training = TrainingImages.of([*train, prompt("broken", b"no image")])
    asked = [
        prompt("same", png(drawing(1))),
        prompt("margin", png(ImageOps.expand(drawing(2), 20, "white"))),
        prompt("source", png(drawing(7)), source="Geometry3K"),
        prompt("other", png(drawing(8)), source="GeoQA+"),
        prompt("second image", png(drawing(9)), png(drawing(0))),
        prompt("no image"),
    ]
    found = find_overlap(asked, training)
    assert found.same == {"same", "second image"}
    assert found.alike == {"margin"}
    assert found.source == {"source"}
    assert found.ids == {"same", "second image", "margin", "source"}


def test_training_data_without_images_or_names_overlaps_with_nothing() -> None:
    training = TrainingImages.of([prompt("text")])
    assert not find_overlap([prompt("a", png(drawing(1)), source="")], training).ids


def result(name: str, asked: Sequence[Prompt], right: Sequence[Sequence[bool]]) -> SetResult:
    benchmark = make_benchmark(name)
    answers = [
        Answer(x.id, n, "", 0, False, None, "", marks[place], "", True)
        for place, x in enumerate(asked)
        for n, marks in enumerate(right)
    ]
    return SetResult(benchmark, list(asked), answers, score(benchmark, asked, right))


@pytest.mark.slow
@needs_data
def test_scores_without_the_overlap() -> None:
    """Two samples; every fourth question is right in the first one, and every third is out."""
    asked = questions("logicvista")
    right = [[n % 4 == 0 for n in range(447)], [False] * 447]
    out = frozenset(x.id for x in asked[::3])
    overlap = Overlap(out, frozenset(), frozenset())
    left = scores_without(result("logicvista", asked, right), overlap)["accuracy"]
    kept = [n for n in range(447) if n % 3]
    assert left.count == len(kept) == 298
    assert left.value == pytest.approx(100 * sum(n % 4 == 0 for n in kept) / 298 / 2)


@pytest.mark.slow
@needs_data
def test_a_group_is_left_out_as_a_whole() -> None:
    asked = questions("wemath")
    overlap = Overlap(frozenset({"2steps_1/2"}), frozenset(), frozenset())
    left = scores_without(result("wemath", asked, [[True] * 1740]), overlap)
    assert left["score (strict)"].count == 524


@pytest.mark.slow
@needs_data
def test_nothing_is_left() -> None:
    asked = questions("logicvista")
    all_ids = frozenset(x.id for x in asked)
    overlap = Overlap(all_ids, frozenset(), frozenset())
    assert scores_without(result("logicvista", asked, [[True] * 447]), overlap) == {}


@pytest.mark.slow
@needs_data
def test_geometry3k_and_the_benchmarks() -> None:
    """300 test images have the pixels of a training image, and 8 more look like one."""
    training = TrainingImages.of(load_prompts(GEOMETRY / "train.jsonl").prompts)
    found = find_overlap(load_prompts(GEOMETRY / "test.jsonl").prompts, training)
    assert (len(found.same), len(found.alike)) == (300, 8)
    for name in ("logicvista", "wemath"):
        assert not find_overlap(questions(name), training).ids


@needs_data
def test_questions_that_mathvista_and_mathverse_took_from_geometry3k() -> None:
    """By the source that their files name: 62 of 1,000 and 129 of 788."""
    training = TrainingImages(frozenset(), (), frozenset({"geometry3k"}))
    rows = json.loads((DATA / "mathvista_text/testmini.json").read_text())
    vista = [prompt(key, source=row["metadata"]["source"]) for key, row in rows.items()]
    assert (len(vista), len(find_overlap(vista, training).source)) == (1000, 62)
    (file,) = (DATA / "mathverse_text").glob("*.json")
    verse = [
        prompt(row["sample_index"], source=row["metadata"]["source"])
        for row in json.loads(file.read_text())
    ]
    assert (len(verse), len(find_overlap(verse, training).source)) == (788, 129)


def test_the_source_is_read_from_the_tables(tmp_path: Path) -> None:
    training = TrainingImages(frozenset(), (), frozenset({"geometry3k"}))
    number = {"question_type": "free_form", "answer_type": "integer", "answer": "3"}
    vista = [
        mathvista_row(n, question="Hint: 3?", source=source, **number)
        for n, source in enumerate(("Geometry3K", "GeoQA+"))
    ]
    asked = read("mathvista", write_tsv(tmp_path / "MathVista_MINI.tsv", vista))
    assert find_overlap(asked, training).source == {"0"}
    verse = [mathverse_row(n, "x?", "free-form", "3") for n in range(2)]
    verse[1]["metadata"] = "{'split': 'testmini', 'source': 'Geometry3K', 'subject': 'x'}"
    asked = read("mathverse", write_tsv(tmp_path / "MathVerse.tsv", verse))
    assert find_overlap(asked, training).source == {"1"}


def test_the_command_reports_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_tsv(
        tmp_path / "data" / "LogicVista.tsv",
        [
            {
                "index": n,
                "image": base64.b64encode(png(drawing(n))).decode(),
                "question": "Which? A-D",
                "answer": "A",
                "skill": "inductive",
            }
            for n in range(4)
        ],
    )
    (tmp_path / "1.png").write_bytes(png(drawing(1)))
    train = tmp_path / "train.jsonl"
    train.write_text(json.dumps({"problem": "Find x.", "answer": "1", "images": ["1.png"]}))
    options = ("--data", tmp_path / "data", "--sets", "logicvista", "--max-tokens", 4)
    done = segcredit(model, *options, "-o", tmp_path / "out", "--train-data", train)
    assert done.exit_code == 0, done.output
    assert "1 of 4 questions overlap with the training data: 1 with the same image" in done.output
    assert (
        "(without questions that overlap with training)"
        in (tmp_path / "out" / "table.md").read_text()
    )
    (written,) = (tmp_path / "out").glob("*/overlap.json")
    found = json.loads(written.read_text())["logicvista"]
    assert found["questions"] == ["1"]
    assert found["scores_without"]["accuracy"]["count"] == 3
    said = error_of(model, *options, "-o", tmp_path / "out", "--train-data", tmp_path / "no.jsonl")
    assert "no.jsonl" in said
