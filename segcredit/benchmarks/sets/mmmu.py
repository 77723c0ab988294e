"""MMMU validation: 900 questions of 30 subjects, with up to seven images each."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from segcredit.benchmarks.answers import Verify, final_answer, last_sentence, verify_quantities
from segcredit.benchmarks.benchmark import Grade, ask
from segcredit.benchmarks.multiple_choice import (
    MultipleChoice,
    check_letter,
    choice_prompt,
    letter_columns,
    lettered,
)
from segcredit.benchmarks.readers import BenchmarkRow, Layout, literal
from segcredit.data import RowError
from segcredit.data.formats import MARK
from segcredit.printable import shown
from segcredit.rewards.verify import Verdict
from segcredit.types import Prompt, Response

_IMAGE = re.compile(r"<image ([0-9]{1,2})>")
_ID = re.compile(r"[a-z]+_(.+)_[0-9]+")


class MMMU(MultipleChoice):
    """MMMU validation: letters, and free answers to the open questions."""

    name = "mmmu"
    title = "MMMU"
    count = 900
    layouts = (
        Layout("MMMU_DEV_VAL.tsv", "VLMEvalKit"),
        Layout("MMMU/data/validation-*.parquet", "lmms-lab/MMMU on the Hub", hub="lmms-lab/MMMU"),
    )
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/image_mcq.py: ImageMCQDataset's prompt with the "
        "images at their marks; can_infer, then a judge model, gives the letter. There an open "
        "question becomes a choice between its answer and 'Other Answers'; ours compares the "
        "answer itself."
    )
    categories = ("category", "l2-category")

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read a row of the table, which also has the dev split, or of the Hub's."""
        if row.get("split") not in (None, "validation"):
            return None
        id = row.text("id", "index")
        answer = row.text("answer")
        if row.get("options") is None:
            options = letter_columns(row)
        else:
            choices = row.content["options"]
            options = lettered(choices) if choices not in ("[]", []) else {}
        if options:
            check_letter(answer, options)
        prompt = choice_prompt(row.text("question"), options, row.optional("hint"))
        text, images = place_images(prompt, self._images(row))
        subject = row.optional("category")
        found = _ID.fullmatch(id)
        return ask(
            id,
            text,
            images,
            answer,
            options=options,
            category=subject or (found.group(1) if found else "none"),
            **{"l2-category": row.optional("l2-category", "subfield") or "none"},
        )

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the letter, or the final answer to an open question."""
        if question.columns["options"]:
            return super().extract(text, question)
        return final_answer(text) or last_sentence(text) or None

    def compare(self, answer: str, question: Prompt) -> bool | None:
        """Compare the letter; an open question may have several correct answers."""
        if question.columns["options"]:
            return answer == question.answer
        return None

    def grade(self, responses: Sequence[Response], verify: Verify) -> list[Grade]:
        """Compare open answers with units; any of the expected answers is right."""
        return super().grade(responses, partial(_verify_any, verify=verify))

    def _images(self, row: BenchmarkRow) -> tuple[bytes | Path, ...]:
        if row.get("image_1") is None:
            return row.images("image", "image_path")
        columns = [f"image_{i}" for i in range(1, 8)]
        return tuple(x for name in columns if row.get(name) is not None for x in row.images(name))


def place_images(text: str, images: Sequence[bytes | Path]) -> tuple[str, tuple[bytes | Path, ...]]:
    """Put each image where the text says ``<image 2>``; without such marks, all come first."""
    numbers = [int(x) for x in _IMAGE.findall(text)]
    if not numbers:
        return text, tuple(images)
    if not all(1 <= x <= len(images) for x in numbers):
        raise RowError(f"expected an image for each of {shown(numbers)}; got {len(images)} images")
    return _IMAGE.sub(MARK, text), tuple(images[x - 1] for x in numbers)


def _verify_any(pairs: Sequence[tuple[str, str]], verify: Verify) -> list[Verdict]:
    """Compare each answer with every expected one, such as ``['24/7', '3.429']``."""
    expected = [expected_answers(gold) for gold, _ in pairs]
    flat = [
        (gold, answer) for golds, (_, answer) in zip(expected, pairs, strict=True) for gold in golds
    ]
    verdicts = iter(verify_quantities(flat, verify))
    groups = [[next(verdicts) for _ in golds] for golds in expected]
    return [next((x for x in group if x.right), group[0]) for group in groups]


def expected_answers(gold: str) -> list[str]:
    """Return the expected answers of an open question, which may be a list in Python's notation."""
    try:
        found = literal(gold)
    except RowError:  # a text, or an interval
        return [gold]
    return [str(x) for x in found] if isinstance(found, list) and found else [gold]
