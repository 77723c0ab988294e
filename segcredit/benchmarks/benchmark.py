"""Benchmarks: where their questions come from, how answers are graded, and their scores."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from segcredit.benchmarks.answers import Verify, after_thinking
from segcredit.benchmarks.readers import BenchmarkData, BenchmarkRow, Layout
from segcredit.data import BadRow, BadRows, RowError
from segcredit.data.formats import MARK
from segcredit.evaluate import mean_interval
from segcredit.printable import printable
from segcredit.registry import Registry
from segcredit.rewards.extract import END_OF_THINKING
from segcredit.types import Prompt, Response

JUDGED = 20_000
"""Maximum number of characters, counted from the end, of a response that a judge reads."""


@dataclass(frozen=True)
class Grade:
    """The answer found in a response, and whether it is correct."""

    answer: str | None
    """None: no answer was found."""
    correct: bool
    reason: str
    graded: bool = True
    """False: the verifier timed out or crashed. Such a response counts as not correct."""


@dataclass(frozen=True)
class Score:
    """A metric in percent, with its 95 % confidence interval."""

    value: float
    low: float
    """NaN, as ``high``: the interval is not known."""
    high: float
    count: int
    """Number of questions, or of groups of questions, that it is the mean of."""


class Benchmark(ABC):
    """A set of questions. A subclass reads one row, extracts one answer, and compares it.

    The runner appends the instruction to think and to box the answer, samples the responses, and
    stores every graded answer.
    """

    name: ClassVar[str]
    """Name on the command line."""
    title: ClassVar[str]
    """Name in tables."""
    count: ClassVar[int | None]
    """Number of questions of the complete set; None: not known."""
    layouts: ClassVar[tuple[Layout, ...]]
    """Forms in which the data is published, the preferred one first."""
    origin: ClassVar[str]
    """Source of the prompt and of the scoring rules, with version, and where ours differ."""
    instruction: ClassVar[str | None] = None
    """Text appended to each question; None: the runner's, to think and to box the answer."""
    judged: ClassVar[bool] = True
    """Whether the original evaluation asks a judge model, so that ``--judge`` applies."""
    categories: ClassVar[tuple[str, ...]] = ()
    """Columns of the questions whose values get scores of their own; a list has several."""

    @abstractmethod
    def question(self, row: BenchmarkRow) -> Prompt | None:
        """Make the question of a row (see :func:`ask`); None if the row does not belong to the set.

        A RowError marks a bad row. The id must be unique and the same at every reading.
        """

    @abstractmethod
    def extract(self, text: str, question: Prompt) -> str | None:
        """Find the final answer in the text after the thinking; None if there is none."""

    def compare(self, answer: str, question: Prompt) -> bool | None:
        """Whether an extracted answer is correct; None if it must be compared as mathematics."""
        return None

    def group(self, question: Prompt) -> str:
        """Return the group of questions scored together; by default each question is a group."""
        return question.id

    def incomplete(self, group: Sequence[Prompt]) -> str | None:
        """Say which questions a group should have, if some are missing; None if it is complete."""
        return None

    def metrics(self, questions: Sequence[Prompt], right: Sequence[bool]) -> dict[str, list[float]]:
        """Compute each metric's terms in [0, 1], one per question or group; the main one first.

        The score is the mean of the terms. ``right`` is one verdict per question. All groups are
        complete.
        """
        return {"accuracy": [float(x) for x in right]} | self.by_category(questions, right)

    def by_category(
        self, questions: Sequence[Prompt], right: Sequence[bool]
    ) -> dict[str, list[float]]:
        """Collect the verdicts of each category, for ``metrics``."""
        found: dict[str, list[float]] = {}
        for column in self.categories:
            stored = [x.columns[column] for x in questions]
            values = [list(map(str, x)) if isinstance(x, list) else [str(x)] for x in stored]
            for value in sorted({value for each in values for value in each}):
                found[f"{column}: {value}"] = [
                    float(mark) for each, mark in zip(values, right, strict=True) if value in each
                ]
        return found

    def all_right(self, questions: Sequence[Prompt], right: Sequence[bool]) -> dict[str, bool]:
        """Return whether all questions of each group are right, for ``metrics``."""
        found: dict[str, bool] = {}
        for x, mark in zip(questions, right, strict=True):
            found[self.group(x)] = found.get(self.group(x), True) and mark
        return found

    def read(self, data: BenchmarkData) -> list[Prompt]:
        """Read all questions, group after group; report all bad rows in one error."""
        found: dict[str, Prompt] = {}
        bad = []
        for row in data.rows():
            try:
                question = self.question(row)
                if question is not None and question.id in found:
                    raise RowError(f"expected a unique id; got {question.id!r} a second time")
            except RowError as error:
                bad.append(BadRow(row.where, str(error)))
                continue
            if question is not None:
                found[question.id] = question
        if bad:
            raise BadRows(bad, f"Is this the data of {self.title}? {self.needs()}")
        if not found:
            raise ValueError(f"{data} has no questions of {self.title}. {self.needs()}")
        groups: dict[str, list[Prompt]] = {}
        for question in found.values():
            groups.setdefault(self.group(question), []).append(question)
        for name, group in groups.items():
            if wanted := self.incomplete(group):
                got = ", ".join(x.id for x in group)
                bad.append(BadRow(f"group {printable(name)}", f"expected {wanted}; got {got}"))
        if bad:
            raise BadRows(bad, f"Was the download of {self.title} complete?")
        return [question for group in groups.values() for question in group]

    def first(self, questions: Sequence[Prompt], limit: int | None) -> list[Prompt]:
        """Return the first ``limit`` questions, and the rest of the last question's group."""
        if limit is None or limit >= len(questions):
            return list(questions)
        last = self.group(questions[limit - 1])
        rest = [x for x in questions[limit:] if self.group(x) == last]
        return [*questions[:limit], *rest]

    def grade(self, responses: Sequence[Response], verify: Verify) -> list[Grade]:
        """Grade responses; return one Grade per response, in order."""
        answers = [self._answer(x) for x in responses]
        verdicts = [
            None if answer is None else self.compare(answer, x.prompt)
            for answer, x in zip(answers, responses, strict=True)
        ]
        hard = [
            (x.prompt.answer or "", answer)
            for answer, verdict, x in zip(answers, verdicts, responses, strict=True)
            if answer is not None and verdict is None
        ]
        verified = iter(verify(hard) if hard else ())
        grades = []
        for answer, verdict, x in zip(answers, verdicts, responses, strict=True):
            if answer is None:
                cut = f": truncated at {x.max_tokens} tokens" if x.truncated else ""
                grades.append(Grade(None, False, f"no answer found{cut}"))
            elif verdict is None:
                said = next(verified)
                grades.append(Grade(answer, bool(said.right), said.reason, said.right is not None))
            else:
                reason = "right" if verdict else f"wrong: expected {x.prompt.answer}"
                grades.append(Grade(answer, verdict, reason))
        return grades

    def judge_prompt(self, response: Response) -> str:
        """Write the request to a judge model if no answer was found; its reply is graded."""
        question = response.prompt.messages[-1]["content"].replace(MARK, "")
        answer = after_thinking(response.text) or ""
        return (
            f"Extract the final answer from a response to a question. Do not solve the question. "
            f"Reply with the answer alone, in \\boxed{{}}: the letter of the option for a "
            f"multiple-choice question, else a number or a short text. If the response gives no "
            f"answer, reply NONE.\n\nQuestion:\n{question}\n\nResponse:\n"
            f"{answer[-JUDGED:]}\n"
        )

    def _answer(self, response: Response) -> str | None:
        _, ended, text = response.text.rpartition(END_OF_THINKING)
        if not ended and "<think>" in text:
            return None  # still thinking: nothing in it is an answer
        return self.extract(text, response.prompt)

    def needs(self) -> str:
        """Say which files contain the data, for messages."""
        files = " or ".join(f"{x.files} ({x.origin})" for x in self.layouts)
        return f"It is read from {files}."


