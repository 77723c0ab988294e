"""Final answers in responses: letters, numbers and free answers, on hand-written cases."""

import time
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from segcredit.benchmarks.answers import (
    after_thinking,
    choose,
    choose_set,
    final_answer,
    number,
    numbers,
    quantity,
    verify_quantities,
)
from segcredit.rewards.verify import Verifier

UNSEEN = yaml.safe_load((Path(__file__).parent / "unseen.yaml").read_text())
CASES = yaml.safe_load((Path(__file__).parent / "cases.yaml").read_text())


def answer_of(group: dict[str, Any], response: str) -> str | None:
    """The answer that the rules find for a group's kind of question."""
    if group["kind"] == "choice":
        return choose(response, group["options"].keys(), group["options"])
    if group["kind"] == "letters":
        return " ".join(sorted(choose_set(response, group["letters"]))) or None
    return final_answer(response)


@pytest.mark.parametrize("group", CASES, ids=[group["name"] for group in CASES])
def test_answers_found_in_hand_written_responses(group: dict[str, Any]) -> None:
    found = [(case, answer_of(group, case[0])) for case in group["cases"]]
    assert [(case[0], got) for case, got in found if got != case[1]] == []


def test_there_are_enough_cases() -> None:
    assert sum(len(group["cases"]) for group in CASES) >= 150
    assert all(len(case) == 3 for group in CASES for case in group["cases"])


@pytest.fixture(scope="module")
def verifier():
    verifier = Verifier()
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    "group", [g for g in CASES if g["kind"] == "free"], ids=lambda group: group["name"]
)
def test_free_answers_are_compared_as_quantities(group: dict[str, Any], verifier: Verifier) -> None:
    cases = [case for case in group["cases"] if case[1] is not None]
    verdicts = verify_quantities([(group["gold"], case[1]) for case in cases], verifier)
    wrong = [(c[1], v.reason) for c, v in zip(cases, verdicts, strict=True) if v.right is not c[2]]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 cm", [12.0]),
        ("$1,234.50", [1234.5]),
        ("1.234.5", [1.234]),
        ("\\frac{3}{4}", [0.75]),
        ("\\frac12", [0.5]),
        ("45^\\circ", [45.0]),
        ("10 cm^{2}", [10.0]),
        ("3\\pi", [9.42477796076938]),
        ("1/0", []),
        ("9" * 60, [1e60]),
        ("1e99", [1e99]),
        ("no", []),
    ],
    ids=range(12),
)
def test_numbers(text: str, expected: list[float]) -> None:
    assert numbers(text) == pytest.approx(expected)


def test_responses_whose_author_did_not_know_the_rules(verifier: Verifier) -> None:
    wrong = []
    for group in UNSEEN["choices"]:
        options = group["options"]
        found = [(case, choose(case[0], options, options)) for case in group["cases"]]
        wrong += [(case, got) for case, got in found if got != case[1]]
    for gold, response, right in UNSEEN["free"]:
        answer = final_answer(response)
        assert answer is not None, response
        (verdict,) = verify_quantities([(gold, answer)], verifier)
        value = number(answer)
        if verdict.right is not right or (value == float(gold)) is not right:
            wrong.append((gold, response, verdict.reason, value))
    assert wrong == []


@pytest.mark.parametrize(
    ("options", "response", "letter"),
    [
        (("15 cm", "15 m"), "\\boxed{15}", None),
        (("15 cm", "15 m"), "\\boxed{15\\text{ m}}", "B"),
        (("3\\sqrt{3}", "\\sqrt{3}"), "\\boxed{3 \\sqrt{3}}", "A"),
        (("12 cm", "15 cm"), "The answer is 15.", "B"),
        (("12", "15"), "\\boxed{15\\,\\mathrm{cm}}", "B"),
    ],
)
def test_an_option_with_a_unit_is_chosen_by_its_quantity(
    options: tuple[str, str], response: str, letter: str | None
) -> None:
    lettered = dict(zip("AB", options, strict=True))
    assert choose(response, lettered, lettered) == letter


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("1\\times10^2", 100.0),
        ("2.0 x 10^-3 m", 0.002),
        ("5 \\times 4 = 20", 20.0),
        *((x, None) for x in ("\\sqrt{16}", "√16", "2^{10}", "2²", "\\log 100", "x = 3, y = 4")),
        *((x, None) for x in ("\\frac{\\pi}{2}", "\\pi/2", "\\frac{\\sqrt{3}}{2}", "sin 30")),
        ("10 cm^2", 10.0),
        ("9.8 m/s²", 9.8),
        ("45^{\\circ}", 45.0),
    ],
)
def test_a_value_that_needs_arithmetic_is_no_number(answer: str, value: float | None) -> None:
    assert number(answer) == value


