r"""Find the final answer in a response: the last ``\boxed{}``, or GSM8K's ``#### number``.

All functions take linear time for any text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from segcredit.rewards.checks import quoted, require_extract
from segcredit.rewards.verify import right, same_number, wrong
from segcredit.types import Response, Reward

END_OF_THINKING = "</think>"

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BRACE = re.compile("[{}]")
_HASH = "####"
# bounded repetitions, because adjacent patterns that match the same spaces take quadratic time
_NUMBER = re.compile(r"[\s$\\*+]{0,8}(-?)[\s$\\]{0,4}([0-9.,]{1,400})")
_CLEAN_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")


def boxed(text: str) -> str | None:
    r"""Return the content of the last balanced ``\boxed{}`` or ``\fbox{}`` after the thinking.

    For nested boxes, this is the inner box. Escaped braces, as in ``\{1, 2\}``, are ordinary
    characters.
    """
    text = answer_part(text)
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    opened: list[int | None] = []  # start of the content of each open brace that belongs to a box
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]):
                last = start, match.start()
        elif token.endswith("{") and token != "\\{":
            opened.append(None if token == "{" else match.end())
    return None if last is None else text[slice(*last)].strip()


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` in the whole text (verl, MathRuler).

    The box may be inside the thinking. If the last box is not closed, there is no answer.
    """
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for match in _BRACE.finditer(rest if found else ""):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return rest[: match.start()].strip()
    return None


def verl_format_ok(text: str) -> bool:
    r"""Whether ``<think>.*</think>.*\boxed{.*}.*`` matches the whole text, in linear time."""
    if not text.startswith("<think>"):
        return False
    place = len("<think>")
    for mark in ("</think>", "\\boxed{", "}"):
        place = text.find(mark, place)
        if place < 0:
            return False
        place += len(mark)
    return True


def hash_answer(text: str) -> str | None:
    """Return the last number after ``####``, without commas, currency and plus sign."""
    for part in reversed(answer_part(text).split(_HASH)[1:]):
        match = _NUMBER.match(part)
        if match and (number := _clean_number(match)) is not None:
            return number
    return None


def either(text: str) -> str | None:
    r"""Return the ``\boxed{}`` answer, else the ``####`` answer."""
    answer = boxed(text)
    return hash_answer(text) if answer is None else answer


def answer_part(text: str) -> str:
    """Return the text after the last ``</think>``, or all of it."""
    return text.rpartition(END_OF_THINKING)[2]


def format_ok(text: str) -> bool:
    r"""Whether the text starts with ``<think>…</think>`` and a ``\boxed{}`` answer follows."""
    begun = text.lstrip().startswith("<think>")
    return begun and END_OF_THINKING in text and boxed(text) is not None


def expected(gold: str) -> str:
    r"""Return the answer in a row's gold text, which may be a whole solution.

    Rows of GSM8K have a solution with a ``####`` line, some rows of MATH one with ``\boxed{}``.
    """
    found = either(gold)
    return gold.strip() if found is None else found


def _clean_number(match: re.Match[str]) -> str | None:
    digits = match.group(2).replace(",", "").rstrip(".")
    return match.group(1) + digits if _CLEAN_NUMBER.fullmatch(digits) else None


READERS: Mapping[str, tuple[Callable[[str], str | None], str]] = {
    "boxed": (boxed, "\\boxed{} answer"),
    "hash": (hash_answer, "#### answer"),
    "auto": (either, "\\boxed{} or #### answer"),
}
"""Functions that find the answer, and their names for messages."""


@dataclass(frozen=True)
class ExactReward:
    r"""Reward 1 if the ``\boxed{}`` text or the number after ``####`` is correct, else 0."""

    extract: Literal["boxed", "hash"] = "boxed"

    def __post_init__(self) -> None:
        require_extract(self.extract, ("boxed", "hash"))

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return [self._grade(response) for response in responses]

    def close(self) -> None:
        """Do nothing: there is no process."""

    def _grade(self, response: Response) -> Reward:
        find, _ = READERS[self.extract]
        gold, answer = gold_answer(response), find(response.text)
        if self.extract == "hash":
            gold = hash_answer(f"#### {gold}") or gold  # 1,234 and $1234 become 1234
        if answer is None:
            return Reward(0.0, no_answer(response, self.extract), False, False, {"accuracy": 0.0})
        same = answer == gold or (self.extract == "hash" and same_number(answer, gold))
        verdict = right(answer) if same else wrong(gold, answer)
        value = float(same)
        return Reward(value, verdict.reason, verdict.right, True, {"accuracy": value})


def gold_answer(response: Response) -> str:
    """Return the expected answer; raise ValueError if the prompt has none."""
    gold = response.prompt.answer
    if gold is None or not gold.strip():
        raise ValueError(
            f"every prompt needs an answer to be graded against; prompt "
            f"{quoted(response.prompt.id)} has {'none' if gold is None else 'an empty one'}. Add "
            f"an answer to its row, or use your own reward function: 'file.py:function'."
        )
    return expected(gold)


def no_answer(response: Response, extract: str) -> str:
    """Return the reason for the reward of a response without an answer."""
    reason = f"no {READERS[extract][1]}"
    if response.truncated:
        return f"{reason}: truncated at {response.max_tokens} tokens"
    return reason
