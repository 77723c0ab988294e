"""RestEM in a run: sample, keep what is right, imitate it from the first weights on."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from train.small import SMALL, recipe

from segcredit.core.losses import nll
from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context
from segcredit.train.metrics import Metrics, StepResult
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.step import update
from segcredit.types import Response, Reward

ROUNDS: dict[str, Any] = {
    "steps": 3,
    "rollout": {"prompts": 8, "samples": 4, "max_tokens": 24, "temperature": 0.7},
    "update": {"minibatches": 2, "epochs": 2},
}


class Wrong:
    """A reward for which nothing is right."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(0.0, "wrong", correct=False) for _ in responses]

    def close(self) -> None: ...


def begun(folder, algorithm: Any = "restem", **changes: Any) -> State:
    """At the first step of reinforcement learning."""
    made = recipe(SMALL["chains"], algorithm, **{**ROUNDS, **changes})
    state = build(make_plan(made), Policy.from_pretrained(folder))
    state.stage = len(made.stages) - 1
    stage_of(state, made.stages[-1]).enter()
    return state


def step(state: State) -> StepResult:
    _, stepped = stage_of(state, state.recipe.stages[-1]).step()
    state.step += 1
    state.stage_step += 1
    assert stepped is not None
    return stepped


def weights(state: State) -> list[torch.Tensor]:
    return [x.detach().clone() for x in state.policy.trained().values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def imitated(state: State, stepped: StepResult, number: int) -> list[torch.Tensor]:
    """The weights after imitating a step's right answers, from where this state stands."""
    batch = state.algorithm.prepare(stepped.sampled.rollouts)
    epochs = state.recipe.update.epochs
    trained = [x.name for x in state.optimizers()]
    update(
        Context(
            state,
            Metrics(),
            (
                "optimize",
                number,
            ),
        ),
        state.algorithm,
        batch,
        trained,
        epochs=epochs,
    )
    return weights(state)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_each_round_begins_at_the_first_weights(lora: Any, warm) -> None:
    if lora:
        pytest.importorskip("peft")
    small = SMALL["chains"]
    settings = {"model": {"tiny": small.tiny, **small.sizes, "lora": lora}}
    folder = warm("chains")
    state = begun(folder, **settings)
    first = weights(state)
    step(state)
    after_one = weights(state)
    second = step(state)
    after_two = weights(state)
    assert not same(first, after_one)
    again = begun(folder, **settings)
    assert same(weights(again), first)
    assert same(imitated(again, second, 1), after_two), "as if the first round had never been"
    assert same(weights(again), after_two)
    on = begun(folder, **settings)
    step(on)
    assert not same(imitated(on, second, 1), after_two), "going on would be another method"


def test_responses_come_from_the_round_before(warm) -> None:
    """Only the fit begins again; what it fits is drawn from the last policy."""
    state = begun(warm("chains"))
    step(state)
    drawn = copy.deepcopy(state.policy)
    rollouts = step(state).sampled.rollouts
    with torch.no_grad():
        logp, _ = drawn.score(rollouts, 0.7)
        before, _ = begun(warm("chains")).policy.score(rollouts, 0.7)
    assert float((logp - rollouts.logp_old)[rollouts.mask].abs().max()) < 1e-4
    assert float((before - rollouts.logp_old)[rollouts.mask].abs().max()) > 1e-2


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_what_is_kept_and_what_is_minimized(temperature: float | None, warm) -> None:
    """−log π at the sampling temperature, as in VinePPO's code, or at the one that is asked for."""
    algorithm = {"name": "restem", "temperature": temperature}
    state = begun(warm("chains"), algorithm, update={"minibatches": 1})
    stepped = step(state)
    rollouts = stepped.sampled.rollouts
    kept = [row for row in range(len(rollouts)) if rollouts.reward[row] == 1.0]
    assert 0 < len(kept) < len(rollouts)
    assert stepped.metrics["selected/items"] == len(kept)
    prompts = {int(x) for x in rollouts.group} - {int(rollouts.group[row]) for row in kept}
    assert stepped.metrics["selected/prompts_left_out"] == len(prompts)
    with torch.no_grad():
        logp, _ = begun(warm("chains")).policy.score(rollouts, temperature or 0.7)
    each = [float(nll(logp)[row][rollouts.mask[row]].mean()) for row in kept]
    assert stepped.metrics["nll"] == pytest.approx(sum(each) / len(each), abs=1e-5)
    assert "agreement/ratio_error" not in stepped.metrics
    assert len(stepped.batch.rollouts) == len(stepped.sampled.responses)


def test_without_a_right_answer_nothing_moves(warm) -> None:
    state = begun(warm("chains"))
    step(state)
    before = weights(state)
    state.reward = Wrong()
    measured = step(state).metrics
    assert same(weights(state), before), "not even back to the first weights"
    assert measured["selected/items"] == 0.0
    assert measured["selected/prompts_left_out"] == 8
    assert "nll" not in measured
