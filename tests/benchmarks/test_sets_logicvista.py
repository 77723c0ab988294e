"""LogicVista: 447 questions, letters compared as sets."""

import json

import pytest
from bench import DATA, box, needs_data, questions, random_letters, scores

from segcredit.benchmarks import make_benchmark
from segcredit.types import Response

pytestmark = needs_data
NAME = "logicvista"


@pytest.fixture(scope="module")
def rows() -> dict:
    found = json.loads((DATA / "logicvista/data/dataset.json").read_text())
    return {key: row for key, row in found.items() if row["question"]}


def test_questions_and_image_bytes(rows: dict) -> None:
    asked = questions(NAME)
    assert len(asked) == 447 == make_benchmark(NAME).count
    assert [x.id for x in asked] == list(rows)
    for x in asked:
        row = rows[x.id]
        assert x.messages[0]["content"] == "<image>" + row["question"].strip()
        (image,) = x.images
        assert (
            image.read_bytes() == (DATA / "logicvista/data/images" / row["imagename"]).read_bytes()
        )


def test_gold_answers_get_100_on_every_metric() -> None:
    found, _ = scores(NAME, questions(NAME), lambda x: box(x.answer))
    assert {x.value for x in found.values()} == {100.0}
    assert next(iter(found)) == "accuracy"
    assert found["skill: spatial"].count == 78


def test_a_constant_answer(rows: dict) -> None:
    found, right = scores(NAME, questions(NAME), lambda x: box("A"))
    expected = [row["answer"] == "A" for row in rows.values()]
    assert right == expected
    assert sum(expected) == 111
    assert found["accuracy"].value == pytest.approx(100 * 111 / 447)


def test_random_letters(rows: dict) -> None:
    said = random_letters(questions(NAME), "ABCDE", seed=3)
    found, _ = scores(NAME, questions(NAME), lambda x: box(said[x.id]))
    hits = {key: row["answer"] == said[key] for key, row in rows.items()}
    assert found["accuracy"].value == pytest.approx(100 * sum(hits.values()) / 447)
    for skill in ("inductive", "mechanical"):
        of_skill = [hits[key] for key, row in rows.items() if row["skill"] == [skill]]
        assert found[f"skill: {skill}"].value == pytest.approx(100 * sum(of_skill) / len(of_skill))


@pytest.mark.parametrize(
    ("said", "correct"),
    [
        (box("A, C"), True),
        (box("C and A"), True),
        (box("A"), False),
        (box("A, B, C"), False),
        ("<think>The answer is A, C", False),
        ("<think>The answer is A, C</think>The answer is C.", False),
        ("The answer is C, A.", True),
    ],
)
def test_several_letters_are_a_set(said: str, correct: bool) -> None:
    (asked,) = (x for x in questions(NAME) if x.answer == "A, C")
    (grade,) = make_benchmark(NAME).grade([Response(asked, said, 5, False, 9)], lambda pairs: [])
    assert grade.correct is correct
