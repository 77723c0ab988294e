"""DPO and DPO+ in a run: pairs of the policy's own answers, against the policy it began as."""

from typing import Any

import pytest
import torch
from train.small import SMALL, recipe
from train.test_train_restem import Wrong, same, step, weights

from segcredit.columns import LOGP_REF
from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.metrics import Metrics
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.step import prepare

PAIRS: dict[str, Any] = {
    "rollout": {"prompts": 8, "samples": 4, "max_tokens": 24},
    "update": {"minibatches": 2},
}


def begun(folder, algorithm: Any, **changes: Any) -> State:
    made = recipe(SMALL["chains"], algorithm, **{**PAIRS, **changes})
    state = build(make_plan(made), Policy.from_pretrained(folder))
    state.stage = len(made.stages) - 1
    stage_of(state, made.stages[-1]).enter()
    return state


def spoil(policy: Policy | None) -> None:
    """So that it finds everything far less likely."""
    assert policy is not None
    with torch.no_grad():
        for x in policy.model.parameters():
            x.mul_(0.5)


@pytest.mark.slow
def test_dpo_plus_is_dpo_while_its_hinge_rests(warm) -> None:
    """The chosen responses are likelier than under π_ref, so λ = 50 changes not one bit."""
    found = []
    for algorithm in ("dpo", {"name": "dpo_positive", "penalty": 50.0}):
        state = begun(warm("chains"), algorithm)
        spoil(state.providers[LOGP_REF].reference)
        before = weights(state)
        measured = [step(state).metrics for _ in range(2)]
        assert not same(before, weights(state))
        found.append((measured, weights(state)))
    (plain, ours), (plus, theirs) = found
    assert [x["preference_loss"] for x in plain] == [x["preference_loss"] for x in plus]
    assert same(ours, theirs)


def test_dpo_plus_is_another_method_when_its_hinge_acts(warm) -> None:
    found = []
    for algorithm in ("dpo", {"name": "dpo_positive", "penalty": 50.0}):
        state = begun(warm("chains"), algorithm)
        with torch.no_grad():  # still near enough to answer, and everything is less likely
            for x in state.policy.model.parameters():
                x.mul_(0.97)
        found.append((step(state).metrics["preference_loss"], weights(state)))
    assert found[1][0] > found[0][0]
    assert not same(found[0][1], found[1][1])


def test_pairs_are_a_right_and_a_wrong_answer_to_one_question(warm) -> None:
    rollout = {"prompts": 16, "samples": 2, "max_tokens": 24}
    state = begun(warm("chains"), "dpo", rollout=rollout)
    first = weights(state)
    stepped = step(state)
    rollouts = stepped.sampled.rollouts
    pairs, without = 0, 0
    for prompt in range(16):
        mine = rollouts.reward[rollouts.group == prompt]
        right = int((mine == 1.0).sum())
        pairs += right * (2 - right)
        without += right in (0, 2)
    assert stepped.metrics["selected/items"] == pairs > 0
    assert stepped.metrics["selected/prompts_left_out"] == without > 0
    batch = state.algorithm.prepare(rollouts)
    chosen = batch.rollouts.select(torch.arange(0, 2 * pairs, 2))
    rejected = batch.rollouts.select(torch.arange(1, 2 * pairs, 2))
    assert torch.equal(chosen.group, rejected.group)
    assert (chosen.reward == 1.0).all()
    assert (rejected.reward < 1.0).all()
    step(state)
    assert not same(first, weights(state))
    assert same(first, list(state.providers[LOGP_REF].reference.model.parameters())), (
        "π_ref is the first policy"
    )


def test_without_a_pair_nothing_moves(warm) -> None:
    state = begun(warm("chains"), "dpo")
    before = weights(state)
    state.reward = Wrong()
    measured = step(state).metrics
    assert measured["selected/items"] == 0.0
    assert measured["selected/prompts_left_out"] == 8
    assert same(before, weights(state))


def test_fewer_pairs_than_mini_batches(warm) -> None:
    state = begun(warm("chains"), "dpo", update={"minibatches": 32})
    measured = step(state).metrics
    assert 0 < measured["selected/items"] < 32
    assert measured["policy/refused"] == 0.0


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_log_ratios_are_taken_at_the_sampling_temperature(temperature: float | None, warm) -> None:
    """The default follows VinePPO's code; ``temperature`` sets another one."""
    rollout = {**PAIRS["rollout"], "temperature": 0.6}
    algorithm = {"name": "dpo_positive", "temperature": temperature}
    state = begun(warm("chains"), algorithm, rollout=rollout)
    rollouts = step(state).sampled.rollouts
    with torch.no_grad():
        expected, _ = begun(warm("chains"), "dpo").policy.score(rollouts, temperature or 0.6)
    assert rollouts.logp_ref is not None
    assert float((expected - rollouts.logp_ref)[rollouts.mask].abs().max()) < 1e-5


@pytest.mark.slow
def test_pairs_are_drawn_by_the_runs_seed_and_step(warm) -> None:
    """Not by what torch drew before, so that a resumed run draws the same."""
    found = []
    for before, number in ((1, 0), (2, 0), (1, 1)):
        state = begun(warm("chains"), {"name": "dpo", "pairs_per_prompt": 1})
        torch.manual_seed(before)
        rollouts = collect(
            Context(state, Metrics(), ("test",)), state.train.take(0, 8), ()
        ).rollouts
        context = Context(state, Metrics(), ("optimize", number))
        learned = prepare(context, state.prepared, rollouts).learned
        assert learned is not None
        found.append(learned.rollouts.tokens)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])

    weights_after = []
    for before in (1, 2):
        state = begun(warm("chains"), {"name": "dpo", "pairs_per_prompt": 1})
        torch.manual_seed(before)
        step(state)
        weights_after.append(weights(state))
    assert same(*weights_after)


@pytest.mark.parametrize("name", ["dpo", "dpo_positive"])
def test_one_answer_makes_no_pair(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} compares the responses to one prompt, so"):
        recipe(SMALL["chains"], name)
