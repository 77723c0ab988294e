"""Answers as each data set writes them, and what is no answer."""

from typing import Any

import pytest
from each import each

from segcredit.data import RowError
from segcredit.data.prepare.rows import boxed_solution, chosen_text, last_box, number


@each(
    ("text", "answer"),
    [
        ("no box", None),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{ 3 }", "3"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed  17 students" + "\nEnd", "17 students"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right\}}", r"\left\{ x \right\}"),
        (r"\boxed{}", None),
        (r"\boxed{ never closed", None),
        (r"\boxed", None),
        (r"\boxedness{1}", None),
        ("\\boxed{" * 50_000, None),
        (r"\boxed{" + "{" * 50_000 + "1" + "}" * 50_000 + "}", "{" * 50_000 + "1" + "}" * 50_000),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_box(text) == answer


@each(
    ("found", "answer"),
    [
        ("18", "18"),
        ("1,080", "1080"),
        ("$1,000.50", "1000.50"),
        ("-3", "-3"),
        ("5.", "5"),
        (".5", ".5"),
        (None, None),
    ],
)
def test_numbers_of_gsm8k(found: str | None, answer: str | None) -> None:
    assert number({}, found) == answer


@each("found", ["eighteen", "", "18 eggs", "1e5", "--3", "3-", "٣x", "1.2.3"])
def test_what_is_no_number_of_gsm8k(found: str) -> None:
    with pytest.raises(RowError, match="expected a solution that ends in '#### number'; got"):
        number({}, found)


def test_math_takes_the_answer_given_before_the_box() -> None:
    row = {"solution": r"\boxed{1}", "answer": "2"}
    assert boxed_solution(row, "2") == "2"
    assert boxed_solution({"solution": r"\boxed{1}", "answer": ""}, "1") == "1"
    assert boxed_solution({"problem": "?"}, None) is None
    with pytest.raises(RowError, match=r"a \\boxed\{\} of 'solution'.*--answer solution"):
        boxed_solution({"solution": "It is 1."}, "It is 1.")


@each(
    ("row", "answer"),
    [
        ({"choices": ["1", "2", "3"], "answer": "B"}, "2"),
        ({"choices": ["1", "2", "3"], "answer": "B", "ground_truth": "B"}, "B"),
        ({"answer": "B"}, "B"),
        ({"choices": ["1", "2"], "answer": "Z"}, "Z"),
        ({"choices": ["1", "2"], "answer": "AB"}, "AB"),
        ({"choices": [" x ", "2"], "answer": "A"}, "x"),
    ],
)
def test_letters_of_geometry3k(row: dict[str, Any], answer: str) -> None:
    assert chosen_text(row, row["answer"]) == answer


@pytest.mark.parametrize("choices", [["1"], ["1", ""], ["1", None]])
def test_a_letter_without_a_text(choices: list[str | None]) -> None:
    with pytest.raises(RowError, match="expected a text for the choice B"):
        chosen_text({"choices": choices}, "B")
