"""Rewards for mathematical answers, graded in processes that can be killed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from segcredit.rewards.checks import (
    require_count,
    require_extract,
    require_seconds,
    require_weight,
)
from segcredit.rewards.extract import (
    READERS,
    ExactReward,
    format_ok,
    gold_answer,
    last_box,
    no_answer,
    verl_format_ok,
)
from segcredit.rewards.mathruler import MathRuler
from segcredit.rewards.verify import Verdict, Verifier
from segcredit.types import Response, Reward


def authors_length_penalty(num_tokens: int, max_tokens: int) -> float:
    """Penalty of .001 per token beyond 90 % of the limit, plus .3 at the limit; at most .5.

    ``reward_manager/naive.py:95-105`` of the authors' release; the paper has no such term.
    """
    over = max(0.0, num_tokens - 0.9 * max_tokens)
    at_limit = 0.3 if num_tokens >= max_tokens - 1 else 0.0
    return min(0.5, 0.001 * over + at_limit)


def soft_length_penalty(num_tokens: int, max_tokens: int) -> float:
    """Penalty that grows from 0 at 80 % of the limit to 1 at the limit (DAPO, Eq. 13).

    In the paper the limit is 20,480 tokens and the interval 4,096.
    """
    interval = 0.2 * max_tokens
    return min(1.0, max(0.0, (num_tokens - (max_tokens - interval)) / interval))


LENGTH_PENALTIES = {"authors": authors_length_penalty, "soft": soft_length_penalty}
"""Length penalties by name, functions of the number of tokens and the limit."""


@dataclass(frozen=True)
class MathReward:
    r"""Reward of a mathematical answer: accuracy, plus format, minus a length penalty.

    Format is a ``<think>…</think>`` followed by a ``\boxed{}``.

    An answer for which the verifier timed out or crashed counts as not correct. Its ``verdict`` is
    False, and its reason says why.
    """

    extract: Literal["boxed", "hash", "auto"] = "boxed"
    accuracy: float = 1.0
    format: float = 0.0
    length_penalty: Literal["authors", "soft"] | None = None
    """"authors": :func:`authors_length_penalty`; "soft": DAPO's, :func:`soft_length_penalty`."""
    deadline: float = 5.0
    """Time limit for each answer in seconds."""
    workers: int = 2
    """Maximum number of processes; they are started when needed."""
    batch_seconds: float = 30.0
    """Time limit for a batch in seconds; answers not graded by then get no verdict."""
    grader: Literal["math-verify", "mathruler"] = "math-verify"
    """"mathruler" finds and compares answers and checks the format as verl's geo3k reward."""

    def __post_init__(self) -> None:
        require_extract(self.extract, tuple(READERS))
        require_weight("accuracy", self.accuracy)
        require_weight("format", self.format)
        if self.length_penalty not in (None, *LENGTH_PENALTIES):
            raise ValueError(
                f"length_penalty must be None, 'authors' or 'soft'; got {self.length_penalty!r}."
            )
        require_seconds("deadline", self.deadline)
        require_count("workers", self.workers)
        require_seconds("batch_seconds", self.batch_seconds)
        if self.grader not in ("math-verify", "mathruler"):
            raise ValueError(f"grader must be math-verify or mathruler; got {self.grader!r}.")

    @cached_property
    def _verifier(self) -> Verifier:
        make = MathRuler if self.grader == "mathruler" else Verifier
        return make(self.deadline, self.workers, self.batch_seconds)

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        find = last_box if self.grader == "mathruler" else READERS[self.extract][0]
        golds = [gold_answer(response) for response in responses]
        answers = [find(response.text) for response in responses]
        pairs = [(gold, a) for gold, a in zip(golds, answers, strict=True) if a is not None]
        graded = iter(self._verifier(pairs))
        verdicts = [
            Verdict(False, no_answer(response, self.extract)) if a is None else next(graded)
            for response, a in zip(responses, answers, strict=True)
        ]
        return [
            self._reward(response, verdict, answer is not None)
            for response, verdict, answer in zip(responses, verdicts, answers, strict=True)
        ]

    def close(self) -> None:
        """Stop the processes."""
        self._verifier.close()

    def __enter__(self) -> "MathReward":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _reward(self, response: Response, verdict: Verdict, answered: bool) -> Reward:
        penalty = 0.0
        if self.length_penalty is not None:
            compute = LENGTH_PENALTIES[self.length_penalty]
            penalty = compute(response.num_tokens, response.max_tokens)
        formatted = verl_format_ok if self.grader == "mathruler" else format_ok
        parts = {
            "accuracy": self.accuracy if verdict.right else 0.0,
            "format": self.format if self.format and formatted(response.text) else 0.0,
            "length": 0.0 - penalty,
        }
        return Reward(
            value=sum(parts.values()),
            reason=verdict.reason,
            correct=bool(verdict.right),
            answered=answered,
            parts=parts,
            verdict=verdict.right is not None,
        )


math = partial(MathReward, "boxed")
r"""Reward 1 for a correct ``\boxed{}`` answer."""
geo3k = partial(MathReward, "boxed", 0.9, 0.1, grader="mathruler")
r"""Grade Geometry3K like verl: 0.9 for the answer, by MathRuler's rules, 0.1 for the format.

The answer is the last ``\boxed{}`` of the whole response, including the thinking.
"""
geo3k_strict = partial(MathReward, "boxed", 0.9, 0.1)
"""Grade Geometry3K strictly: only a box after ``</think>`` counts, compared by math-verify.

The weights are those of ``geo3k``: 0.9 and 0.1. Hedged answers (``44=45``, ``44 or 45``) are
refused. Values are compared, not their notation.
"""
gsm8k = partial(ExactReward, "hash")
"""Grade GSM8K like verl: the number after the last ``####``."""
