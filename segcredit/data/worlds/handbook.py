"""A table of which rule holds where, and how often demonstrations get it right."""

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

RULES = {"keep": 1, "twice": 2, "back": -1, "drop": 0, "thrice": 3}
"""What an amount is multiplied by."""

Context = tuple[str, str]
"""What the right rule depends on, and nothing else."""


class Guideline(NamedTuple):
    """What to do in one context, and what is done."""

    right: str
    tempting: str
    """What is done instead."""
    rate: float
    """Share of the demonstrations that are right here."""


@lru_cache(maxsize=64)
def handbook(
    seed: str,
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    rules: tuple[str, ...],
    traps: float,
    plain_right: float,
    trap_right: float,
) -> dict[Context, Guideline]:
    """A guideline for each context, drawn once: the right rules are equally frequent."""
    rng = random.Random(f"handbook|{seed}")
    contexts = list(product(rows, columns))
    rng.shuffle(contexts)
    number = round(traps * len(contexts))
    made = {}
    for place, context in enumerate(contexts):
        right = rules[place % len(rules)]
        tempting = rng.choice([rule for rule in rules if rule != right])
        made[context] = Guideline(right, tempting, trap_right if place < number else plain_right)
    return made


def effect(rule: str, amount: int, modulus: int) -> int:
    """What the rule makes of an amount."""
    return RULES[rule] * amount % modulus


def ambiguous(rules: Sequence[str], most: int, modulus: int) -> tuple[str, str, int] | None:
    """Two rules and an amount of which they make the same, if there are any."""
    for amount in range(1, most + 1):
        made: dict[int, str] = {}
        for rule in rules:
            other = made.setdefault(effect(rule, amount, modulus), rule)
            if other != rule:
                return other, rule, amount
    return None
