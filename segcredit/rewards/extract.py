r"""Find the final answer in a response: the last ``\boxed{}``, or GSM8K's ``#### number``.

All functions take linear time for any text.
"""

import re
from collections.abc import Callable, Mapping

END_OF_THINKING = "</think>"

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BRACE = re.compile("[{}]")
_HASH = "####"
# bounded repetitions, because adjacent patterns that match the same spaces take quadratic time
_NUMBER = re.compile(r"[\s$\\*+]{0,8}(-?)[\s$\\]{0,4}([0-9.,]{1,400})")
_CLEAN_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")


def boxed(text: str) -> str | None:
    r"""Return the content of the last balanced ``\boxed{}`` or ``\fbox{}`` after the thinking.

    Of nested boxes, the inner one starts last. Escaped braces, as in ``\{1, 2\}``, are ordinary
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

    The box may lie inside the thinking. If the last one never closes, there is no answer.
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
