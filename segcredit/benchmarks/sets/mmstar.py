"""MMStar: 1,500 questions that cannot be answered without their image."""

import string

from segcredit.benchmarks.multiple_choice import MultipleChoice
from segcredit.benchmarks.readers import BenchmarkRow, Layout
from segcredit.data import RowError
from segcredit.printable import shown
from segcredit.types import Prompt


class MMStar(MultipleChoice):
    """An answer is correct if its letter is the expected one."""

    name = "mmstar"
    title = "MMStar"
    count = 1500
    layouts = (
        Layout("MMStar.tsv", "VLMEvalKit"),
        Layout("MMStar/mmstar.parquet", "Lin-Chen/MMStar on the Hub", hub="Lin-Chen/MMStar"),
    )
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/image_mcq.py: ImageMCQDataset's prompt; "
        "can_infer, then a judge model, gives the letter."
    )
    categories = ("category", "l2-category")

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read a row; the Hub's table has the options in the question, after "Options:"."""
        if row.get("A") is not None:
            return super().question(row)
        text, _, listed = row.text("question").rpartition("Options:")
        options = inline_options(listed)
        if not text or len(options) < 2:
            raise RowError(
                "expected the columns A and B, or options after 'Options:' in the question; got "
                f"{shown(row.text('question'))}"
            )
        return self.make(row, row.text("index"), text.strip(), options, row.text("answer"))


def inline_options(text: str) -> dict[str, str]:
    """Split ``A: red, B: blue, C: green`` at the letters, which must be in order."""
    starts: list[tuple[str, int, int]] = []
    at = 0
    for letter in string.ascii_uppercase:
        mark = f"{letter}:" if not starts else f", {letter}:"
        at = text.find(mark, at)
        if at < 0:
            break
        starts.append((letter, at, at + len(mark)))
        at += len(mark)
    ends = [*(start for _, start, _ in starts), len(text)][1:]
    return {
        letter: text[begin:end].strip()
        for (letter, _, begin), end in zip(starts, ends, strict=True)
    }
