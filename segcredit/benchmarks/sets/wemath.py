"""We-Math: 525 problems of two or three steps, each step also asked as a question of its own."""

import re
from collections.abc import Sequence

from segcredit.benchmarks.benchmark import ask
from segcredit.benchmarks.multiple_choice import MultipleChoice, check_letter, letter_columns
from segcredit.benchmarks.readers import BenchmarkRow, Layout
from segcredit.data import RowError
from segcredit.types import Prompt

_OPTION = re.compile(r"(?<![A-Za-z0-9])([A-H])[.．]\s*(?=[^;\s])")
_KEY = re.compile(r"([23])steps_([123]|multi)")


class WeMath(MultipleChoice):
    """Score (strict): a problem counts 1 if it and all its steps are right.

    It counts ½ if all its steps are right but the problem itself is wrong.
    """

    name = "wemath"
    title = "WeMath"
    count = 1740
    layouts = (
        Layout("WeMath.tsv", "VLMEvalKit"),
        Layout("wemath/data/testmini.json", "github.com/We-Math/We-Math"),
    )
    origin = (
        "VLMEvalKit (ms-vlmeval 0.0.20), dataset/utils/wemath.py: Score (Strict) and Score "
        "(Loose). There a judge model, or the first letter after 'Answer', gives the letter."
    )

    def question(self, row: BenchmarkRow) -> Prompt:
        """Read a row of testmini; the TSV has one column per option, the JSON one text."""
        key = row.text("key")
        found = _KEY.fullmatch(key)
        if found is None:
            raise RowError(f"expected a key such as 2steps_1 or 3steps_multi; got {key!r:.40}")
        one_text = row.get("option") is not None
        options = split_options(row.text("option")) if one_text else letter_columns(row)
        answer = row.text("answer")
        check_letter(answer, options)
        listed = "\n".join(f"{letter}. {text}" for letter, text in options.items())
        problem = row.text("ID", "id")
        return ask(
            f"{problem}/{found[2]}",
            f"Question: {row.text('question')}\nOptions:\n{listed}",
            row.images("image", "image_path"),
            answer,
            options=options,
            problem=problem,
            part=found[2],
            steps=int(found[1]),
        )

    def group(self, question: Prompt) -> str:
        """A problem and its steps."""
        return str(question.columns["problem"])

    def metrics(self, questions: Sequence[Prompt], right: Sequence[bool]) -> dict[str, list[float]]:
        """Score problems by complete mastery, generalization, knowledge and rote memorization."""
        problems: dict[str, dict[str, bool]] = {}
        for x, mark in zip(questions, right, strict=True):
            problems.setdefault(self.group(x), {})[x.columns["part"]] = mark
        found: dict[str, list[float]] = {name: [] for name in (STRICT, LOOSE, *_KINDS)}
        for parts in problems.values():
            solved = parts["multi"]
            steps = [mark for part, mark in parts.items() if part != "multi"]
            mastered, general = solved and all(steps), all(steps) and not solved
            half = 0.5 * general
            values = {
                STRICT: mastered + half,
                LOOSE: (solved and any(steps)) + half,
                "insufficient knowledge (IK)": not solved and not all(steps),
                "inadequate generalization (IG)": general,
                "complete mastery (CM)": mastered,
                "rote memorization (RM)": solved and not all(steps),
                "complete mastery, loose": solved and any(steps),
                "rote memorization, loose": solved and not any(steps),
            }
            for name, value in values.items():
                found[name].append(float(value))
        marks = list(zip(questions, right, strict=True))
        for name, wanted in _STEPS.items():
            chosen = [float(mark) for x, mark in marks if _step(x) == wanted]
            if chosen:
                found[name] = chosen
        return found

    def incomplete(self, group: Sequence[Prompt]) -> str | None:
        """A problem needs all its steps."""
        parts = {x.columns["part"] for x in group}
        wanted = {"multi", *map(str, range(1, group[0].columns["steps"] + 1))}
        return None if parts == wanted else f"the parts {', '.join(sorted(wanted))}"


STRICT, LOOSE = "score (strict)", "score (loose)"
_KINDS = (
    "insufficient knowledge (IK)",
    "inadequate generalization (IG)",
    "complete mastery (CM)",
    "rote memorization (RM)",
    "complete mastery, loose",
    "rote memorization, loose",
)
"""Shares of the problems. VLMEvalKit's rote memorization rate is RM / (RM + CM)."""
_STEPS = {"one-step (S1)": 1, "two-step (S2)": 2, "three-step (S3)": 3}
"""Accuracies by number of steps; a step asked by itself has one."""


def _step(question: Prompt) -> int:
    return question.columns["steps"] if question.columns["part"] == "multi" else 1


def split_options(text: str) -> dict[str, str]:
    """Split "A. 300; B. 400; E. No correct answer" into options.

    Some texts name points ("to get Shape ;C.;"), so a letter begins an option only if a text
    follows and the letter is later in the alphabet than the previous option.
    """
    found: list[re.Match[str]] = []
    for match in _OPTION.finditer(text):
        if not found or match[1] > found[-1][1]:
            found.append(match)
    if len(found) < 2 or found[0][1] != "A":
        raise RowError(f"expected options such as 'A. 3; B. 4'; got {text!r:.80}")
    ends = [*(x.start() for x in found[1:]), len(text)]
    return {
        x[1]: text[x.end() : end].strip().rstrip(";").strip()
        for x, end in zip(found, ends, strict=True)
    }
