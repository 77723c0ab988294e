r"""The answer of a row, as each known data set writes it: ``#### 18``, ``\boxed{18}``, a letter."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from segcredit.data.problems import RowError
from segcredit.printable import shown

Rule = Callable[[Mapping[str, Any], str | None], str | None]
"""(the row, what the loader takes for its answer) → the answer, or None; a RowError says why."""

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def as_it_is(row: Mapping[str, Any], answer: str | None) -> str | None:
    """What the loader finds."""
    return answer


def number(row: Mapping[str, Any], answer: str | None) -> str | None:
    """GSM8K: the number after ``####``, without commas and currency."""
    if answer is None:
        return None
    bare = answer.replace("$", "").strip().removesuffix(".")
    if not _NUMBER.fullmatch(bare):
        raise RowError(f"expected a solution that ends in '#### number'; got {shown(answer)}")
    return bare.replace(",", "")


def boxed_solution(row: Mapping[str, Any], answer: str | None) -> str | None:
    r"""MATH: the answer given, else the last ``\boxed{}`` of the worked solution."""
    solution = row.get("solution")
    given = any(_filled(row.get(name)) for name in ("answer", "ground_truth", "reward_model"))
    if given or not isinstance(solution, str) or not solution.strip():
        return answer
    found = last_box(solution)
    if not found:
        raise RowError(
            f"expected the answer in a \\boxed{{}} of 'solution'; got {shown(solution)}. If it "
            f"is the bare answer: --answer solution"
        )
    return found


def chosen_text(row: Mapping[str, Any], answer: str | None) -> str | None:
    """Geometry3K: the text of the choice where the answer is its letter."""
    choices = row.get("choices")
    if _filled(row.get("ground_truth")) or not isinstance(choices, list):
        return answer
    place = "ABCDEFGH".find(answer) if answer is not None and len(answer) == 1 else -1
    if place < 0:
        return answer
    if place >= len(choices) or not _filled(choices[place]):
        raise RowError(f"expected a text for the choice {answer} in 'choices'; got none")
    return str(choices[place]).strip()


def last_box(text: str) -> str | None:
    r"""What the last ``\boxed{}`` or ``\fbox{}`` holds; of ``$\boxed 5$`` the 5."""
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    if text[start : start + 1] != "{":
        return re.split(r"[$\n]", text[start:], maxsplit=1)[0].strip().rstrip(".") or None
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)  # an escaped brace opens nothing
        if depth == 0 and brace.group() == "}":
            return text[start + 1 : brace.start()].strip() or None
    return None


def _filled(value: object) -> bool:
    return value is not None and str(value).strip() != ""
