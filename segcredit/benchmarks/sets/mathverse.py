"""MathVerse testmini, vision-only: 788 problems whose text is in the image."""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from segcredit.benchmarks.answers import Verify, choose_set, final_answer, verify_quantities
from segcredit.benchmarks.benchmark import Benchmark, Grade, ask
from segcredit.benchmarks.readers import BenchmarkRow, Layout, literal
from segcredit.data import RowError
from segcredit.printable import shown
from segcredit.types import Prompt, Response

VERSION = "Vision Only"
_CHOICES = re.compile(r"\nChoices?:\s{0,4}\n")
_OPTION = re.compile(r"^[ \t]{0,4}([A-H])[ ]?[:.][ \t]{0,4}(.{0,2000})$", re.MULTILINE)


class MathVerse(Benchmark):
    """An answer is correct if it has the expected letters or is mathematically equal."""

    name = "mathverse"
    title = "MathVerse"
    count = 788
    layouts = (
        Layout("MathVerse_MINI_Vision_Only.tsv", "VLMEvalKit"),
        Layout("MathVerse_MINIVOnly.tsv", "VLMEvalKit"),
        Layout(
            "MathVerse/testmini.parquet", "AI4Math/MathVerse on the Hub", hub="AI4Math/MathVerse"
        ),
    )
    origin = (
        "ZrrSkywalker/MathVerse@937b090 and VLMEvalKit (ms-vlmeval 0.0.20), dataset/utils/"
        "mathverse.py: the prompt query_cot. There a judge model extracts the answer, and another "
        "call compares it."
    )
    categories = ("subject", "subfield")

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read a problem; the Hub's table has five other versions of each, which are left out."""
        if row.text("problem_version") != VERSION:
            return None
        kind = row.text("question_type")
        if kind not in ("multi-choice", "free-form"):
            raise RowError(
                f"expected the question_type multi-choice or free-form; got {shown(kind)}"
            )
        problem = row.optional("question_for_eval", "question") or ""
        options = options_in(problem) if kind == "multi-choice" else {}
        metadata = row.get("metadata")
        if isinstance(metadata, str):
            metadata = literal(metadata)
        known = metadata if isinstance(metadata, Mapping) else row.content
        answer = row.text("answer")
        return ask(
            row.text("problem_index", "sample_index", "index"),
            row.text("query_cot", "question"),
            row.images("image", "image_path"),
            answer,
            options=options,
            letters=expected_letters(answer, options) if kind == "multi-choice" else "",
            subject=str(known.get("subject") or "none"),
            subfield=str(known.get("subfield") or "none"),
            source=str(known.get("source") or ""),
        )

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the letters of a choice, or the final answer."""
        if not question.columns["letters"]:
            return final_answer(text)
        options = question.columns["options"]
        single = len(question.columns["letters"]) == 1
        found = choose_set(text, options or "ABCDEFGH", options, single=single)
        return "".join(sorted(found)) or None

    def compare(self, answer: str, question: Prompt) -> bool | None:
        """Compare letters as sets; a free answer is compared as mathematics."""
        expected = question.columns["letters"]
        return answer == expected if expected else None

    def grade(self, responses: Sequence[Response], verify: Verify) -> list[Grade]:
        """Compare free answers as quantities with units."""
        return super().grade(responses, partial(verify_quantities, verify=verify))


def options_in(problem: str) -> dict[str, str]:
    """Return the options that follow "Choices:", one per line: ``A:40°`` or ``A. 40°``."""
    *_, listed = _CHOICES.split("\n" + problem)
    return {letter: text.strip() for letter, text in _OPTION.findall(listed)}


def expected_letters(answer: str, options: Mapping[str, str]) -> str:
    """Return the expected letters in order; the answer is ``C``, ``(C)``, two lines, or a text."""
    if re.fullmatch(r"\(?[A-H]\)?(?:[\s,]{1,3}\(?[A-H]\)?){0,7}", answer):
        return "".join(sorted(set(re.findall(r"[A-H]", answer))))
    same = [letter for letter, text in options.items() if text == answer]
    if len(same) != 1:
        raise RowError(
            f"expected a letter, or the text of one option, as answer; got {shown(answer)}"
        )
    return same[0]
