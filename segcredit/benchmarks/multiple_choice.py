"""Questions with options in VLMEvalKit's tables: columns, prompt and grading."""

import string
from collections.abc import Mapping
from typing import Any

from segcredit.benchmarks.answers import choose
from segcredit.benchmarks.benchmark import Benchmark, ask
from segcredit.benchmarks.readers import BenchmarkRow, literal
from segcredit.data import RowError
from segcredit.printable import shown
from segcredit.types import Prompt


class MultipleChoice(Benchmark):
    """Questions with one correct option; an answer is correct if its letter is the expected one.

    The table has the columns index, question, A, B, …, answer and image, and may have hint,
    category and l2-category. The prompt is that of VLMEvalKit's ``ImageMCQDataset``.
    """

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read one row of the table."""
        options = letter_columns(row)
        return self.make(row, row.text("index"), row.text("question"), options, row.text("answer"))

    def make(
        self,
        row: BenchmarkRow,
        id: str,
        question: str,
        options: Mapping[str, str],
        answer: str,
        **columns: Any,
    ) -> Prompt:
        """Make the question from its parts; the images are those of the column ``image``."""
        check_letter(answer, options)
        text = choice_prompt(question, options, row.optional("hint"))
        known = {
            name: row.optional(name, name.replace("-", "_")) or "none" for name in self.categories
        }
        images = row.images("image", "image_path")
        return ask(id, text, images, answer, options=dict(options), **{**known, **columns})

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the letter of the chosen option."""
        options = question.columns["options"]
        return choose(text, options, options)

    def compare(self, answer: str, question: Prompt) -> bool | None:
        """Compare the letter."""
        return answer == question.answer


def choice_prompt(question: str, options: Mapping[str, str], hint: str | None = None) -> str:
    """Write a question with its options as VLMEvalKit's ``ImageMCQDataset.build_prompt`` does."""
    lines = [f"Hint: {hint}"] if hint else []
    lines.append(f"Question: {question}")
    if options:
        lines.append("Options:")
        lines += [f"{letter}. {text}" for letter, text in options.items()]
        lines.append("Please select the correct answer from the options above.")
    return "\n".join(lines)


def check_letter(answer: str, options: Mapping[str, str]) -> None:
    """Raise RowError unless the expected answer is the letter of an option."""
    if answer not in options:
        raise RowError(
            f"expected an answer among {', '.join(options) or 'A, B, …'}; got {shown(answer)}"
        )


def letter_columns(row: BenchmarkRow) -> dict[str, str]:
    """Return the options of a table with one column per letter."""
    found = {letter: row.optional(letter) for letter in string.ascii_uppercase}
    return {letter: text for letter, text in found.items() if text is not None}


def lettered(choices: object) -> dict[str, str]:
    """Return lettered options from a list of texts, which a table may store as a string."""
    if isinstance(choices, str):
        choices = literal(choices)
    if not isinstance(choices, list | tuple) or not 0 < len(choices) <= len(string.ascii_uppercase):
        raise RowError(f"expected a list of options; got {shown(choices)}")
    return dict(zip(string.ascii_uppercase, map(str, choices), strict=False))
