from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from grading import boxed

from segcredit.rewards import (
    REWARDS,
    CustomReward,
    ExactReward,
    MathReward,
    RewardError,
    geo3k,
    gsm8k,
    make_reward,
)
from segcredit.rewards.checks import grade
from segcredit.types import Response, Reward, RewardFn


@each(
    ("spec", "made"),
    [
        ("math", MathReward()),
        ("geo3k", geo3k()),
        ("geo3k_strict", MathReward(accuracy=0.9, format=0.1)),
        ("gsm8k", gsm8k()),
        ("exact", ExactReward()),
        ({"name": "exact", "extract": "hash"}, gsm8k()),
        ({"name": "math", "deadline": 2.0}, MathReward(deadline=2.0)),
        (
            {"name": "geo3k", "length_penalty": "authors"},
            MathReward(accuracy=0.9, format=0.1, length_penalty="authors", grader="mathruler"),
        ),
    ],
)
def test_by_name(spec: object, made: RewardFn) -> None:
    assert make_reward(spec) == made
    assert isinstance(made, RewardFn)


def test_every_name_makes_a_reward() -> None:
    for name in REWARDS.keys() - {"judge", "server"}:  # these need a URL
        assert make_reward(name)([boxed("12")])[0].correct is (name != "gsm8k")


def test_objects_are_taken_as_they_are() -> None:
    reward = ExactReward()
    assert make_reward(reward) is reward
    assert isinstance(make_reward(lambda completions: [1.0]), CustomReward)


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("spec", "message"),
    [
        ("maths", "unknown reward 'maths'. Did you mean 'math'"),
        (
            "xyz",
            "unknown reward 'xyz'. The rewards are: math, geo3k, geo3k_strict, gsm8k, exact, judge",
        ),
        ({"name": "math", "dedline": 2}, "no setting 'dedline'. Did you mean 'deadline'"),
        ({"name": "gsm8k", "workers": 2}, "no setting 'workers'. It has no settings"),
        (
            {"name": "f.py:score", "workers": 2},
            "no setting 'workers'. Its settings are: deadline, conv",
        ),
        ({"deadline": 2}, "needs a name"),
        (MathReward, r"not a class; pass MathReward\(\)"),
    ],
)
def test_mistakes_are_answered_with_the_nearest(spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_reward(spec)


class Constant:
    """A reward object that returns what it was made with."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def __call__(self, responses: Sequence[Response]) -> Any:
        return self.returned

    def close(self) -> None:
        """Do nothing."""


def graded(value: object) -> Reward:
    """Make a reward with any value, which the shape checks of the tests would refuse."""
    made = Reward(0.0, "")
    object.__setattr__(made, "value", value)
    return made


NOT_NUMBERS = [(float("nan"), "nan"), (float("-inf"), "-inf"), ("1", "str '1'")]


@each(("value", "shown"), NOT_NUMBERS)
@pytest.mark.parametrize("kind", ["object", "function", "file"])
def test_a_single_reward_that_is_no_number_is_refused(
    kind: str, value: Any, shown: str, tmp_path: Path
) -> None:
    """All kinds of rewards are refused with the same words, and each is named."""

    def mine(completions: list[str]) -> list[Any]:
        return [0.5, value]

    path = tmp_path / "file.py"
    code = repr(value) if isinstance(value, str) else f"float({str(value)!r})"
    path.write_text(f"def mine(completions):\n    return [0.5, {code}]\n")
    made, name = {
        "object": (Constant([Reward(0.5, ""), graded(value)]), "the reward 'Constant'"),
        "function": (mine, f"the reward function {mine.__qualname__}"),
        "file": (f"{path}:mine", "the reward function file.py:mine"),
    }[kind]
    reward = make_reward(made)
    with pytest.raises(RewardError) as error:
        grade(reward, [boxed("12"), boxed("13")])
    reward.close()
    assert str(error.value) == (
        f"{name} must return finite numbers; it returned {shown} on prompt 'p1', response "
        f"'so \\boxed{{13}}.'. Return 0.0 for a response that it cannot grade."
    )


@each(
    ("returned", "message"),
    [
        (0.5, "must return a list with one Reward per response; it returned float 0.5 on prompt"),
        (None, "must return a list with one Reward per response; it returned NoneType None"),
        ([], "must return one Reward per response; it returned 0 for 1, beginning on prompt"),
        ([0.5], "must return Reward objects; it returned float 0.5 on prompt"),
        ([graded(None)], "must return finite numbers; it returned NoneType None on prompt"),
        ([graded(10**400)], "must return finite numbers; it returned int 1000"),
    ],
)
def test_a_reward_object_returns_one_reward_per_response(returned: Any, message: str) -> None:
    with pytest.raises(RewardError) as error:
        grade(Constant(returned), [boxed("12")])
    assert str(error.value).startswith(f"the reward 'Constant' {message}")


def test_numbers_of_other_libraries_are_numbers() -> None:
    for value in (1, True, np.float32(0.5), torch.tensor(0.5)):
        (made,) = grade(Constant([graded(value)]), [boxed("12")])
        assert made.value is value
