"""Compare an answer with the expected one: as text, as a number, or by math-verify."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from segcredit.rewards.checks import quoted
from segcredit.rewards.pool import Failure, Pool

LONGEST = 300
"""Maximum number of characters; the longest gold answer of GSM8K, MATH500 and Geometry3K has 53."""

_RELATION = re.compile(r"(?<![<>!])=+|≡|≈|\\(?:equiv|approx)(?![A-Za-z])")
_NAMED_NUMBERS = re.compile(  # x_{12}, f(2), ∠1: digits that belong to a name
    r"_\s*(?:\{[^{}]*\}|\S)|[A-Za-z]\s*\([^()]*\)|(?:\\angle|∠)\s*[0-9]+"
)
_EITHER_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee|cup)(?![A-Za-z])|∨|∪", re.I)
_SEVERAL = re.compile(rf"[,;±]|\\(?:pm|mp)(?![A-Za-z])|\band\b|{_EITHER_OR.pattern}", re.I)
_NUMBER_IN_WORDS = re.compile(
    r"\\(?:text\w*|mbox|mathrm|mathbf|mathit|operatorname)\s*\{[^{}]*[0-9][^{}]*\}"
)
_SUBSCRIPT_OF_NUMBER = re.compile(r"[0-9]\s*_\s*\{?\s*([^{}\s]*)")
_POWER = re.compile(r"\^|\*\*")
_POWER_OF_NUMBER = re.compile(r"[0-9)}]\s*(?:\^|\*\*)")
_HUGE_EXPONENT = re.compile(r"(?:\^|\*\*)[\s{(+-]*[0-9]{5}")
_FACTORIAL = re.compile(r"(?<!\\)!(?!=)")  # \! is a space, != a relation
_GROWS_FAST = re.compile(r"\^|\*\*|(?<!\\)!|[0-9]{4}")
_OPENING = {"{": "}", "(": ")", "[": "]"}


def refusal(answer: str, gold: str) -> str | None:
    """Return the reason why this answer is not graded; None if it is."""
    if len(answer) > LONGEST:
        return f"the answer has {len(answer):,} characters; at most {LONGEST} are graded"
    for trait, reason in _TRAITS:
        if trait(answer) and not trait(gold):
            return reason
    if _subscripts(answer) - _subscripts(gold):
        return "a number with a subscript that the expected answer does not have"
    if _num_relations(answer) > max(1, _num_relations(gold)):
        return "a chain of '=': one answer, please"
    if _num_relations(gold) == 0 and any(map(_equates_more_than_a_name, _items(answer))):
        return "an equation whose left side is more than a name"
    if _EITHER_OR.search(answer) and not _SEVERAL.search(gold):
        return "several answers joined by 'or': one answer, please"
    return None


def computes_too_much(text: str) -> str | None:
    """Return the reason why evaluating the text may take too long; None if there is none."""
    return next((reason for trait, reason in _TRAITS[:2] if trait(text)), None)


def _num_relations(text: str) -> int:
    """Return the number of relations in the longest chain; ``x=1, y=2`` has two chains of one."""
    return max(len(_RELATION.findall(_outside_brackets(item))) for item in _items(text))


def _equates_more_than_a_name(item: str) -> bool:
    match = _RELATION.search(item)
    if match is None:
        return False
    left = _NAMED_NUMBERS.sub("", item[: match.start()]).strip()
    return left.startswith("-") or "\\sqrt" in left or any(c.isdigit() for c in left)


def _number_in_words(text: str) -> bool:
    r"""Whether words contain a number, ``45\text{ (maybe 44)}``, which the verifier would drop."""
    outside = _NUMBER_IN_WORDS.sub("", text)
    return outside != text and any(c.isdigit() for c in outside)


def _subscripts(text: str) -> set[str]:
    """Return subscripts of numbers, such as 8 in ``52_8``, which the verifier ignores."""
    return set(_SUBSCRIPT_OF_NUMBER.findall(text))


def _tower(text: str) -> bool:
    if _HUGE_EXPONENT.search(text):
        return True
    for match in _POWER.finditer(text):
        end = _end_of_argument(text, match.end())
        in_exponent = _POWER_OF_NUMBER.search(text[match.end() : end])
        if in_exponent or _POWER.match(text[end:].lstrip()):
            return True
    return False


def _large_factorial(text: str) -> bool:
    for match in _FACTORIAL.finditer(text):
        before = text[: match.start()].rstrip()
        if before.endswith("!") or re.search(r"[0-9]{4}$", before):
            return True
        if _GROWS_FAST.search(_last_group(before)):
            return True
    return False


_TRAITS: Sequence[tuple[Callable[[str], bool], str]] = (
    (_tower, "a tower of powers"),
    (_large_factorial, "a factorial of something large"),
    (_number_in_words, "a second number inside words"),
)


def _items(text: str) -> list[str]:
    """Split a list at commas and semicolons outside brackets."""
    plain = _outside_brackets(text)
    cuts = [i for i, c in enumerate(plain) if c in ",;"]
    starts = [0, *(i + 1 for i in cuts)]
    return [text[a:b] for a, b in zip(starts, [*cuts, len(text)], strict=True)]


def _outside_brackets(text: str) -> str:
    """Replace the text inside brackets by spaces."""
    depth, kept = 0, []
    for c in text:
        depth += c in _OPENING
        kept.append(" " if depth else c)
        depth = max(0, depth - (c in _OPENING.values()))
    return "".join(kept)


def _end_of_argument(text: str, start: int) -> int:
    """Return the end of the exponent that starts at ``start``: a group, digits or a character."""
    match = re.compile(r"\s*(?:[0-9]+|\\?[A-Za-z]+)").match(text, start)
    if match:
        return match.end()
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPENING) - (text[i] in _OPENING.values())
        if depth <= 0 and not text[i].isspace():
            return i + 1
    return len(text)


def _last_group(text: str) -> str:
    """Return the bracketed group at the end of the text, or ''."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += (text[i] in _OPENING.values()) - (text[i] in _OPENING)
        if depth <= 0:
            return text[i:] if i < len(text) - 1 else ""
    return text


