"""ScienceQA test: 2,017 questions of school science that have an image."""

import string

from segcredit.benchmarks.multiple_choice import MultipleChoice, lettered
from segcredit.benchmarks.readers import BenchmarkRow, Layout
from segcredit.data import RowError
from segcredit.printable import shown
from segcredit.types import Prompt


class ScienceQA(MultipleChoice):
    """Questions with an image; an answer is correct if its letter is the expected one."""

    name = "scienceqa"
    title = "ScienceQA"
    count = 2017
    layouts = (
        Layout("ScienceQA_TEST.tsv", "VLMEvalKit"),
        Layout(
            "ScienceQA/data/test-*.parquet",
            "derek-thomas/ScienceQA on the Hub",
            hub="derek-thomas/ScienceQA",
        ),
    )
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/image_mcq.py: ImageMCQDataset's prompt with the "
        "hint; can_infer, then a judge model, gives the letter."
    )
    categories = ("subject", "category")

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read a row; the Hub's table has a list of choices and the position of the answer."""
        if row.get("image") is None:
            return None  # a question without an image
        if row.get("choices") is None:
            return super().question(row)
        options = lettered(row.content["choices"])
        position = row.get("answer")
        if not isinstance(position, int) or not 0 <= position < len(options):
            raise RowError(f"expected the position of the answer; got {shown(position)}")
        letter = string.ascii_uppercase[position]
        return self.make(row, str(row.raw.number), row.text("question"), options, letter)
