"""Whether an answer equals the expected one: as text, as a number, or else by math-verify."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from segcredit.rewards.errors import shown
from segcredit.rewards.guards import LONGEST, refusal
from segcredit.rewards.pool import Failure, Pool

MEMORY = 2 << 30
"""Bytes that a worker may ask for: ample for an answer of LONGEST characters."""
_SHOWN = 40

_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|[-+]?\.[0-9]+", re.ASCII
)
_SPACES = re.compile(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+")
"""Those that separate nothing, as in ``\\sqrt { 13 }``."""
_DECIMALS = 6
"""math-verify takes decimals that agree to so many places for equal."""
_IN_LATEX = {"−": "-", "°": "^\\circ", "\\degree": "^\\circ", "π": "\\pi", "×": "\\times "}
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


@dataclass(frozen=True)
class Verdict:
    """Right, wrong, or None: nobody can tell; and the sentence that says so."""

    right: bool | None
    reason: str


class Verifier:
    """Grades pairs (expected, answer), each distinct pair once, in processes that can be killed.

    A pair gets ``deadline`` seconds, all pairs of one call together ``batch_seconds``.
    """

    def __init__(
        self, deadline: float = 5.0, workers: int = 2, batch_seconds: float | None = None
    ) -> None:
        self.batch_seconds = batch_seconds
        self.pool = Pool(
            [self.mode, str(MEMORY)],
            role="verifier of mathematics",
            workers=workers,
            deadline=deadline,
            environment={"PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"},
        )

    mode = "math"
    """Mode of the worker program."""

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """One verdict per pair, in their order."""
        verdicts: dict[tuple[str, str], Verdict] = {}
        hard: list[tuple[str, str]] = []
        for pair in dict.fromkeys(pairs):
            quick = self.at_sight(*pair)
            if quick is None:
                hard.append(pair)
            else:
                verdicts[pair] = quick
        hard.sort(key=lambda pair: len(pair[1]))  # short answers first: slow ones are usually long
        replies = self.pool.ask([self.request(*pair) for pair in hard], budget=self.batch_seconds)
        for pair, reply in zip(hard, replies, strict=True):
            verdicts[pair] = (
                Verdict(None, f"no verdict: the verifier {reply.reason} on {_quoted(pair[1])}")
                if isinstance(reply, Failure)
                else self.verdict(*pair, reply)
            )
        return [verdicts[pair] for pair in pairs]

    def at_sight(self, gold: str, answer: str) -> Verdict | None:
        """Return a verdict that needs no worker, or None."""
        return at_sight(gold, answer)

    def request(self, gold: str, answer: str) -> Mapping[str, Any]:
        """Build the request for the worker."""
        return {"gold": tidy(gold), "answer": tidy(answer)}

    def verdict(self, gold: str, answer: str, reply: Mapping[str, bool]) -> Verdict:
        """Convert the worker's reply into a verdict."""
        if reply["right"]:
            return right(answer)
        if not reply["gold_read"]:
            return wrong(gold, answer, " (compared as text)")
        return wrong(
            gold, answer, "" if reply["read"] else " (it could not be read as mathematics)"
        )

    def close(self) -> None:
        """Stop the processes."""
        self.pool.close()


def at_sight(gold: str, answer: str) -> Verdict | None:
    """The verdict that needs no mathematics: equal text, two plain numbers, a refusal."""
    if len(answer) <= max(LONGEST, len(gold) + 2):
        a, b = tidy(gold), tidy(answer)
        if not b:
            return Verdict(False, f"wrong: an empty answer, expected {_plain(gold)}")
        if _SPACES.sub("", a) == _SPACES.sub("", b):
            return right(answer)
        if len(a) <= LONGEST and _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b):
            x, y = _number(a), _number(b)
            if x == y:
                return right(answer)
            if _decimals(x) <= _DECIMALS and _decimals(y) <= _DECIMALS:
                return wrong(gold, answer)
    refused = refusal(tidy(answer), tidy(gold))
    return None if refused is None else Verdict(False, f"refused: {refused}")


def tidy(answer: str) -> str:
    """Without dollar signs around it, a full stop after it, or signs that LaTeX spells out."""
    answer = answer.strip()
    for left, right_ in _DELIMITERS:
        inside = answer[len(left) : len(answer) - len(right_)]
        wrapped = answer.startswith(left) and answer.endswith(right_)
        if wrapped and len(answer) >= len(left + right_) and left not in inside:
            answer = inside.strip()
    for sign, latex in _IN_LATEX.items():
        answer = answer.replace(sign, latex)
    ended = answer.rstrip(".,; \n")
    return answer if ended.endswith("\\") else ended  # "\," is a space


def right(answer: str) -> Verdict:
    """It equals the expected answer."""
    return Verdict(True, f"right: {_plain(answer)}")


def wrong(gold: str, answer: str, note: str = "") -> Verdict:
    """It does not."""
    return Verdict(False, f"wrong: {_plain(answer)}, expected {_plain(gold)}{note}")


def same_number(a: str, b: str) -> bool:
    """Whether both texts are plain numbers with the same value, such as 18.00 and 18."""
    if not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
        return False
    return _number(a) == _number(b)


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _decimals(x: Decimal) -> int:
    exponent = x.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _quoted(text: str) -> str:
    return shown(text, _SHOWN)


def _plain(text: str) -> str:
    return _quoted(text)[1:-1]
