"""MathVerse, MathVista, ScienceQA, MMMU, MMBench and MMStar, read from generated tables."""

import json
from pathlib import Path

import pytest
from bench import DATA, box, needs_data, random_letters, scores
from tables import (
    choice_row,
    encoded,
    image,
    mathverse_row,
    mathvista_row,
    read,
    rotations,
    write_parquet,
    write_tsv,
)

from segcredit.benchmarks import make_benchmark
from segcredit.benchmarks.run import BenchmarkSettings, load_questions, run_benchmarks
from segcredit.benchmarks.sets.mathverse import expected_letters, options_in
from segcredit.benchmarks.sets.mathvista import official_prompt
from segcredit.data import BadRows
from segcredit.types import Prompt

ANIMALS = {"A": "teddy bear", "B": "rabbit", "C": "cat", "D": "dog"}
COLORS = {"A": "red", "B": "blue"}


def gold(x: Prompt) -> str:
    return box(x.answer)


def accuracy(name: str, asked: list[Prompt], answer: str) -> float:
    """Percent of the main metric for a model that always gives the same answer."""
    found, _ = scores(name, asked, lambda x: box(answer))
    return next(iter(found.values())).value


def perfect(name: str, asked: list[Prompt]) -> None:
    found, right = scores(name, asked, gold)
    assert all(right)
    assert {x.value for key, x in found.items()} == {100.0}


@pytest.fixture
def choices() -> list[dict]:
    return [
        choice_row(1, "What is it?", ANIMALS, "C"),
        choice_row(2, "Which color?", COLORS, "B"),
        choice_row(3, "And this?", ANIMALS, "A") | {"hint": "It is soft.", "category": "toys"},
        choice_row(4, "And that?", ANIMALS, "C") | {"hint": "nan"},
    ]


@pytest.mark.parametrize("name", ["scienceqa", "mmstar", "mmmu"])
def test_tables_of_multiple_choice_questions(
    name: str, choices: list[dict], tmp_path: Path
) -> None:
    asked = read(name, write_tsv(tmp_path / "x.tsv", choices))
    assert [x.id for x in asked] == ["1", "2", "3", "4"]
    assert [x.images for x in asked] == [(image(i),) for i in (1, 2, 3, 4)]
    assert asked[1].messages[0]["content"] == (
        "<image>Question: Which color?\nOptions:\nA. red\nB. blue\n"
        "Please select the correct answer from the options above."
    )
    assert asked[2].messages[0]["content"].startswith("<image>Hint: It is soft.\nQuestion: And")
    assert asked[3].messages[0]["content"].startswith("<image>Question: And that?")
    perfect(name, asked)
    assert accuracy(name, asked, "C") == 50.0
    assert accuracy(name, asked, "B") == 25.0
    assert accuracy(name, asked, "cat") == 50.0
    assert accuracy(name, asked, "Z") == 0.0
    found, _ = scores(name, asked, lambda x: box({"1": "C", "3": "A"}.get(x.id, "D")))
    assert found["accuracy"].value == 50.0
    assert found["category: animals"].value == pytest.approx(100 / 3)
    assert found["category: toys"].value == 100.0


def test_scienceqa_leaves_out_questions_without_an_image(tmp_path: Path) -> None:
    rows = [
        {
            "image": {"bytes": image(1), "path": "image.png"},
            "question": "Which is a solid?",
            "choices": ["air", "water", "stone"],
            "answer": 2,
            "hint": "",
            "subject": "natural science",
            "category": "States of matter",
        },
        {
            "image": None,
            "question": "Is water wet?",
            "choices": ["yes", "no"],
            "answer": 0,
            "hint": "Think.",
            "subject": "natural science",
            "category": "States of matter",
        },
    ]
    (asked,) = read("scienceqa", write_parquet(tmp_path / "x.parquet", rows))
    assert asked.answer == "C"
    assert asked.images == (image(1),)
    found, _ = scores("scienceqa", [asked], gold)
    assert found["subject: natural science"].value == 100.0
    rows[0]["answer"] = 3
    with pytest.raises(BadRows, match="position of the answer"):
        read("scienceqa", write_parquet(tmp_path / "x.parquet", rows))