def test_number_needs_one_value() -> None:
    assert number("x = 2 + 3 = 5") == 5.0
    assert number("3 or 4") is None
    assert number("x ≈ 2.5 cm") == 2.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Area $=113.1 \\mathrm{~cm}^{2}$", ("113.1", "cm2")),
        ("10km / h", ("10", "km/h")),
        ("56.55 units $^{3}$", ("56.55", "units3")),
        ("$13 \\%$", ("13", "%")),
        ("N 34° W", ("N 34 W", "")),
        ("y=-2 x+5", ("y=-2 x+5", "")),
        ("even", ("even", "")),
    ],
)
def test_quantities(text: str, expected: tuple[str, str]) -> None:
    assert quantity(text) == expected


HOSTILE = [
    "answer is " * 10_000,
    "1 \\times 10^" * 8_000,
    "The answer is " + "because " * 12_000,
    "answer: " + "(" * 100_000,
    "A, " * 33_000,
    "A or " * 20_000,
    "(A" * 50_000,
    "\\boxed{" * 15_000,
    "<answer>" * 12_000,
    '"short answer": "' * 6_000,
    "<think></think>" * 6_600,
    " " * 100_000 + "C",
    "\n" * 50_000 + "answer" + "\n" * 50_000,
    "1," * 50_000,
    "1,234" * 20_000,
    "\\frac{1}{" * 11_000,
    "选" * 100_000,
    "A is " * 20_000,
    "a" * 100_000,
    "cat " * 25_000,
    "{" * 100_000,
    "Area " * 20_000 + "=",
    "cm^{2} " * 14_000,
    "~" * 100_000,
]


@pytest.mark.slow
@pytest.mark.parametrize("number_of_text", range(len(HOSTILE)))
def test_long_hostile_text_takes_linear_time(number_of_text: int) -> None:
    text = HOSTILE[number_of_text]
    options = {"A": "teddy bear", "B": "cat", "C": "a" * 50, "D": "1,234"}
    started = time.process_time()
    choose(text, "ABCD", options)
    choose_set(text, "ABCD")
    final_answer(text)
    numbers(text)
    quantity(text)
    assert time.process_time() - started < 4


def test_only_text_after_closed_thinking_counts() -> None:
    assert after_thinking("<think>A") is None
    assert after_thinking("<think>A</think> B ") == "B"
    assert after_thinking("A</think>B</think>C") == "C"


PIECES = st.sampled_from(
    [
        *(
            "A",
            "B",
            "C",
            "D",
            "E",
            "(C)",
            "C.",
            "\\boxed{C}",
            "\\boxed{",
            "}",
            "{",
            "$",
            "**",
            "\n",
        ),
        *("answer", " is ", ": ", " or ", " and ", "not ", "the ", "cat", "rabbit", "1,234", "3/4"),
        *(
            "<answer>",
            "</answer>",
            "答案",
            "选",
            "是",
            "Ｃ",
            "°",
            "\\frac{1}{2}",
            " cm",
            "=",
            "-",
            ".",
            " ",
        ),
    ]
)
TEXTS = st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=30).map("".join))
OPTIONS = {"A": "teddy bear", "B": "rabbit", "C": "cat", "D": "3/4"}


@given(TEXTS)
def test_any_text_gives_a_letter_of_the_question_or_none(text: str) -> None:
    assert choose(text, OPTIONS, OPTIONS) in {None, *OPTIONS}
    assert choose_set(text, "ABC") <= set("ABC")
    found = final_answer(text)
    assert found is None or isinstance(found, str)
    assert all(isfinite(x) for x in numbers(text))
    value, unit = quantity(text)
    assert isinstance(value, str)
    assert isinstance(unit, str)


@given(TEXTS, TEXTS)
def test_thinking_never_changes_the_answer(thinking: str, text: str) -> None:
    whole = f"<think>{thinking}</think>{text}"
    assert choose(whole, OPTIONS, OPTIONS) == choose(text, OPTIONS, OPTIONS)
    assert final_answer(whole) == final_answer(text)
    assert choose(f"<think>{thinking}{text}", OPTIONS, OPTIONS) is None


@given(TEXTS, st.sampled_from("ABCD"))
def test_a_final_box_decides(text: str, letter: str) -> None:
    text = text.replace("{", "").replace("}", "")
    assert choose(f"{text}\n\\boxed{{{letter}}}", OPTIONS, OPTIONS) == letter