MEMORY = 2 << 30
"""Memory limit of a worker in bytes, ample for an answer of LONGEST characters."""
_SHOWN = 40

_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|[-+]?\.[0-9]+", re.ASCII
)
_SPACES = re.compile(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+")
"""Spaces without meaning, as in ``\\sqrt { 13 }``."""
_DECIMALS = 6
"""Number of decimal places to which math-verify compares numbers."""
_IN_LATEX = {"−": "-", "°": "^\\circ", "\\degree": "^\\circ", "π": "\\pi", "×": "\\times "}
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right (None: no verdict), and the reason."""

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
        """Return one verdict per pair, in order."""
        verdicts: dict[tuple[str, str], Verdict] = {}
        hard: list[tuple[str, str]] = []
        for pair in dict.fromkeys(pairs):
            quick = self.quick_verdict(*pair)
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

    def quick_verdict(self, gold: str, answer: str) -> Verdict | None:
        """Return a verdict that needs no worker, or None."""
        return quick_verdict(gold, answer)

    def request(self, gold: str, answer: str) -> Mapping[str, Any]:
        """Build the request for the worker."""
        return {"gold": normalize(gold), "answer": normalize(answer)}

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


def quick_verdict(gold: str, answer: str) -> Verdict | None:
    """Return a verdict that needs no worker: equal text, plain numbers, or a refusal."""
    if len(answer) <= max(LONGEST, len(gold) + 2):
        a, b = normalize(gold), normalize(answer)
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
    refused = refusal(normalize(answer), normalize(gold))
    return None if refused is None else Verdict(False, f"refused: {refused}")


def normalize(answer: str) -> str:
    """Remove delimiters and final punctuation, and write Unicode signs as LaTeX."""
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
    """Return the verdict on an answer that equals the expected one."""
    return Verdict(True, f"right: {_plain(answer)}")


def wrong(gold: str, answer: str, note: str = "") -> Verdict:
    """Return the verdict on an answer that does not."""
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
    return quoted(text, _SHOWN)


def _plain(text: str) -> str:
    return _quoted(text)[1:-1]