def test_mmstar_on_the_hub_has_its_options_in_the_question(tmp_path: Path) -> None:
    row = {
        "index": 7,
        "question": "What is A: the thing?\nOptions: A: a red, big box, B: blue, C: green, D: B: x",
        "image": {"bytes": image(7), "path": None},
        "answer": "D",
        "category": "coarse perception",
        "l2_category": "image topic",
    }
    (asked,) = read("mmstar", write_parquet(tmp_path / "x.parquet", [row]))
    assert asked.columns["options"] == {
        "A": "a red, big box",
        "B": "blue",
        "C": "green",
        "D": "B: x",
    }
    assert (
        "Question: What is A: the thing?\nOptions:\nA. a red, big box\n"
        in asked.messages[0]["content"]
    )
    assert asked.columns["l2-category"] == "image topic"
    perfect("mmstar", [asked])
    with pytest.raises(BadRows, match="options after 'Options:'"):
        read("mmstar", write_parquet(tmp_path / "x.parquet", [row | {"question": "What?"}]))


def test_mmbench_needs_all_rotations_to_be_right(tmp_path: Path) -> None:
    rows = rotations(1, "What?", ANIMALS, "C") + rotations(2, "Which color?", COLORS, "A")
    asked = read("mmbench", write_tsv(tmp_path / "x.tsv", rows))
    assert len(asked) == 6
    assert [x.answer for x in asked] == ["C", "B", "A", "D", "A", "B"]
    assert {x.images for x in asked} == {(image(1),), (image(2),)}
    perfect("mmbench", asked)
    assert accuracy("mmbench", asked, "cat") == 50.0
    found, _ = scores("mmbench", asked, lambda x: box("A"))
    assert found["circular accuracy"].value == 0.0
    assert found["circular accuracy"].count == 2
    assert found["vanilla accuracy"].value == pytest.approx(100 * 2 / 6)
    assert found["category: animals"].count == 2
    limited = make_benchmark("mmbench").first(asked, 2)
    assert len(limited) == 4


def test_mmbench_without_rotations_is_refused(tmp_path: Path) -> None:
    rows = rotations(1, "What?", ANIMALS, "C")
    with pytest.raises(BadRows, match="expected 4 rotations of the options; got 1, 1000001"):
        read("mmbench", write_tsv(tmp_path / "x.tsv", rows[:2]))
    with pytest.raises(BadRows, match="expected a number under 'index'; got 'x'"):
        read(
            "mmbench",
            write_tsv(tmp_path / "x.tsv", [choice_row(1, "?", COLORS, "A") | {"index": "x"}]),
        )


def test_mmmu_puts_images_at_their_marks(tmp_path: Path) -> None:
    both = f"['{encoded(1)}', '{encoded(2)}']"
    rows = [
        choice_row(1, "Compare <image 2> with <image 1>.", ANIMALS, "B")
        | {"image": both, "split": "validation"},
        choice_row(2, "Is it <image 1>?", {"A": "<image 2>", "B": "<image 1>"}, "A")
        | {"image": both, "split": "validation"},
        choice_row(3, "No mark", ANIMALS, "B") | {"image": both, "split": "validation"},
        choice_row(4, "Dev", ANIMALS, "B") | {"split": "dev"},
    ]
    asked = read("mmmu", write_tsv(tmp_path / "x.tsv", rows))
    assert [x.id for x in asked] == ["1", "2", "3"]
    assert asked[0].images == (image(2), image(1))
    assert "Question: Compare <image> with <image>.\n" in str(asked[0].messages[0]["content"])
    assert asked[1].images == (image(1), image(2), image(1))
    assert asked[2].images == (image(1), image(2))
    assert asked[2].messages[0]["content"].startswith("<image><image>Question: No mark")
    rows[0]["question"] = "See <image 3>."
    with pytest.raises(BadRows, match="expected an image for each of"):
        read("mmmu", write_tsv(tmp_path / "x.tsv", rows))


