"""Reward functions: mathematics, equal text, or a function of your own.

>>> reward = make_reward("geo3k")
>>> reward = make_reward({"name": "math", "deadline": 2.0})
>>> reward = make_reward("my_rewards.py:score")  # doctest: +SKIP
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from segcredit.registry import Registry, names_code, require_settings
from segcredit.rewards.checks import RewardError
from segcredit.rewards.custom import CustomReward
from segcredit.rewards.extract import ExactReward, boxed, format_ok, hash_answer
from segcredit.rewards.math import MathReward, authors_length_penalty, geo3k, geo3k_strict, gsm8k
from segcredit.rewards.math import math as math_reward
from segcredit.types import RewardFn

REWARDS: Registry[Callable[..., RewardFn]] = Registry(
    "reward",
    {
        "math": math_reward,
        "geo3k": geo3k,
        "geo3k_strict": geo3k_strict,
        "gsm8k": gsm8k,
        "exact": ExactReward,
    },
)
"""Built-in rewards by name."""

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
    """Make a reward from a name, a name with settings, or a function.

    Args:
        spec: A built-in name; ``file.py:function`` or ``package.module:function``, which runs in a
            process of its own (:class:`CustomReward`); ``{"name": "math", "deadline": 2.0}``; a
            reward object; or a function in TRL's signature.
    """
    if isinstance(spec, type):
        raise ValueError(f"a reward is an object, not a class; pass {spec.__name__}().")
    if isinstance(spec, RewardFn):
        return spec
    if callable(spec):
        return CustomReward(spec)
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"a reward with settings needs a name: {{'name': 'math', …}}; got {spec!r}."
        )
    if not names_code(name):
        return REWARDS.make(name, settings)
    make = partial(CustomReward, name)
    require_settings(f"reward {name}", settings, make)
    return make(**settings)


def compares_answers(reward: object) -> bool:
    """Whether a reward is built in, so that each row must have exactly one answer."""
    return isinstance(reward, MathReward | ExactReward)
