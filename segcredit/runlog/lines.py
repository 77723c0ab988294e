"""JSON lines that every JSON reader takes: ASCII only, and numbers that are not finite spelled out.

JSON has no NaN and no infinity, so they are written as the strings "NaN", "Infinity" and
"-Infinity"; :func:`revived` turns them back where only numbers can stand.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(row: Mapping[str, Any]) -> bytes:
    """One object, one line; tensors and arrays become lists."""
    try:
        return _dumped(row)
    except (ValueError, RecursionError):  # mostly a number that is not finite: rare, so only now
        try:
            return _dumped(_spelled(row))
        except RecursionError:
            raise ValueError("a row must be a plain object; got one that holds itself.") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every object of the file; a last line that is still being written is left out."""
    return read_some_lines(path, None)[0]


def read_some_lines(path: Path, count: int | None) -> tuple[list[dict[str, Any]], int]:
    """At most ``count`` objects, evenly spread, and how many there are; others stay unparsed."""
    *whole, last = path.read_bytes().split(b"\n")
    lines = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if _parsed(last) is not None:
        lines.append((len(whole) + 1, last))
    total = len(lines)
    if count is not None and count < total:
        lines = [lines[i * total // count] for i in range(count)]
    rows = []
    for number, line in lines:
        row = _parsed(line)
        if row is None:
            raise ValueError(
                f"line {number} of {path} must be a JSON object; got {line[:40]!r}. The file is "
                f"damaged; deleting that line makes the rest readable."
            )
        rows.append(row)
    return rows, total


def revived(x: Any) -> Any:
    """A number, or nested lists of them, with "NaN" and the infinities as numbers again."""
    if isinstance(x, str):
        return _SPELLED.get(x, x)
    return [revived(item) for item in x] if isinstance(x, list) else x


def _dumped(row: Any) -> bytes:
    return json.dumps(row, allow_nan=False, default=_plain).encode("ascii") + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _plain(x: Any) -> Any:
    if hasattr(x, "tolist"):
        return x.tolist()
    raise ValueError(
        f"a row can hold strings, numbers, booleans, None, lists and dicts; got a "
        f"{type(x).__name__}, {x!r:.60}. Convert it first."
    )


def _spelled(x: Any) -> Any:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if isinstance(x, Mapping):
        return {key: _spelled(value) for key, value in x.items()}
    return [_spelled(item) for item in x] if isinstance(x, list | tuple) else x