@pytest.mark.slow
def test_mmmu_on_the_hub_and_its_open_questions(tmp_path: Path) -> None:
    common = {"image_2": None, "subfield": "Cost", "question_type": "open", "explanation": ""}
    first = {"bytes": image(1), "path": None}
    rows = [
        {
            "id": "validation_Accounting_1",
            "question": "What is it? <image 1>",
            "options": "['$6', '$7', '$8']",
            "answer": "B",
            "image_1": first,
            **common,
        },
        {
            "id": "validation_Math_2",
            "question": "How much? <image 1>",
            "options": "[]",
            "answer": "['24/7', '3.429']",
            "image_1": first,
            **common,
        },
        {
            "id": "validation_Electronics_3",
            "question": "Which voltage? <image 1>",
            "options": "[]",
            "answer": "8.4",
            "image_1": first,
            **common,
        },
    ]
    asked = read("mmmu", write_parquet(tmp_path / "x.parquet", rows))
    assert [x.columns["category"] for x in asked] == ["Accounting", "Math", "Electronics"]
    replies = {
        "validation_Accounting_1": ["$7", "\\$7", "B", "(B)"],
        "validation_Math_2": ["24/7", "\\frac{24}{7}", "3.429", "24/7"],
        "validation_Electronics_3": ["8.4", "8.4 V", "8.40", "\\frac{42}{5}"],
    }
    for i in range(4):
        _, right = scores("mmmu", asked, lambda x, i=i: box(replies[x.id][i]))
        assert right == [True] * 3, i
    _, right = scores("mmmu", asked, lambda x: box("9"))
    assert right == [False] * 3


MATHVISTA = [
    mathvista_row(
        1,
        question="Hint: x\nQuestion: Which?\nChoices:\n(A) 18\n(B) 9\n(C) 18",
        question_type="multi_choice",
        answer_type="text",
        choices="['18', '9', '18']",
        answer="18",
        answer_option="A",
    ),
    mathvista_row(
        2, question="Hint: How many?", question_type="free_form", answer_type="integer", answer="14"
    ),
    mathvista_row(
        3,
        question="Hint: How long?",
        question_type="free_form",
        answer_type="float",
        answer="1.2",
        skills="['arithmetic reasoning', 'scientific reasoning']",
    ),
    mathvista_row(
        4,
        question="Hint: When?",
        question_type="free_form",
        answer_type="list",
        answer="[2007, 2008]",
        task="math word problem",
    ),
]


def test_mathvista_answer_types(tmp_path: Path) -> None:
    asked = read("mathvista", write_tsv(tmp_path / "x.tsv", MATHVISTA))
    found, right = scores("mathvista", asked, gold)
    assert right == [True] * 4
    assert found["skill: scientific reasoning"].count == 1
    assert found["skill: arithmetic reasoning"].count == 4
    assert found["task: math word problem"].count == 1
    for reply, marks in {
        "C": [True, False, False, False],
        "A": [True, False, False, False],
        "B": [False, False, False, False],
        "14": [False, True, False, False],
        "14.4": [False, False, False, False],
        "1.2449": [False, False, True, False],
        "1.25": [False, False, True, False],  # Python rounds 1.25 to 1.2
        "1.26": [False, False, False, False],
        "[2007,2008]": [False, False, False, True],
        "[2008, 2007]": [False, False, False, False],
    }.items():
        _, right = scores("mathvista", asked, lambda x, reply=reply: box(reply))
        assert right == marks, reply


