"""Reward functions: mathematics, equal text, a judge, a server, or a function of your own.

>>> reward = make_reward("geo3k")
>>> reward = make_reward({"name": "math", "deadline": 2.0})
>>> reward = make_reward(["math", {"name": "exact", "weight": 0.1}])  # a weighted sum
>>> reward = make_reward("my_rewards.py:score")  # doctest: +SKIP
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from segcredit.registry import Registry, names_code, require_settings
from segcredit.rewards.checks import RewardError, require_weight
from segcredit.rewards.custom import CustomReward
from segcredit.rewards.extract import ExactReward, boxed, format_ok, hash_answer
from segcredit.rewards.math import MathReward, authors_length_penalty, geo3k, geo3k_strict, gsm8k
from segcredit.rewards.math import math as math_reward
from segcredit.rewards.remote import JudgeReward, ServerReward
from segcredit.rewards.several import WeightedRewards
from segcredit.types import RewardFn

REWARDS: Registry[Callable[..., RewardFn]] = Registry(
    "reward",
    {
        "math": math_reward,
        "geo3k": geo3k,
        "geo3k_strict": geo3k_strict,
        "gsm8k": gsm8k,
        "exact": ExactReward,
        "judge": JudgeReward,
        "server": ServerReward,
    },
)
"""Built-in rewards by name."""

__all__ = [
    "REWARDS",
    "CustomReward",
    "ExactReward",
    "JudgeReward",
    "MathReward",
    "RewardError",
    "ServerReward",
    "WeightedRewards",
    "authors_length_penalty",
    "boxed",
    "compares_answers",
    "format_ok",
    "functions_in",
    "geo3k",
    "geo3k_strict",
    "gsm8k",
    "hash_answer",
    "make_reward",
    "parts_of",
    "require_servers",
]


RewardSpec = str | Mapping[str, Any] | Callable[..., Any]
"""A reward by name, a name with settings, a function, or a reward object."""


def make_reward(
    spec: RewardSpec | Sequence[RewardSpec], weights: Sequence[float] | None = None
) -> RewardFn:
    """Make a reward from a name, a name with settings, a function, or a list of these.

    Args:
        spec: A built-in name; ``file.py:function`` or ``package.module:function``, which runs in a
            process of its own (``CustomReward``); ``{"name": "math", "deadline": 2.0}``; a
            reward object; or a function in TRL's signature. A list is a weighted sum
            (``WeightedRewards``), whose items may also have a ``weight`` and a ``label``.
        weights: Weight of each item of a list. None: those of the items, 1 by default.
    """
    if isinstance(spec, list | tuple):
        return _weighted(spec, weights)
    if weights is not None:
        raise ValueError(
            f"reward_weights belong to a list of rewards; got the single reward {spec!r}. Pass "
            f"reward=[…], or remove reward_weights."
        )
    if isinstance(spec, type):
        raise ValueError(f"a reward is an object, not a class; pass {spec.__name__}().")
    if isinstance(spec, RewardFn):
        return spec
    if callable(spec):
        return CustomReward(spec)
    if not isinstance(spec, str | Mapping):
        raise ValueError(
            f"a reward is a name, a name with settings, a function or a reward object; got "
            f"{spec!r}. Pass for example reward='math'."
        )
    settings = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"a reward with settings needs a name: {{'name': 'math', …}}; got {spec!r}."
        )
    if in_list := [key for key in ("weight", "label") if key in settings]:
        raise ValueError(
            f"a {in_list[0]} belongs to an item of a list of rewards; got the single reward "
            f"{spec!r}. Write [{{name: {name}, {in_list[0]}: {settings[in_list[0]]}}}, …], or "
            f"remove it."
        )
    if not names_code(name):
        return REWARDS.make(name, settings)
    make = partial(CustomReward, name)
    require_settings(f"reward {name}", settings, make)
    return make(**settings)


def _weighted(specs: Sequence[Any], weights: Sequence[float] | None) -> WeightedRewards:
    if not specs:
        raise ValueError("a list of rewards needs at least one; got an empty list.")
    if weights is not None and not hasattr(weights, "__len__"):
        raise ValueError(
            f"reward_weights must be a list with one number per reward; got {weights!r} for "
            f"{len(specs)}. Pass, for example, reward_weights={[1.0] * len(specs)}."
        )
    if weights is not None and len(weights) != len(specs):
        raise ValueError(
            f"reward_weights must have one number per reward; got {len(weights)} for {len(specs)}."
        )
    made: dict[str, RewardFn] = {}
    known: dict[str, float] = {}
    for number, spec in enumerate(specs):
        rest = dict(spec) if isinstance(spec, Mapping) else spec
        weight, label = 1.0, None
        if isinstance(rest, dict):
            if weights is not None and "weight" in rest:
                raise ValueError(
                    f"the weight of a reward must be set only once; got reward_weights and "
                    f"{spec!r}. Remove one of the two."
                )
            weight, label = rest.pop("weight", 1.0), rest.pop("label", None)
        weight = weight if weights is None else weights[number]
        require_weight(f"the weight of reward {number + 1}", weight)
        label = _label(rest) if label is None else label
        if not isinstance(label, str) or not LABEL.fullmatch(label):
            raise ValueError(
                f"the label of a reward may contain letters, digits, '_', '.' and '-'; got "
                f"{label!r}. Set another one: {{name: …, label: …}}."
            )
        if label in made:
            raise ValueError(
                f"each reward of a list needs a label of its own, since it is logged as "
                f"reward/LABEL; got {label!r} twice. Set another one: {{name: …, label: "
                f"{label}_2}}."
            )
        made[label], known[label] = make_reward(rest), float(weight)
    return WeightedRewards(made, known)


LABEL = re.compile(r"[\w.-]+")
"""Allowed labels of rewards; a label is part of a metric's name."""


def _label(spec: Any) -> str:
    """Return the default label of a reward: its name, or that of its function or class."""
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    if isinstance(name, str):
        return name.rpartition(":")[2]
    own = getattr(name, "__name__", type(name).__name__)
    return re.sub(r"[^\w.-]", "", str(own)) or "function"


def parts_of(reward: object) -> Iterator[object]:
    """Yield the rewards of a weighted sum; for any other reward, the reward itself."""
    if isinstance(reward, WeightedRewards):
        for part in reward.rewards.values():
            yield from parts_of(part)
    else:
        yield reward


def functions_in(reward: object) -> list[CustomReward]:
    """Return the reward functions of your own in a reward, to check their parameters."""
    return [x for x in parts_of(reward) if isinstance(x, CustomReward)]


def require_servers(reward: object) -> None:
    """Raise RewardError unless the servers that a reward asks can be reached."""
    for part in parts_of(reward):
        if isinstance(part, JudgeReward | ServerReward):
            part.require_reachable()


def compares_answers(reward: object) -> bool:
    """Whether a reward is or contains a built-in one, so that each row must have one answer."""
    return any(isinstance(x, MathReward | ExactReward) for x in parts_of(reward))
