"""MMBench V1.1 dev: each question is asked once per rotation of its options."""

from collections.abc import Sequence

from segcredit.benchmarks.multiple_choice import MultipleChoice
from segcredit.benchmarks.readers import BenchmarkRow, Layout
from segcredit.data import RowError
from segcredit.types import Prompt

ROTATION = 1_000_000
"""VLMEvalKit: row k · 1,000,000 + i is the k-th rotation of the options of question i."""


class MMBench(MultipleChoice):
    """Circular evaluation: a question is right if all rotations of its options are right."""

    name = "mmbench"
    title = "MMBench V1.1"
    count = None
    layouts = (Layout("MMBench_DEV_EN_V11.tsv", "VLMEvalKit"),)
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/image_mcq.py and mcq_circular_eval: "
        "ImageMCQDataset's prompt with the hint; can_infer, then a judge model, gives the letter."
    )
    categories = ("l2-category", "category")

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read one rotation of a question."""
        try:
            int(row.text("index"))
        except ValueError:
            raise RowError(
                f"expected a number under 'index'; got {row.text('index')!r:.40}"
            ) from None
        return super().question(row)

    def group(self, question: Prompt) -> str:
        """The rotations of a question."""
        return str(int(question.id) % ROTATION)

    def incomplete(self, group: Sequence[Prompt]) -> str | None:
        """A question needs one rotation per option, or it would be easier than the others."""
        wanted = len(group[0].columns["options"])
        return None if len(group) == wanted else f"{wanted} rotations of the options"

    def metrics(self, questions: Sequence[Prompt], right: Sequence[bool]) -> dict[str, list[float]]:
        """Score questions by circular evaluation, then rows one by one (vanilla accuracy)."""
        whole = self.all_right(questions, right)
        first = {self.group(x): x for x in reversed(questions)}
        return {
            "circular accuracy": [float(x) for x in whole.values()],
            "vanilla accuracy": [float(x) for x in right],
            **self.by_category([first[group] for group in whole], list(whole.values())),
        }