def test_mathvista_on_the_hub(tmp_path: Path) -> None:
    row = {
        "pid": "5",
        "question": "How many?",
        "image": "images/5.jpg",
        "decoded_image": {"bytes": image(5), "path": None},
        "choices": None,
        "unit": "years",
        "precision": None,
        "answer": "3",
        "question_type": "free_form",
        "answer_type": "integer",
        "metadata": {"task": "math word problem", "skills": ["numeric commonsense"]},
    }
    (asked,) = read("mathvista", write_parquet(tmp_path / "x.parquet", [row]))
    assert asked.images == (image(5),)
    assert asked.messages[0]["content"] == (
        "<image>Hint: Please answer the question requiring an integer answer and provide the final "
        "value, e.g., 1, 2, 3, at the end.\nQuestion: How many? (Unit: years)"
    )
    assert asked.columns["skill"] == ["numeric commonsense"]
    perfect("mathvista", [asked])
    (other,) = read(
        "mathvista", write_parquet(tmp_path / "x.parquet", [row | {"query": "Hint: as it is"}])
    )
    assert other.messages[0]["content"] == "<image>Hint: as it is"
    with pytest.raises(
        BadRows, match="expected the answer_type integer, float or list; got 'word'"
    ):
        read("mathvista", write_parquet(tmp_path / "x.parquet", [row | {"answer_type": "word"}]))


@needs_data
def test_mathvista_prompts_and_gold_answers_of_all_1000_questions(tmp_path: Path) -> None:
    rows = json.loads((DATA / "mathvista_text/testmini.json").read_text())
    prompts = json.loads((DATA / "mathvista_text/query.json").read_text())
    (tmp_path / "images").mkdir()
    picture = tmp_path / "images" / "x.png"
    picture.write_bytes(image())
    own = {key: {**row, "image": "images/x.png"} for key, row in rows.items()}
    (tmp_path / "x.json").write_text(json.dumps(own))
    asked = read("mathvista", tmp_path / "x.json")
    assert len(asked) == 1000 == make_benchmark("mathvista").count
    mine = {x.id: x.messages[0]["content"].removeprefix("<image>") for x in asked}
    assert mine == {key: prompts[key] for key in rows}
    perfect("mathvista", asked)
    letters = {
        x.id: next(
            (key for key, text in x.columns["options"].items() if text == x.answer), x.answer
        )
        for x in asked
    }
    _, right = scores("mathvista", asked, lambda x: f"The answer is {letters[x.id]}.")
    assert all(right)
    _, right = scores("mathvista", asked, lambda x: box("A"))
    assert sum(right) == sum(
        bool(row["choices"]) and row["choices"][0] == row["answer"] for row in rows.values()
    )
    _, right = scores("mathvista", asked, lambda x: box("2"))
    expected = sum(
        row["answer"] in ("2", "2cm") and row["answer_type"] in ("integer", "text")
        for row in rows.values()
    )
    assert sum(right) == expected


def test_mathvista_prompt_of_a_number_needs_a_known_precision() -> None:
    with pytest.raises(ValueError, match="precision of 1 or 2; got 3"):
        official_prompt("How long?", "free_form", "float", 3, None, {})


ANGLE = "How large is it?\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°"


@pytest.mark.slow
def test_mathverse_vision_only(tmp_path: Path) -> None:
    rows = [
        mathverse_row(1, ANGLE, "multi-choice", "D"),
        mathverse_row(2, "How far?", "free-form", "4.4 m"),
        mathverse_row(3, "Choose 2.\nChoices:\nA:x\nB:y\nC:z", "multi-choice", "A\nC"),
        mathverse_row(4, "True?\nChoice:\nA. True\nB. False", "multi-choice", "False"),
        mathverse_row(5, ANGLE, "multi-choice", "D") | {"problem_version": "Text Lite"},
    ]
    asked = read("mathverse", write_tsv(tmp_path / "x.tsv", rows))
    assert [x.id for x in asked] == ["1", "2", "3", "4"]
    assert asked[0].messages[0]["content"] == f"<image>{rows[0]['query_cot']}"
    assert asked[0].columns["subject"] == "Plane Geometry"
    found, right = scores("mathverse", asked, lambda x: box(x.columns["letters"] or x.answer))
    assert right == [True] * 4
    assert found["subfield: Angle"].value == 100.0
    for reply, marks in {
        "D": [True, False, False, False],
        "140^\\circ": [True, False, False, False],
        "4.40": [False, True, False, False],
        "4.4 cm": [False, False, False, False],
        "C, A": [False, False, True, False],
        "A": [False, False, False, False],
        "B": [False, False, False, True],
        "False": [False, False, False, True],
    }.items():
        _, right = scores("mathverse", asked, lambda x, reply=reply: box(reply))
        assert right == marks, reply


