"""MathVista testmini: 1,000 questions whose answers are options, numbers or lists."""

from collections.abc import Mapping

from segcredit.benchmarks.answers import choose, final_answer, last_sentence, number, numbers
from segcredit.benchmarks.benchmark import Benchmark, ask
from segcredit.benchmarks.multiple_choice import lettered
from segcredit.benchmarks.readers import KEY, BenchmarkRow, Layout, literal
from segcredit.data import RowError
from segcredit.printable import shown
from segcredit.types import Prompt

_HINTS = {
    "multi_choice": "Please answer the question and provide the correct option letter, e.g., "
    "A, B, C, D, at the end.",
    "integer": "Please answer the question requiring an integer answer and provide the final "
    "value, e.g., 1, 2, 3, at the end.",
    "float 1": "Please answer the question requiring a floating-point number with one decimal "
    "place and provide the final value, e.g., 1.2, 1.3, 1.4, at the end.",
    "float 2": "Please answer the question requiring a floating-point number with two decimal "
    "places and provide the final value, e.g., 1.23, 1.34, 1.45, at the end.",
    "list": "Please answer the question requiring a Python list as an answer and provide the "
    "final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4], at the end.",
}


class MathVista(Benchmark):
    """An answer is correct if its option, integer, rounded number or list is the expected one."""

    name = "mathvista"
    title = "MathVista"
    count = 1000
    layouts = (
        Layout("MathVista_MINI.tsv", "VLMEvalKit"),
        Layout(
            "MathVista/data/testmini-*.parquet",
            "AI4Math/MathVista on the Hub",
            hub="AI4Math/MathVista",
        ),
    )
    origin = (
        "lupantech/MathVista@53d5258: the prompts of query.json, and numbers rounded to the "
        "question's precision. There a judge model extracts the answer, and an integer is "
        "truncated, so that 14.7 counts as 14; here it must be whole, as in VLMEvalKit (ms-vlmeval "
        "0.0.20, dataset/utils/mathvista.py), which does not round."
    )
    categories = ("task", "skill")

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read a row of VLMEvalKit's table, whose question is the whole prompt, or of the Hub's."""
        kind, type_ = row.text("question_type"), row.text("answer_type")
        answer = row.text("answer")
        choices = row.get("choices")
        options = lettered(choices) if kind == "multi_choice" else {}
        if options and answer not in [text.strip() for text in options.values()]:
            raise RowError(f"expected an answer among the choices; got {shown(answer)}")
        if kind != "multi_choice" and type_ not in ("integer", "float", "list"):
            raise RowError(f"expected the answer_type integer, float or list; got {shown(type_)}")
        if kind != "multi_choice" and len(numbers(answer)) != 1 and type_ != "list":
            raise RowError(f"expected one number as answer; got {shown(answer)}")
        decimals = _decimals(row, answer)
        metadata = row.get("metadata")
        known = metadata if isinstance(metadata, Mapping) else row.content
        unit = row.optional("unit")
        prompt = row.optional("query") or row.text("question")
        if not prompt.startswith("Hint:"):
            asked = str(row.content["question"])  # with its spaces, which are part of the prompt
            prompt = official_prompt(asked, kind, type_, decimals, unit, options)
        return ask(
            row.text("pid", "index", KEY),
            prompt,
            row.images("decoded_image", "image", "image_path"),
            answer,
            options=options,
            kind="choice" if options else type_,
            precision=decimals,
            task=str(known.get("task") or "none"),
            skill=_list(known.get("skills")),
            source=str(known.get("source") or ""),
        )

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the letter, or the final answer."""
        options = question.columns["options"]
        if options:
            return choose(text, options, options)
        return final_answer(text) or last_sentence(text) or None

    def compare(self, answer: str, question: Prompt) -> bool:
        """Compare by the answer type; options with the same text are the same answer."""
        return _COMPARE[question.columns["kind"]](answer, question)


def official_prompt(
    question: str,
    kind: str,
    answer_type: str,
    precision: int,
    unit: str | None,
    options: Mapping[str, str],
) -> str:
    """Write the prompt as in MathVista's query.json."""
    key = kind if kind == "multi_choice" else answer_type
    if key == "float":
        key = f"float {precision}"
    if key not in _HINTS:
        raise RowError(f"expected a precision of 1 or 2; got {precision}")
    lines = [f"Hint: {_HINTS[key]}", f"Question: {question}"]
    if unit:
        lines[-1] += f" (Unit: {unit})"
    if options:
        lines += ["Choices:", *(f"({letter}) {text}" for letter, text in options.items())]
    return "\n".join(lines).strip()


def _decimals(row: BenchmarkRow, answer: str) -> int:
    """Return the number of decimals: the given precision, or that of the expected answer."""
    given = row.optional("precision")
    if given is None:
        return len(answer.partition(".")[2])
    if given not in ("1", "1.0", "2", "2.0"):
        raise RowError(f"expected a precision of 1 or 2; got {shown(given)}")
    return int(given[0])


def _same_option(answer: str, question: Prompt) -> bool:
    options = question.columns["options"]
    return bool(options[answer].strip() == question.answer)


def _same_integer(answer: str, question: Prompt) -> bool:
    value = number(answer)
    return value is not None and value == number(question.answer or "")


def _same_float(answer: str, question: Prompt) -> bool:
    value, expected = number(answer), number(question.answer or "")
    if value is None or expected is None:
        return False
    digits = question.columns["precision"]
    return round(value, digits) == round(expected, digits)


def _same_list(answer: str, question: Prompt) -> bool:
    expected = numbers(question.answer or "")
    return bool(expected) and numbers(answer) == expected


_COMPARE = {
    "choice": _same_option,
    "integer": _same_integer,
    "float": _same_float,
    "list": _same_list,
}


def _list(value: object) -> list[str]:
    """Read the skills, a list that a table may store as a string."""
    if isinstance(value, str):
        value = literal(value) if value.startswith("[") else [value]
    return [str(x) for x in value] if isinstance(value, list | tuple) else []
