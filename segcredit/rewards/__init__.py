"""What a response is worth: mathematics, equal text, or a function of one's own.

>>> reward = make_reward("geo3k")
>>> reward = make_reward({"name": "math", "deadline": 2.0})
>>> reward = make_reward("my_rewards.py:score")  # doctest: +SKIP
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from segcredit.rewards import math as _math
from segcredit.rewards.checks import RewardError
from segcredit.rewards.custom import CustomReward
from segcredit.rewards.exact import ExactReward
from segcredit.rewards.extract import boxed, format_ok, hash_answer
from segcredit.rewards.math import MathReward, authors_length_penalty, geo3k, geo3k_strict, gsm8k
from segcredit.runlog.untrusted import names_file
from segcredit.types import RewardFn

REWARDS: Mapping[str, Callable[..., RewardFn]] = {
    "math": _math.math,
    "geo3k": geo3k,
    "geo3k_strict": geo3k_strict,
    "gsm8k": gsm8k,
    "exact": ExactReward,
}
"""By name, for recipes and the command line."""

__all__ = [
    "REWARDS",
    "CustomReward",
    "ExactReward",
    "MathReward",
    "RewardError",
    "authors_length_penalty",
    "boxed",
    "compares_answers",
    "format_ok",
    "geo3k",
    "geo3k_strict",
    "gsm8k",
    "hash_answer",
    "make_reward",
]


def make_reward(spec: str | Mapping[str, Any] | Callable[..., Any]) -> RewardFn:
    """A reward by name, ``"file.py:function"``, name with settings, or a function.

    Settings stand beside the name: ``{"name": "math", "deadline": 2.0}``.
    """
    if isinstance(spec, str):
        return _by_name(spec, {})
    if isinstance(spec, Mapping):
        settings = dict(spec)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ValueError(
                f"a reward with settings needs a name: {{'name': 'math', …}}; got {dict(spec)!r}."
            )
        return _by_name(name, settings)
    if isinstance(spec, type):
        raise ValueError(f"a reward is an object, not a class; pass {spec.__name__}().")
    if isinstance(spec, RewardFn):
        return spec
    return CustomReward(spec)


def compares_answers(reward: object) -> bool:
    """Whether a reward is built in: these compare a response with the row's one answer."""
    return isinstance(reward, MathReward | ExactReward)


def _by_name(name: str, settings: dict[str, Any]) -> RewardFn:
    if names_file(name):
        _require_known(name, settings, ["deadline", "conversational"])
        return CustomReward(name, **settings)
    if name not in REWARDS:
        raise ValueError(
            f"there is no reward {name!r}{_nearest(name, list(REWARDS))} A function of your own is "
            f"written 'file.py:function'."
        )
    make = REWARDS[name]
    _require_known(name, settings, list(inspect.signature(make).parameters))
    return make(**settings)


def _require_known(name: str, settings: Mapping[str, Any], known: list[str]) -> None:
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"reward {name!r} has no setting {setting!r}{_nearest(setting, known)}"
            )


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f". Did you mean {close[0]!r}?"
    return f"; there are {', '.join(known)}." if known else "; there are none."