@pytest.mark.slow
@needs_data
def test_mathverse_gold_answers_of_all_788_problems(tmp_path: Path) -> None:
    rows = json.loads((DATA / "mathverse_text/testmini_text_only.json").read_text())
    (tmp_path / "x.png").write_bytes(image())
    own = [{**row, "problem_version": "Vision Only", "image": "x.png"} for row in rows]
    (tmp_path / "x.json").write_text(json.dumps(own))
    asked = read("mathverse", tmp_path / "x.json")
    assert len(asked) == 788 == make_benchmark("mathverse").count
    assert [x.messages[0]["content"] for x in asked] == [
        f"<image>{x['query_cot'].strip()}" for x in rows
    ]
    found, right = scores("mathverse", asked, lambda x: box(x.columns["letters"] or x.answer))
    assert all(right)
    assert found["accuracy"].value == 100.0
    found, right = scores("mathverse", asked, lambda x: box("B"))
    assert sum(right) == sum(row["answer"] in ("B", "(B)") for row in rows) + 1  # "B. False"
    choices = [x for x in asked if x.columns["letters"]]
    assert len(choices) == 436
    texts = {x.id: x.columns["options"].get(x.columns["letters"]) for x in choices}
    unique = [x for x in choices if list(x.columns["options"].values()).count(texts[x.id]) == 1]
    assert len(unique) > 420
    _, right = scores("mathverse", unique, lambda x: box(texts[x.id]))
    assert sum(right) == len(unique)


def test_mathverse_options_and_letters() -> None:
    assert options_in(ANGLE) == {"A": "40°", "B": "60°", "C": "120°", "D": "140°"}
    assert options_in("No choices") == {}
    assert expected_letters("(C)", {}) == "C"
    assert expected_letters("C\nD", {}) == "CD"
    with pytest.raises(ValueError, match="the text of one option"):
        expected_letters("maybe", {"A": "yes"})


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("mmstar", choice_row(1, "?", COLORS, "C"), "expected an answer among A, B; got 'C'"),
        ("mmmu", choice_row(1, "?", COLORS, "C"), "expected an answer among A, B; got 'C'"),
        ("mmstar", {"index": 1, "question": "?"}, "expected the columns A and B"),
        ("scienceqa", {"index": 1, "image": encoded(), "A": "x"}, "in the column 'question'"),
        ("mmstar", choice_row(1, "?", COLORS, "A") | {"image": ""}, "expected an image"),
        ("mmstar", choice_row(1, "?", COLORS, "A") | {"image": "7"}, "index of a row that has one"),
        ("mathvista", mathvista_row(1, question="?"), "in the column 'question_type'"),
        (
            "mathvista",
            MATHVISTA[0] | {"choices": "__import__('os').system('true')"},
            "expected a list such as",
        ),
        ("mathvista", MATHVISTA[0] | {"answer": "7"}, "expected an answer among the choices"),
        ("mathvista", MATHVISTA[0] | {"choices": "'18'"}, "expected a list of options"),
        ("mathvista", MATHVISTA[1] | {"answer": "many"}, "expected one number as answer"),
        ("mathvista", MATHVISTA[2] | {"precision": "inf"}, "precision of 1 or 2; got 'inf'"),
        (
            "mathverse",
            mathverse_row(1, "?", "essay", "x"),
            "multi-choice or free-form; got 'essay'",
        ),
    ],
)
def test_bad_rows_are_one_message(name: str, row: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadRows, match=message):
        read(name, write_tsv(tmp_path / "x.tsv", [row]))


