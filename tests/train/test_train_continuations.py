"""Monte-Carlo values in a run: which beginnings are continued, what they cost, what they are."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from train.small import SMALL, recipe, run_stage

from segcredit.core.segments import Segments
from segcredit.models import Policy
from segcredit.partition import FixedLength
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, IndependentSampler, collect
from segcredit.train.continuations import distinct_prefixes
from segcredit.train.metrics import Metrics
from segcredit.train.stages import next_prompts
from segcredit.train.state import State
from segcredit.types import MonteCarlo, Response, Reward, Rollouts

VINE = {"name": "vineppo", "samples": 4, "partition": {"name": "fixed", "size": 4}, "kl": 0.0}
GRADED = {**VINE, "truncated_reward": None}
"""A model that was not trained hardly ever ends a response, and the golden numbers want rewards."""
GOLDEN_VALUES = [0.5, 0.75, 0.25]
"""V̂ of three states; the response earned 1 (ALGORITHMS 4.9)."""


def made(algorithm: Any = VINE, samples: int = 4, **rollout: Any) -> State:
    settings = {"prompts": 6, "samples": samples, "max_tokens": 14, **rollout}
    return build(make_plan(recipe(SMALL["chains"], algorithm, rollout=settings)))


def collected(state: State) -> Rollouts:
    return collect(Context(state, Metrics(), ("test",)), next_prompts(state), ()).rollouts


def estimator(state: State, *purpose: object, log: Metrics | None = None) -> MonteCarlo:
    """The estimator that the method gets in ``prepare``."""
    context = Context(state, log or Metrics(), purpose or ("test",))
    found = state.prepared.monte_carlo(context)
    assert found is not None
    return found


def cut(rollouts: Rollouts) -> Segments:
    return FixedLength(4)(rollouts)


def naive(rollouts: Rollouts, segments: Segments) -> list[tuple[int, int, tuple[int, ...]]]:
    """(unit, prompt, beginning) of every unit, first units first."""
    found = []
    for unit in range(segments.width):
        for row in range(len(rollouts)):
            if unit < int(segments.num[row]):
                first = int(segments.start[row, unit])
                begun = tuple(rollouts.tokens[row, :first].tolist())
                found.append((unit, int(rollouts.group[row]), begun))
    return found


def test_equal_beginnings_of_one_prompt_are_one(warm) -> None:
    state = build(make_plan(made().recipe), Policy.from_pretrained(warm("chains")))
    rollouts = collected(state)
    segments = cut(rollouts)
    found = distinct_prefixes(rollouts, segments, segments.mask)
    wanted = naive(rollouts, segments)
    assert len(found.prefixes) == len({(prompt, begun) for _, prompt, begun in wanted})
    assert 6 < len(found.prefixes) < len(wanted) - 3 * 6, "prompts once, and more that is shared"
    assert found.left_out == 0
    assert torch.equal(found.number >= 0, segments.mask)
    for row, unit in segments.mask.nonzero().tolist():
        begun = found.prefixes[int(found.number[row, unit])]
        assert begun.prompt is rollouts.prompts[row]
        assert torch.equal(begun.tokens, rollouts.tokens[row, : segments.start[row, unit]])
    assert int(found.number[0, 0]) == int(found.number[3, 0]) != int(found.number[4, 0])


def test_a_budget_is_spent_on_first_units_first() -> None:
    rollouts = collected(made())
    segments = cut(rollouts)
    wanted = list(dict.fromkeys((prompt, begun) for _, prompt, begun in naive(rollouts, segments)))
    found = distinct_prefixes(rollouts, segments, segments.mask, most=9)
    assert [(x.prompt.prompt.id, tuple(x.tokens.tolist())) for x in found.prefixes] == [
        (rollouts.prompts[4 * prompt].prompt.id, begun) for prompt, begun in wanted[:9]
    ]
    afforded = {x: n for n, x in enumerate(wanted[:9])}
    order = segments.mask.T.nonzero().tolist()
    assert [int(found.number[row, unit]) for unit, row in order] == [
        afforded.get((prompt, begun), -1) for _, prompt, begun in naive(rollouts, segments)
    ]
    assert found.left_out == int((segments.mask & (found.number < 0)).sum()) > 0


@dataclass
class Scripted:
    """Grades in the order in which it is asked."""

    said: list[float]
    asked: list[Response] = field(default_factory=list)

    def __call__(self, responses: list[Response]) -> list[Reward]:
        self.asked += responses
        return [Reward(self.said.pop(0), "scripted") for _ in responses]

    def close(self) -> None: ...


def golden_case(state: State) -> tuple[Rollouts, Scripted]:
    """One response of three units that earned 1."""
    rollouts = collected(state)
    row = int((cut(rollouts).num == 3).nonzero()[0])
    one = rollouts.select(torch.tensor([row])).replace(reward=torch.ones(1))
    said = [float(n < 4 * value) for value in GOLDEN_VALUES for n in range(4)]
    state.reward = Scripted(said)
    return one, state.reward


def test_the_golden_numbers_come_out_of_the_trainers_sampler() -> None:
    state = made(GRADED, max_tokens=12)
    one, reward = golden_case(state)
    log = Metrics()
    batch = state.algorithm.prepare(one, estimator(state, log=log))
    found = batch.credit.advantage[0, batch.credit.segments.start[0]]
    assert found.tolist() == pytest.approx([0.25, -0.5, 0.75])
    assert len(reward.asked) == 12
    for place, response in enumerate(reward.asked):
        begun = one.tokens[0, : 4 * (place // 4)].tolist()
        assert response.text.startswith(state.policy.codec.decode(begun))
        assert response.prompt is one.prompts[0].prompt
        assert len(begun) < response.num_tokens <= 12, "the limit counts the beginning"
        assert response.max_tokens == 12
    measured = log.result()
    assert measured["continuations/count"] == 12
    assert measured["continuations/prefixes"] == 3
    assert measured["continuations/value"] == 0.5
    drawn = sum(x.num_tokens for x in reward.asked) - 4 * (4 + 8)
    assert measured["continuations/tokens"] == drawn


def test_the_golden_numbers_when_the_budget_ends_the_estimates() -> None:
    state = made(GRADED, prefixes=1, max_tokens=12)
    one, reward = golden_case(state)
    log = Metrics()
    batch = state.algorithm.prepare(one, estimator(state, log=log))
    found = batch.credit.advantage[0, batch.credit.segments.start[0]]
    assert found.tolist() == pytest.approx([0.5, 0.0, 0.0])
    assert len(reward.asked) == 4
    assert log.result()["continuations/left_out"] == 2


@pytest.mark.parametrize("algorithm", [VINE, GRADED])
def test_what_a_truncated_continuation_earns(algorithm: Any, warm) -> None:
    """Nothing, whatever it says: every response is graded 1 here. Or its grade, on request."""
    plan = make_plan(made(algorithm, max_tokens=16).recipe)
    state = build(plan, Policy.from_pretrained(warm("chains")))
    rollouts = collected(state)
    reward = state.reward = Scripted([1.0] * 10_000)
    segments = cut(rollouts)
    value = state.prepared.monte_carlo(Context(state, Metrics(), ("test",)))(
        rollouts, segments, segments.mask, 4
    )
    finished = torch.tensor([not x.truncated for x in reward.asked]).float().view(-1, 4)
    assert 0.0 < float(finished.mean()) < 1.0
    number = distinct_prefixes(rollouts, segments, segments.mask).number
    expected = finished.mean(dim=1) if algorithm is VINE else torch.ones(len(finished))
    assert torch.equal(value[segments.mask], expected[number[segments.mask]])


@pytest.mark.slow
def test_values_are_what_further_responses_earn(warm) -> None:
    """V̂ of a prompt against as many responses drawn outright, and one that is lost is lost."""
    small = made(samples=1, max_tokens=24).recipe
    state = build(make_plan(small), Policy.from_pretrained(warm("chains")))
    prompts = state.train.take(0, 2)
    found = collect(
        Context(state, Metrics(), ("one",)), prompts, (), IndependentSampler(1)
    ).rollouts
    segments = cut(found)
    value = state.prepared.monte_carlo(Context(state, Metrics(), ("test",)))(
        found, segments, segments.mask, 600
    )
    outright = collect(
        Context(state, Metrics(), ("many",)), prompts, (), IndependentSampler(600)
    ).rollouts
    for row in range(2):
        expected = float(outright.reward[outright.group == row].mean())
        assert 0.05 < expected < 0.95
        assert float(value[row, 0]) == pytest.approx(expected, abs=4 * (0.25 / 300) ** 0.5)
        last = int(segments.num[row]) - 1
        assert abs(float(value[row, last]) - float(found.reward[row])) < 0.1, "nothing is open"


def test_chance_depends_on_the_purpose_alone() -> None:
    state = made()
    rollouts = collected(state)
    segments = cut(rollouts)
    state.reward = ByLength()

    def values(step: int) -> torch.Tensor:
        return estimator(state, "optimize", step)(rollouts, segments, segments.mask, 2)

    assert torch.equal(values(3).nan_to_num(9), values(3).nan_to_num(9))
    assert not torch.equal(values(3).nan_to_num(9), values(4).nan_to_num(9))


class ByLength:
    def __call__(self, responses: list[Response]) -> list[Reward]:
        return [Reward(x.num_tokens / 100, "") for x in responses]

    def close(self) -> None: ...


def test_a_step_says_what_its_continuations_cost() -> None:
    state = made(prefixes=12)
    (measured,) = run_stage(state, 1, state.recipe.stages[-1].model_copy(update={"steps": 1}))
    assert measured["continuations/prefixes"] == 12
    assert measured["continuations/count"] == 48
    assert measured["continuations/left_out"] > 0
    assert 48 <= measured["continuations/tokens"] <= 48 * 14
    assert measured["time/continue"] > measured["time/credit"] > 0
