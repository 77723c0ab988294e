"""LogicVista: logical reasoning in diagrams, 447 multiple-choice questions."""

from segcredit.benchmarks.answers import choose_set
from segcredit.benchmarks.benchmark import Benchmark, ask
from segcredit.benchmarks.readers import KEY, BenchmarkRow, Layout
from segcredit.types import Prompt


class LogicVista(Benchmark):
    """An answer is correct if its set of letters is the expected one."""

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
        """Read a row; v1_382 has no question and is left out, as in VLMEvalKit."""
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
        """Return all chosen letters; v1_20 numbers its options."""
        numbered = (question.answer or "").isdigit()
        found = choose_set(text, "123456789" if numbered else "ABCDEFGH")
        return ", ".join(sorted(found)) or None

    def compare(self, answer: str, question: Prompt) -> bool:
        """Compare the letters as sets."""
        return set(answer.split(", ")) == set((question.answer or "").split(", "))