def many(name: str) -> list[dict]:
    """Forty questions with two, three or four options."""
    rows = []
    for i in range(1, 41):
        options = {x: f"{x.lower()}{i}" for x in "ABCD"[: 2 + i % 3]}
        answer = list(options)[(7 * i) % len(options)]
        make = rotations if name == "mmbench" else lambda *x: [choice_row(*x)]
        rows += make(i, f"Question {i}?", options, answer)
    return rows


@pytest.mark.parametrize("name", ["scienceqa", "mmmu", "mmstar"])
def test_random_letters_score_the_number_of_equal_letters(name: str, tmp_path: Path) -> None:
    rows = many(name)
    asked = read(name, write_tsv(tmp_path / "x.tsv", rows))
    drawn = random_letters(asked, "ABCD", seed=3)
    equal = sum(drawn[str(row["index"])] == row["answer"] for row in rows)
    assert 0 < equal < 40
    found, _ = scores(name, asked, lambda x: box(drawn[x.id]))
    assert found["accuracy"].value == pytest.approx(100 * equal / 40)


def test_random_letters_on_mmbench_need_all_rotations(tmp_path: Path) -> None:
    rows = many("mmbench")
    asked = read("mmbench", write_tsv(tmp_path / "x.tsv", rows))
    drawn = random_letters(asked, "AB", seed=3)
    equal = {str(row["index"]): drawn[str(row["index"])] == row["answer"] for row in rows}
    circular = 0
    for i in range(1, 41):
        circular += all(mark for index, mark in equal.items() if int(index) % 1_000_000 == i)
    assert 0 < circular < sum(equal.values())
    found, _ = scores("mmbench", asked, lambda x: box(drawn[x.id]))
    assert found["circular accuracy"].value == pytest.approx(100 * circular / 40)
    assert found["vanilla accuracy"].value == pytest.approx(100 * sum(equal.values()) / len(rows))


def test_a_tiny_model_answers_every_set(model: Path, tmp_path: Path) -> None:
    both = f"['{encoded(1)}', '{encoded(2)}']"
    tables = {
        "ScienceQA_TEST": [choice_row(1, "What?", ANIMALS, "C"), choice_row(2, "?", COLORS, "B")],
        "MMStar": [choice_row(1, "What?", ANIMALS, "C")],
        "MMMU_DEV_VAL": [
            choice_row(1, "Compare <image 2> and <image 1>.", ANIMALS, "B") | {"image": both},
            choice_row(2, "How many?", {}, "8"),
        ],
        "MMBench_DEV_EN_V11": rotations(1, "What?", ANIMALS, "C"),
        "MathVista_MINI": MATHVISTA,
        "MathVerse_MINI_Vision_Only": [
            mathverse_row(1, ANGLE, "multi-choice", "D"),
            mathverse_row(2, "How far?", "free-form", "4.4 m"),
        ],
    }
    for name, rows in tables.items():
        write_tsv(tmp_path / f"{name}.tsv", rows)
    names = ["scienceqa", "mmstar", "mmmu", "mmbench", "mathvista", "mathverse"]
    settings = BenchmarkSettings(max_tokens=8, chunk=3)
    results = run_benchmarks(
        str(model), load_questions(names, tmp_path), tmp_path / "out", settings
    )
    counts = {name: len(result.answers) for name, result in results.items()}
    assert counts == dict(zip(names, (2, 1, 2, 4, 4, 2), strict=True))
    kept = json.loads((tmp_path / "out/scores.json").read_text())
    assert set(kept) == set(names)
    assert all(0 <= x["value"] <= 100 for s in kept.values() for x in s["scores"].values())
