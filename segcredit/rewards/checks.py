"""Errors, warnings and checks of settings that all rewards share."""

from collections.abc import Sequence
from math import isfinite

from segcredit.printable import printable
from segcredit.types import Response, Reward, RewardFn


class RewardError(ValueError):
    """A reward could not be computed; the message says what was expected and what to do."""


def quoted(text: str, limit: int = 80) -> str:
    """Return the start of a text in quotes, on one line, without control characters."""
    return f"'{printable(text, limit)}'"


FINITE = "must return finite numbers"
"""Requirement of every reward, for messages."""
INSTEAD = " Return 0.0 for a response that it cannot grade."
"""Remedy for a reward that is not a finite number, for messages."""


def grade(reward: RewardFn, responses: Sequence[Response]) -> list[Reward]:
    """Grade responses; raise RewardError that names the reward if a grade is not usable."""
    own = getattr(reward, "__name__", type(reward).__name__)
    return require_grades(f"the reward {own!r}", reward(responses), responses)


def require_grades(who: str, found: object, responses: Sequence[Response]) -> list[Reward]:
    """Return a reward object's result; raise RewardError unless each Reward has a finite value.

    Args:
        who: Subject of the error message, such as "the reward 'Mine'".
    """
    if not isinstance(found, list | tuple):
        raise RewardError(
            f"{who} must return a list with one Reward per response; it returned "
            f"{_described(found)}{_where(responses)}."
        )
    if len(found) != len(responses):
        raise RewardError(
            f"{who} must return one Reward per response; it returned {len(found)} for "
            f"{len(responses)}, beginning{_where(responses)}."
        )
    for response, reward in zip(responses, found, strict=True):
        if not isinstance(reward, Reward):
            raise RewardError(
                f"{who} must return Reward objects; it returned {_described(reward)}"
                f"{_where([response])}. Return segcredit.types.Reward(value, reason), or write a "
                f"function, which may return numbers."
            )
        if not _is_finite(reward.value):
            shown = reward.value if isinstance(reward.value, float) else _described(reward.value)
            raise RewardError(f"{who} {FINITE}; it returned {shown}{_where([response])}.{INSTEAD}")
    return list(found)


def _where(responses: Sequence[Response]) -> str:
    first = next(iter(responses), None)
    if first is None:
        return ""
    return f" on prompt {quoted(first.prompt.id)}, response {quoted(first.text)}"


def _described(x: object) -> str:
    return f"{type(x).__name__} {quoted(repr(x))[1:-1]}"


def _is_finite(x: object) -> bool:
    """Whether x is a finite number of Python, numpy or torch."""
    try:
        return not isinstance(x, str | bytes) and isfinite(x)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last one
        return False


MOST_WITHOUT_VERDICT = 0.05
"""Share of responses without a verdict in a batch above which a warning is quoted."""


def no_verdict_warning(rewards: Sequence[Reward], where: str) -> str | None:
    """Write a warning with cause and remedy if too many responses got no verdict, else None.

    ``where`` completes the phrase "responses of".
    """
    without = [x for x in rewards if not x.complete]
    if len(without) <= MOST_WITHOUT_VERDICT * len(rewards):
        return None
    # in a weighted sum, another reward may have said which responses are correct
    counted = any(x.verdict for x in without)
    effect = "from one of the rewards" if counted else "and count as not correct"
    return (
        f"{len(without)} of {len(rewards)} responses of {where} got no verdict {effect}. The "
        f"first: {printable(_why(without[0]), 200)}. If answers take long to grade, raise "
        f"reward.deadline (seconds for one), reward.batch_seconds (for all of a batch) or "
        f"reward.workers (processes)."
    )


def _why(reward: Reward) -> str:
    """Return why there is no verdict; in a weighted sum, with the reward's label."""
    named = (f"{name}: {x.reason}" for name, x in reward.each.items() if not x.verdict)
    return next(named, reward.reason)


def require_extract(extract: object, known: Sequence[str]) -> None:
    """Raise ValueError unless ``extract`` is a known way to find the answer."""
    if extract not in known:
        raise ValueError(f"extract must be one of {', '.join(known)}; got {extract!r}.")


def require_weight(name: str, x: float) -> None:
    """Raise ValueError unless x is a finite number and at least 0."""
    if not _is_number(x) or x < 0:
        raise ValueError(f"{name} must be a finite number, at least 0; got {x!r}.")


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