def ask(
    id: str,
    text: str,
    images: Iterable[bytes | Path],
    answer: str,
    **columns: Any,
) -> Prompt:
    """Make a question; the images come first unless ``<image>`` marks their places in the text."""
    if not text.strip():
        raise RowError("expected a question; got an empty text")
    if not answer.strip():
        raise RowError("expected an answer; got an empty text")
    pictures = tuple(images)
    marks = text.count(MARK)
    if marks not in (0, len(pictures)):
        raise RowError(f"expected one {MARK} per image; got {marks} and {len(pictures)} images")
    content = text if marks else MARK * len(pictures) + text
    return Prompt(id, ({"role": "user", "content": content},), pictures, answer, columns)


def with_instruction(question: Prompt, instruction: str) -> Prompt:
    """Append an instruction to the last message, on a line of its own."""
    if not instruction:
        return question
    *before, last = question.messages
    content = f"{last['content']}\n{instruction}"
    return replace(question, messages=(*before, {**last, "content": content}))


def score(
    benchmark: Benchmark, questions: Sequence[Prompt], right: Sequence[Sequence[bool]]
) -> dict[str, Score]:
    """Compute all metrics, the main one first.

    Args:
        right: For each sample (avg@k: k of them), one verdict per question. The terms of a metric
            are averaged over the samples; intervals are bootstrapped over questions or groups.
    """
    samples = [benchmark.metrics(questions, marks) for marks in right]
    scores = {}
    for name in samples[0]:
        terms = [sum(x) / len(samples) for x in zip(*(y[name] for y in samples), strict=True)]
        low, high = mean_interval(terms)
        mean = sum(terms) / len(terms)
        scores[name] = Score(100 * mean, 100 * low, 100 * high, len(terms))
    return scores


_SETS = "segcredit.benchmarks.sets"
BENCHMARKS: Registry[type[Benchmark]] = Registry(
    "benchmark",
    {
        "geo3k": f"{_SETS}.prepared:Geo3K",
        "logicvista": f"{_SETS}.logicvista:LogicVista",
        "mathverse": f"{_SETS}.mathverse:MathVerse",
        "wemath": f"{_SETS}.wemath:WeMath",
        "mathvista": f"{_SETS}.mathvista:MathVista",
        "dynamath": f"{_SETS}.dynamath:DynaMath",
        "scienceqa": f"{_SETS}.scienceqa:ScienceQA",
        "mmmu": f"{_SETS}.mmmu:MMMU",
        "mmbench": f"{_SETS}.mmbench:MMBench",
        "mmstar": f"{_SETS}.mmstar:MMStar",
        "gsm8k": f"{_SETS}.prepared:GSM8K",
        "math500": f"{_SETS}.prepared:MATH500",
    },
)
"""Benchmarks by name; write your own as ``file.py:Name``."""


def make_benchmark(name: str) -> Benchmark:
    """Make a benchmark from its name, or from ``file.py:Name``."""
    made = BENCHMARKS.make(name, {})
    if not isinstance(made, Benchmark):
        raise ValueError(
            f"benchmark {name!r} must be a subclass of segcredit.benchmarks.Benchmark; got a "
            f"{type(made).__name__}."
        )
    return made
