"""Settings of rewards, refused early and in one sentence."""

from collections.abc import Sequence
from math import isfinite


def require_extract(extract: object, known: Sequence[str]) -> None:
    """Raise ValueError unless it is one of these."""
    if extract not in known:
        raise ValueError(f"extract must be one of {', '.join(known)}; got {extract!r}.")


def require_weight(name: str, x: float) -> None:
    """Raise ValueError unless it is a finite number, at least 0."""
    if not _is_number(x) or x < 0:
        raise ValueError(f"{name} is a weight: a finite number, at least 0; got {x!r}.")


def require_seconds(name: str, x: float) -> None:
    """Raise ValueError unless it is a finite number above 0."""
    if not _is_number(x) or x <= 0:
        raise ValueError(f"{name} must be a positive number of seconds; got {x!r}.")


def require_count(name: str, x: object) -> None:
    """Raise ValueError unless it is a whole number, at least 1."""
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise ValueError(f"{name} must be a whole number, at least 1; got {x!r}.")


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and isfinite(x)
