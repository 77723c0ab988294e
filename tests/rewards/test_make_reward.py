import pytest
from each import each
from grading import boxed

from segcredit.rewards import (
    REWARDS,
    CustomReward,
    ExactReward,
    MathReward,
    geo3k,
    gsm8k,
    make_reward,
)
from segcredit.types import RewardFn


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
