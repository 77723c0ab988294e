"""LogicVista: logical reasoning in diagrams, 447 multiple-choice questions."""

import re

from segcredit.benchmarks.benchmark import Benchmark, ask
from segcredit.benchmarks.readers import KEY, BenchmarkRow, Layout
from segcredit.rewards.extract import boxed
from segcredit.types import Prompt

_STATED = re.compile(r"answer\s*(?:is|:)\s*\**\(?([A-Z0-9](?:\s*(?:,|and)\s*[A-Z0-9])*)\b")


class LogicVista(Benchmark):
    """Correct if the letters of the answer are the expected ones, as a set."""

    name = "logicvista"
    title = "LogicVista"
    count = 447
    layouts = (
        Layout("LogicVista.tsv", "VLMEvalKit"),
        Layout("logicvista/data/dataset.json", "github.com/Yijia-Xiao/LogicVista"),
    )
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/utils/logicvista.py: the question alone as "
        "prompt, letters compared as sorted lists. There a judge model extracts the letters."
    )
    categories = ("skill",)

    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Read a row; v1_382 has no question, so VLMEvalKit leaves it out, too."""
        if row.get("question") is None and row.get("answer") is None:
            return None
        images = row.images("image", "image_path", "imagename", folder="images")
        skill = row.get("skill")
        return ask(
            row.text(KEY, "index"),
            row.text("question"),
            images,
            row.text("answer"),
            skill=skill[0] if isinstance(skill, list) and skill else str(skill),
        )

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the letters in the box, else those after "answer is"."""
        found = boxed(text)
        if found is None and (stated := _STATED.findall(text)):
            found = stated[-1]
        return found

    def compare(self, answer: str, question: Prompt) -> bool:
        """Compare the letters as sets."""
        return _letters(answer) == _letters(question.answer or "")


def _letters(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Z0-9]", text))
