"""Recorded responses as the page reads them: columns of numbers, texts in one list, few digits."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcredit.report.cuts import cuts

DIGITS = 4
"""Significant digits on the page."""
LONGEST = 2000
"""Characters of one token, or of a prompt's message times ten, before the rest is left out."""
LONGEST_NAME = 200
"""Characters of a prompt's id or a message's role."""
PER_TOKEN = ("entropy", "value", "advantage", "ratio", "logp_old")


def page_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows of one file; every distinct piece of text stands once in ``texts``."""
    number: dict[str, int] = {}
    found = [_row(row, number) for row in rows]
    for row, cut in zip(found, cuts(rows), strict=True):
        row["cuts"] = cut
    return {"texts": list(number), "rows": found}


def _row(row: Mapping[str, Any], number: dict[str, int]) -> dict[str, Any]:
    pieces = [shortened(str(x), LONGEST) for x in _list(row, "pieces")]
    if not pieces and row.get("response"):
        pieces = [shortened(str(row["response"]), 10 * LONGEST)]
    made: dict[str, Any] = {
        "id": prompt_id(row),
        "messages": _messages(row),
        "images": [str(x) for x in _list(row, "images")],
        "answer": None if row.get("answer") is None else shortened(str(row["answer"]), LONGEST),
        "pieces": [number.setdefault(x, len(number)) for x in pieces],
        "tokens": [plain_number(x) for x in _list(row, "tokens")],
        "segment": _segment(row, len(pieces)),
        "reward": plain_number(row.get("reward")),
        "reason": shortened(str(row.get("reason") or ""), LONGEST),
        "correct": row["correct"] if isinstance(row.get("correct"), bool) else None,
        "truncated": bool(row.get("truncated")),
        "length": len(_list(row, "tokens")) or len(pieces),
    }
    for name in PER_TOKEN:
        column = _list(row, name)
        if column and len(column) == len(pieces):
            made[name] = [plain_number(x) for x in column]
    return made


def prompt_id(row: Mapping[str, Any]) -> str:
    """What tells prompts apart."""
    return shortened(str(row.get("prompt_id", "")), LONGEST_NAME)


def _segment(row: Mapping[str, Any], count: int) -> list[int]:
    """Of each token; empty if any has none."""
    found = _list(row, "segment")
    whole = len(found) == count and all(type(m) is int and -1 <= m < 2**31 for m in found)
    return found if whole else []


def _messages(row: Mapping[str, Any]) -> list[list[str]]:
    """Role and content; runs of older versions hold one text alone."""
    messages = _list(row, "messages")
    if not messages:
        return [["prompt", shortened(str(row.get("prompt", "")), 10 * LONGEST)]]
    return [
        [
            shortened(str(x.get("role", "")), LONGEST_NAME),
            shortened(str(x.get("content", "")), 10 * LONGEST),
        ]
        for x in messages
        if isinstance(x, Mapping)
    ]


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    found = row.get(name)
    return found if isinstance(found, list) else []


def shortened(text: str, longest: int) -> str:
    """Its beginning, and how much is missing."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… [{len(text) - longest:,} more characters]"


def plain_number(x: Any) -> float | int | str | None:
    """With few digits; JSON has no NaN, so it becomes a string."""
    if isinstance(x, bool) or x is None:
        return None if x is None else int(x)
    if not isinstance(x, int | float):
        return str(x)[:40]
    if isinstance(x, int) and abs(x) < 2**53:
        return x
    try:
        x = float(x)
    except OverflowError:  # JSON's whole numbers have no bounds
        x = math.inf if x > 0 else -math.inf
    if not math.isfinite(x):
        return "NaN" if math.isnan(x) else "∞" if x > 0 else "−∞"
    return float(f"{x:.{DIGITS}g}")
