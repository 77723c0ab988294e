"""Answers as each data set writes them, and what is no answer."""

from typing import Any

import pytest
from each import each

from segcredit.data import RowError
from segcredit.data.prepare.rows import (
    boxed_solution,
    chosen_text,
    last_box,
    number,
    with_solution,
    word_problem,
)


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


@each(
    ("solution", "response"),
    [
        ("2 + 2 = <<2+2=4>>4 eggs.\n#### 4", " 2 + 2 = 4 eggs.\n#### 4"),
        ("no steps #### 4", " no steps #### 4"),
        ("only an answer", None),
        (4, None),
    ],
)
def test_solutions_of_gsm8k_to_imitate(solution: object, response: str | None) -> None:
    row = {"question": "?", "answer": solution}
    assert with_solution(row).get("response") == response
    assert with_solution(row | {"response": "own"})["response"] == "own"


def mawps(question: str, numbers: str, equation: str, answer: object) -> dict[str, Any]:
    return {"Question": question, "Numbers": numbers, "Equation": equation, "Answer": answer}


@each(
    ("row", "question", "answer", "response"),
    [
        (
            mawps("ann has number0 , and number1 ?", "56.0 9.0", "* number0 number1", "504.0"),
            "Ann has 56, and 9?",
            "#### 504",
            " 56 * 9 = 504\n#### 504",
        ),
        (
            mawps(
                "number0 number1 number2", "25000.0 1500 8", "- number0 * number1 number2", 13000
            ),
            "25000 1500 8",
            "#### 13000",
            " 1500 * 8 = 12000\n25000 - 12000 = 13000\n#### 13000",
        ),
        (
            mawps("number0 ton", "0.16666", "/ - number0 2.0 4.0", "-0.4583"),
            "0.1667 ton",
            "#### -0.4583",
            " 0.1667 - 2 = -1.8333\n-1.8333 / 4 = -0.4583\n#### -0.4583",
        ),
        (
            {"Body": "He had $ 4 at the start", "Question": "How much ?", "Answer": 1538832.0},
            "He had $ 4 at the start. How much?",
            "#### 1538832",
            None,
        ),
        ({"question": "a ?", "answer": "#### 1"}, "a ?", "#### 1", None),
    ],
)
def test_word_problems(
    row: dict[str, Any], question: str, answer: str, response: str | None
) -> None:
    found = word_problem(row)
    assert (found["question"], found["answer"]) == (question, answer)
    assert found.get("response") == response


@each(
    ("row", "problem"),
    [
        (mawps("number0", "3 4", "+ number0 number1", 8), "gives the answer 8; got 7 from"),
        (mawps("number0", "3 0", "/ number0 number1", 8), "gives the answer 8; got nan from"),
        (
            mawps("number2", "3 4", "+ number0 number1", 7),
            "a value for number2 in 'Numbers'; got 2",
        ),
        (mawps("", "3 4", "+ number0", 7), "one equation in prefix notation; got '+ number0'"),
        (mawps("", "3 4", "number0 number1", 7), "one equation in prefix notation"),
        (mawps("", "3 4", "+ " * 99 + "1 " * 100, 100), "one equation in prefix notation"),
        (mawps("", "3 x", "+ number0 number1", 7), "expected a number; got 'x'"),
        (mawps("", "3 4", "+ number0 number1", None), "expected a number; got nothing"),
    ],
)
def test_word_problems_that_do_not_add_up(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError) as error:
        word_problem(row)
    assert problem in str(error.value)
