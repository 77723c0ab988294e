"""Format values as text: short printable quotes of untrusted rows, consistently rounded numbers."""

import math
import re
import unicodedata
from collections.abc import Iterable

EMPTY = "∅"
"""Shown for a token without text, such as an end-of-sequence token."""
NEWLINE = "↵"
_JOINERS = "\u200c\u200d"  # zero-width: they join letters of Persian words and parts of emoji
_SYMBOLS = {"\n": NEWLINE, "\t": "⇥", "\x7f": "␡"}
_LIMIT = 60

STAGE_NAMES = {
    "warm_start": "imitate",
    "pretrain_critic": "train critic",
    "optimize": "reinforce",
}
"""Kind of a stage → its name in the progress bar and on the report page."""


def stage_title(number: int, kind: str) -> str:
    """Return the name of a stage as progress bar and report show it, numbered from 1.

    Settings number stages from 0: :func:`stage_title_and_key` has both.
    """
    return f"{number + 1} {STAGE_NAMES.get(kind, kind)}"


def stage_title_and_key(number: int, kind: str) -> str:
    """Return the name of a stage with the key of its settings: ``4 reinforce (stages.3)``."""
    return f"{stage_title(number, kind)} (stages.{number})"


METRIC_FORMS = {
    "nll": ".3f",
    "accuracy": ".1%",
    "sampled": ".1%",
    "greedy": ".1%",
    "no_verdict": ".1%",
    "reward": ".3f",
    "greedy_reward": ".3f",
    "entropy": ".3f",
    "response_length": ".0f",
    "explained_variance": ".2f",
    "tokens_per_second": ".0f",
}
"""Metric → its format in the progress bar and on the report page."""


def number_text(x: float, form: str) -> str:
    """Format a number with a true minus sign, or as a dash if it is not finite."""
    return f"{x:{form}}".replace("-", "−") if math.isfinite(x) else "–"


def change_texts(before: float, after: float, share: bool) -> tuple[str, str, str]:
    """Format two numbers and their difference, which is computed before rounding.

    A share in percent: 5.5 %, 28.5 %, +23.0 points. Any other number: 0.055, 0.285, +0.230.
    """
    scale, form, unit, step = (100, ".1f", " %", " points") if share else (1, ".3f", "", "")
    change = after - before
    return (
        number_text(scale * before, form) + unit * math.isfinite(before),
        number_text(scale * after, form) + unit * math.isfinite(after),
        number_text(scale * change, f"+{form}") + step * math.isfinite(change),
    )


def visible(text: str, keep: str = f"\n{_JOINERS}") -> str:
    """Make every character visible that is not printable, except those to keep.

    Control characters become control pictures (␛ ␍ ␈), newlines ↵ and tabs ⇥; direction marks and
    other invisible characters become their number, as in ‹U+202E›. The report page does the same
    in report/static/base.js.
    """
    if text.isprintable():
        return text
    return "".join(x if x in keep else _symbol(x) for x in text)


def one_line(text: str) -> str:
    """Make a text visible on one line, with newlines shown as ↵."""
    return visible(text, keep=_JOINERS)


def printable(text: str, limit: int | None = None) -> str:
    """Make a text printable on one line, for messages; cut it at the limit."""
    if limit is not None and len(text) > limit:
        return visible(text[:limit], keep="") + "…"
    return visible(text, keep="")


def without_addresses(text: str) -> str:
    """Remove memory addresses, which differ in every process, from the repr of objects.

    >>> without_addresses("<Own object at 0x7f03a1b2>")
    '<Own object>'
    """
    return re.sub(r" at 0x[0-9a-f]+(?=>)", "", text)


def _symbol(character: str) -> str:
    code = ord(character)
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character  # Zs: a no-break or ideographic space is a space
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    return chr(0x2400 + code) if code < 0x20 else f"‹U+{code:04X}›"


def shown(value: object) -> str:
    """Describe a value for a message: short texts and numbers in full, others by kind and size."""
    match value:
        case None:
            return "nothing (null)"
        case str():
            return f"'{printable(value, _LIMIT)}'" if value else "an empty text"
        case bool() | float():
            return str(value)
        case int():
            return str(value) if abs(value) < 10**18 else "a huge number"
        case bytes() | bytearray():
            return f"{len(value)} bytes"
        case dict():
            return f"an object with the keys {listed(value)}" if value else "an object without keys"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return f"a {type(value).__name__}"


def named(path: object) -> str:
    """Quote a path; of a very long path, the end."""
    name = str(path)
    return f"'{printable(name)}'" if len(name) <= 200 else f"'…{printable(name[-200:])}'"


def listed(names: Iterable[object], limit: int = 8) -> str:
    """Quote the first few names."""
    quoted = [f"'{printable(str(name), _LIMIT)}'" for name in names]
    return ", ".join(quoted[:limit]) + (", …" if len(quoted) > limit else "") or "none"
