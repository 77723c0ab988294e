"""DynaMath: 501 questions in ten variants with other numbers and pictures."""

import re
from collections.abc import Sequence

from segcredit.benchmarks.answers import choose, final_answer, number
from segcredit.benchmarks.benchmark import Benchmark, ask
from segcredit.benchmarks.readers import KEY, BenchmarkRow, Layout
from segcredit.data import RowError
from segcredit.types import Prompt

VARIANTS = 10
TOLERANCE = 1e-3
"""Largest absolute error of a number, as in VLMEvalKit."""
_TRIAL = re.compile(r"trial([0-9]{1,3})")
_OPTION = re.compile(r"\(([A-H])\)\s*([^()]*)")
_FORMATS = {
    "float": "Give the answer as a decimal number with three digits after the point.",
    "multiple choice": "Answer with the letter of the correct option.",
    "text": "Write numbers in the answer with three digits after the point.",
}


class DynaMath(Benchmark):
    """Worst case: the share of questions that are right in all ten variants.

    The paper's column is the worst case, because all its numbers are multiples of 1/501.
    """

    name = "dynamath"
    title = "DynaMath"
    count = 5010
    layouts = (
        Layout("DynaMath.tsv", "VLMEvalKit"),
        Layout(
            "dynamath/trial*/dataset.json",
            "github.com/DynaMath/DynaMath, samples and result/10trials",
        ),
    )
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/dynamath.py: numbers within 0.001, letters, "
        "texts. Its prompt asks for JSON and its text rule accepts any part of the expected text; "
        "ours asks for a box and compares the whole text."
    )
    categories = ("subject", "level")

    def question(self, row: BenchmarkRow) -> Prompt:
        """Read a variant of a question; its number is in the path, or in the column varid."""
        kind = row.text("answer_type")
        if kind not in _FORMATS:
            raise RowError(f"expected the answer_type {', '.join(_FORMATS)}; got {kind!r:.40}")
        trial = _TRIAL.fullmatch(row.file.parent.name)
        variant = row.text("varid") if trial is None else trial[1]
        problem = row.text("qid", KEY)
        text = row.text("question")
        return ask(
            f"{problem}/{variant}",
            f"{text}\n{_FORMATS[kind]}",
            row.images("image", "image_path"),
            row.text("answer"),
            problem=problem,
            kind=kind,
            options={x: y.strip() for x, y in _OPTION.findall(text)},
            subject=row.text("subject"),
            level=row.text("level", "knowledge_level"),
        )

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the letter, or the text of the final answer."""
        options = question.columns["options"]
        if question.columns["kind"] == "multiple choice":
            return choose(text, options or "ABCDEFGH", options)
        return final_answer(text)

    def compare(self, answer: str, question: Prompt) -> bool | None:
        """Compare letters, numbers within 0.001, and other answers as text or mathematics."""
        gold = question.answer or ""
        if question.columns["kind"] == "multiple choice":
            return answer == gold
        if question.columns["kind"] == "float":
            value, wanted = number(answer), number(gold)
            if value is None or wanted is None:
                return None
            return abs(value - wanted) <= TOLERANCE + 1e-9
        return True if _plain(answer) == _plain(gold) else None

    def group(self, question: Prompt) -> str:
        """The variants of a question."""
        return str(question.columns["problem"])

    def incomplete(self, group: Sequence[Prompt]) -> str | None:
        """The worst case needs all variants."""
        return None if len(group) == VARIANTS else f"{VARIANTS} variants"

    def metrics(self, questions: Sequence[Prompt], right: Sequence[bool]) -> dict[str, list[float]]:
        """Score the worst case, then the average over all variants."""
        return {
            "worst case": [float(x) for x in self.all_right(questions, right).values()],
            "average": [float(x) for x in right],
            **self.by_category(questions, right),
        }


def _plain(text: str) -> str:
    return "".join(text.split()).casefold().rstrip(".")
