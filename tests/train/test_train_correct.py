"""What a reward calls correct: in the rollouts, in the metrics, and nowhere if it does not say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from train.small import SMALL, recipe

from segcredit.train.build import build, make_plan
from segcredit.train.collect import collect
from segcredit.train.metrics import Metrics
from segcredit.train.state import State
from segcredit.types import Response, Reward


@pytest.fixture(scope="module")
def state() -> State:
    made = recipe(SMALL["chains"], rollout={"prompts": 4, "max_tokens": 4})
    return build(make_plan(made))


@dataclass
class Told:
    """Grades the first responses with these rewards, the others with the last of them."""

    rewards: Sequence[Reward]

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        rest = len(responses) - len(self.rewards)
        return [*self.rewards, *[self.rewards[-1]] * rest][: len(responses)]

    def close(self) -> None: ...


RIGHT, WRONG = Reward(1.0, "", True), Reward(0.0, "", False)
NO_VERDICT = Reward(0.0, "stopped after 5 s", False, verdict=False)
SILENT = Reward(0.5, "")


def collected(state: State, *rewards: Reward) -> Any:
    graded = replace(state, reward=Told(rewards))
    return collect(graded, state.train.take(0, 4), frozenset(), Metrics(), "test")


def test_rollouts_carry_what_is_correct(state: State) -> None:
    assert collected(state, RIGHT, WRONG).rollouts.correct.tolist() == [True, False, False, False]
    assert collected(state, SILENT).rollouts.correct is None
    assert collected(state, RIGHT, SILENT).rollouts.correct is None
