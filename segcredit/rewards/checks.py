"""Errors, warnings and checks of settings that all rewards share."""

from collections.abc import Sequence
from math import isfinite

from segcredit.printable import printable
from segcredit.types import Reward


class RewardError(ValueError):
    """A reward could not be computed; the message says what was expected and what to do."""


def quoted(text: str, limit: int = 80) -> str:
    """Return the start of a text in quotes, on one line, without control characters."""
    return f"'{printable(text, limit)}'"


MOST_WITHOUT_VERDICT = 0.05
"""Share of responses without a verdict in a batch above which a warning is quoted."""


def no_verdict_warning(rewards: Sequence[Reward], where: str) -> str | None:
    """Write a warning with cause and remedy if too many responses got no verdict, else None.

    ``where`` completes the phrase "responses of".
    """
    reasons = [_why(x) for x in rewards if not x.complete]
    if len(reasons) <= MOST_WITHOUT_VERDICT * len(rewards):
        return None
    return (
        f"{len(reasons)} of {len(rewards)} responses of {where} got no verdict and count as not "
        f"correct. The first: {printable(reasons[0], 200)}. If answers take long to grade, raise "
        f"reward.deadline (seconds for one), reward.batch_seconds (for all of a batch) or "
        f"reward.workers (processes)."
    )


def _why(reward: Reward) -> str:
    """Return the reason for which there is no verdict, in a weighted sum with the label."""
    named = (f"{name}: {x.reason}" for name, x in reward.each.items() if not x.verdict)
    return next(named, reward.reason)


def require_extract(extract: object, known: Sequence[str]) -> None:
    """Raise ValueError unless ``extract`` is a known way to find the answer."""
    if extract not in known:
        raise ValueError(f"extract must be one of {', '.join(known)}; got {extract!r}.")


def require_weight(name: str, x: float) -> None:
    """Raise ValueError unless x is a finite number and at least 0."""
    if not _is_number(x) or x < 0:
        raise ValueError(f"{name} is a weight: a finite number, at least 0; got {x!r}.")


def require_seconds(name: str, x: float) -> None:
    """Raise ValueError unless x is a finite number above 0."""
    if not _is_number(x) or x <= 0:
        raise ValueError(f"{name} must be a positive number of seconds; got {x!r}.")


def require_count(name: str, x: object) -> None:
    """Raise ValueError unless x is a whole number and at least 1."""
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise ValueError(f"{name} must be a whole number, at least 1; got {x!r}.")


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and isfinite(x)
