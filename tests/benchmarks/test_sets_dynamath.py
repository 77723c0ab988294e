"""DynaMath: ten variants of each question; the worst case needs all of them."""

import json
from pathlib import Path

import pytest
from bench import DATA, box, needs_data, questions, random_letters, scores

from segcredit.benchmarks import find_data, make_benchmark

pytestmark = needs_data
NAME = "dynamath"


@pytest.fixture(scope="module")
def rows() -> dict:
    found = {}
    for trial in range(1, 11):
        file = DATA / f"dynamath/trial{trial}/dataset.json"
        for key, row in json.loads(file.read_text()).items():
            found[f"{key}/{trial}"] = row
    return found


def worst(marks: dict) -> float:
    problems = {key.partition("/")[0] for key in marks}
    return sum(all(marks[f"{x}/{n}"] for n in range(1, 11)) for x in problems) / len(problems)


@pytest.mark.slow
def test_questions_and_image_bytes(rows: dict) -> None:
    asked = questions(NAME)
    assert {x.id for x in asked} == set(rows)
    assert len(asked) == 630, "63 of the 501 questions are here, in ten variants"
    for x in asked:
        row = rows[x.id]
        trial = x.id.partition("/")[2]
        image = DATA / f"dynamath/trial{trial}" / row["image"]
        assert x.images[0].read_bytes() == image.read_bytes()
        assert row["question"].strip() in x.messages[0]["content"]


@pytest.mark.slow
def test_gold_answers_get_100_on_every_metric() -> None:
    found, _ = scores(NAME, questions(NAME), lambda x: box(x.answer))
    assert {x.value for x in found.values()} == {100.0}
    assert list(found)[:2] == ["worst case", "average"]
    assert (found["worst case"].count, found["average"].count) == (63, 630)


@pytest.mark.slow
@pytest.mark.parametrize("said", ["A", "0", "random"])
def test_constant_and_random_answers(rows: dict, said: str) -> None:
    asked = questions(NAME)
    letters = random_letters(asked, "AB", 5) if said == "random" else dict.fromkeys(rows, said)
    found, right = scores(NAME, asked, lambda x: box(letters[x.id]))

    def correct(key: str) -> bool:
        row, letter = rows[key], letters[key]
        if row["answer_type"] == "float":
            return letter == "0" and abs(float(row["answer"])) <= 0.001
        if letter == "0" and f"({row['answer']}) 0 " in row["question"] + " ":
            return True  # the text of the option
        return row["answer"] in (letter, f"x = {letter}")

    marks = {key: correct(key) for key in rows}
    assert sum(right) == sum(marks.values()) > 0
    assert found["average"].value == pytest.approx(100 * sum(marks.values()) / 630)
    assert found["worst case"].value == pytest.approx(100 * worst(marks))


def test_one_wrong_variant_fails_the_worst_case() -> None:
    asked = questions(NAME)
    found, _ = scores(NAME, asked, lambda x: box("?" if x.id == "9/7" else x.answer))
    assert found["worst case"].value == pytest.approx(100 * 62 / 63)
    assert found["average"].value == pytest.approx(100 * 629 / 630)


@pytest.mark.parametrize(
    ("id", "said", "correct"),
    [
        ("1/1", "2.0944", True),
        ("1/1", "2.094", True),
        ("1/1", "2.09", False),
        ("1/1", "x = 2.0944", True),
        ("1/1", "2.0944 or 3", False),
        ("9/1", "12 cm", True),
        ("9/1", "12.000", True),
        ("9/1", "13", False),
    ],
)
def test_numbers_within_a_thousandth(id: str, said: str, correct: bool) -> None:
    (asked,) = (x for x in questions(NAME) if x.id == id)
    found, _ = scores(NAME, [asked], lambda x: box(said))
    assert found["average"].value == 100 * correct


def test_a_missing_variant_is_an_error(tmp_path: Path) -> None:
    for trial in range(1, 10):
        folder = tmp_path / f"dynamath/trial{trial}"
        (folder / "image").mkdir(parents=True)
        source = DATA / f"dynamath/trial{trial}"
        (folder / "image/image1.png").write_bytes((source / "image/image1.png").read_bytes())
        row = json.loads((source / "dataset.json").read_text())["1"]
        (folder / "dataset.json").write_text(json.dumps({"1": row}))
    benchmark = make_benchmark(NAME)
    with pytest.raises(ValueError, match="group 1: expected 10 variants; got 1/1, 1/2"):
        benchmark.read(find_data(benchmark.layouts, [tmp_path]))
