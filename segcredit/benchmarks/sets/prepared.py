"""Geometry3K, GSM8K and MATH500 as ``segcredit prepare`` writes them, graded by their rewards."""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from segcredit.benchmarks.answers import Verify
from segcredit.benchmarks.benchmark import Benchmark, Grade
from segcredit.benchmarks.readers import BenchmarkData, BenchmarkRow, Layout
from segcredit.data import load_prompts
from segcredit.data.prepare import KNOWN, DataSet
from segcredit.rewards import make_reward
from segcredit.rewards.extract import boxed, hash_answer, last_box
from segcredit.types import Prompt, Response, RewardFn


class Prepared(Benchmark):
    """A prepared test file; each question already ends with its instruction."""

    instruction = ""
    judged = False
    dataset: ClassVar[DataSet]

    def read(self, data: BenchmarkData) -> list[Prompt]:
        """Read the rows as ``segcredit evaluate`` does."""
        own = data.files[0].suffix == ".parquet"
        return load_prompts(
            list(data.files), suffix=None if own else self.dataset.suffix, one_answer=True
        ).prompts

    def question(self, row: BenchmarkRow) -> Prompt:
        """Not used: ``read`` reads whole files."""
        raise NotImplementedError(f"{type(self).__name__} reads whole files: call read")

    @cached_property
    def _reward(self) -> RewardFn:
        assert self.dataset.reward is not None
        return make_reward(self.dataset.reward)

    def grade(self, responses: Sequence[Response], verify: Verify) -> list[Grade]:
        """Grade with the dataset's reward, whose accuracy part decides."""
        rewards = self._reward(responses)
        return [
            Grade(self.extract(x.text, x.prompt), bool(y.correct), y.reason, y.verdict)
            for x, y in zip(responses, rewards, strict=True)
        ]


class Geo3K(Prepared):
    """Geometry3K test: the last box, compared by MathRuler's rules as in verl."""

    name = "geo3k"
    title = "Geo3K"
    count = 601
    dataset = KNOWN["geo3k"]
    layouts = (Layout("geo3k/test.parquet", "segcredit prepare geo3k"),)
    origin = "verl's geo3k reward: last \\boxed{} of the whole response, MathRuler's comparison."

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the last box."""
        return last_box(text)


class GSM8K(Prepared):
    """GSM8K test: the number after ####."""

    name = "gsm8k"
    title = "GSM8K"
    count = 1319
    dataset = KNOWN["gsm8k"]
    layouts = (
        Layout("gsm8k/test.parquet", "segcredit prepare gsm8k"),
        Layout("gsm8k/test.jsonl", "github.com/openai/grade-school-math"),
    )
    origin = "verl's gsm8k reward: the number after the last ####."

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the number after the last ####."""
        return hash_answer(text)


class MATH500(Prepared):
    """MATH500: the boxed answer, compared by math-verify."""

    name = "math500"
    title = "MATH500"
    count = 500
    dataset = KNOWN["math"]
    layouts = (
        Layout("math/test.parquet", "segcredit prepare math --from MATH-500"),
        Layout("math500/test.jsonl", "HuggingFaceH4/MATH-500 on the Hub"),
    )
    origin = "The last \\boxed{} after the thinking, compared by math-verify."

    def extract(self, text: str, question: Prompt) -> str | None:
        """Return the last box."""
        return boxed(text)
