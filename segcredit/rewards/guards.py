"""Answers that are refused before grading, because they hedge or would keep a computer busy.

A verifier of mathematics reads some of them as right (``44=45`` for 45, ``45_{44}`` for 45), and
others take it hours (``9^{9^{9}}``). What the expected answer itself has is not refused.
"""

import re
from collections.abc import Callable, Sequence

LONGEST = 300
"""Characters. The longest gold answer of GSM8K, MATH500 and Geometry3K has 53."""

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
    """Why this answer is not graded against this gold answer; None: it is."""
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
    """Reason why evaluating the text may take too long; None if there is none."""
    return next((reason for trait, reason in _TRAITS[:2] if trait(text)), None)


def _num_relations(text: str) -> int:
    """Relations in the longest chain; ``x=1, y=2`` holds two chains of one."""
    return max(len(_RELATION.findall(_outside_brackets(item))) for item in _items(text))


def _equates_more_than_a_name(item: str) -> bool:
    match = _RELATION.search(item)
    if match is None:
        return False
    left = _NAMED_NUMBERS.sub("", item[: match.start()]).strip()
    return left.startswith("-") or "\\sqrt" in left or any(c.isdigit() for c in left)


def _number_in_words(text: str) -> bool:
    r"""``45\text{ (maybe 44)}``: the verifier drops the words, and the number with them."""
    outside = _NUMBER_IN_WORDS.sub("", text)
    return outside != text and any(c.isdigit() for c in outside)


def _subscripts(text: str) -> set[str]:
    """Of numbers: 8 in ``52_8``. The verifier does not read them."""
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
    """The parts of a list: split at commas and semicolons outside brackets."""
    plain = _outside_brackets(text)
    cuts = [i for i, c in enumerate(plain) if c in ",;"]
    starts = [0, *(i + 1 for i in cuts)]
    return [text[a:b] for a, b in zip(starts, [*cuts, len(text)], strict=True)]


def _outside_brackets(text: str) -> str:
    """The text with whatever stands in brackets blanked out."""
    depth, kept = 0, []
    for c in text:
        depth += c in _OPENING
        kept.append(" " if depth else c)
        depth = max(0, depth - (c in _OPENING.values()))
    return "".join(kept)


def _end_of_argument(text: str, start: int) -> int:
    """Where the exponent that begins at ``start`` ends: a group, a run of digits or a character."""
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
    """The bracketed group at the end of the text; '' if it ends otherwise."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += (text[i] in _OPENING.values()) - (text[i] in _OPENING)
        if depth <= 0:
            return text[i:] if i < len(text) - 1 else ""
    return text
