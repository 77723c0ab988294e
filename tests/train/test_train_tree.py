"""SPO's tree, really sampled: who continues whom, what branches are worth, what is learned from."""

from typing import Any

import pytest
import torch
from train.small import SMALL, recipe
from train.test_train_restem import step

from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context, collect
from segcredit.train.metrics import Metrics, RolloutBatch, describe_rewards
from segcredit.train.stages import next_prompts, stage_of
from segcredit.train.state import State

TREE: dict[str, Any] = {
    "rollout": {
        "prompts": 5,
        "max_tokens": 24,
        "tree": {"branching": [3, 2, 3], "tokens": 6},
    }
}


def begun(folder, **changes: Any) -> State:
    made = recipe(SMALL["chains"], "spo_tree", **{**TREE, **changes})
    state = build(make_plan(made), Policy.from_pretrained(folder))
    state.stage = len(made.stages) - 1
    stage_of(state, made.stages[-1]).enter()
    return state


@pytest.fixture
def sampled(warm) -> tuple[State, RolloutBatch]:
    state = begun(warm("chains"))
    found = collect(Context(state, Metrics(), ("test",)), next_prompts(state), state.columns)
    return state, found


def above(collected: RolloutBatch) -> torch.Tensor:
    """The node under which each branch hangs, numbered."""
    rollouts = collected.rollouts
    return torch.where(rollouts.parent >= 0, rollouts.parent, len(rollouts) + rollouts.group)


def test_siblings_advantages_add_up_to_nothing(sampled) -> None:
    state, collected = sampled
    for normalize in (False, True):
        algorithm = type(state.algorithm)(
            **{**vars(state.algorithm), "credit": type(state.algorithm.credit)(normalize)}
        )
        batch = algorithm.prepare(collected.rollouts)
        advantage = batch.credit.advantage[:, 0]
        node = above(collected)
        total = torch.zeros(int(node.max()) + 1).index_add(0, node, advantage)
        assert float(advantage.abs().max()) > 0.2
        assert float(total.abs().max()) < 1e-5
        siblings = torch.bincount(node)
        assert set(siblings[siblings > 0].tolist()) == {3, 2}
    within = torch.where(collected.rollouts.mask, batch.credit.advantage, advantage[:, None])
    assert torch.equal(within, advantage[:, None].expand_as(within)), "one number per branch"


def test_branches_continue_their_parents(sampled) -> None:
    state, collected = sampled
    rollouts, ends = collected.rollouts, set(state.policy.end_tokens)
    length = rollouts.mask.sum(dim=1)
    has_children = set(rollouts.parent.tolist())
    for row, parent in enumerate(rollouts.parent.tolist()):
        read, prompt = rollouts.prompts[row].tokens, rollouts.prompts[row].prompt
        own = rollouts.tokens[row][rollouts.mask[row]]
        if parent < 0:
            assert torch.equal(read, state.policy.encode(prompt).tokens)
        else:
            before = rollouts.tokens[parent][rollouts.mask[parent]]
            assert torch.equal(read, torch.cat([rollouts.prompts[parent].tokens, before]))
            assert rollouts.group[row] == rollouts.group[parent]
        ended = int(own[-1]) in ends
        if row in has_children:
            assert not ended
            assert length[row] == 6
            assert not rollouts.truncated[row]
        else:
            assert ended != bool(rollouts.truncated[row])
    assert len(has_children) > 10
    with torch.no_grad():
        logp, _ = state.policy.score(rollouts, 1.0)
    assert float((logp - rollouts.logp_old)[rollouts.mask].abs().max()) < 1e-4


def naive_value(collected: RolloutBatch, row: int) -> float:
    below = [i for i, x in enumerate(collected.rollouts.parent.tolist()) if x == row]
    if not below:
        return collected.rewards[row].value
    return sum(naive_value(collected, i) for i in below) / len(below)


def test_values_are_means_of_what_follows_and_credit_their_differences(sampled) -> None:
    state, collected = sampled
    rollouts = collected.rollouts
    batch = state.algorithm.prepare(rollouts)
    for row, parent in enumerate(rollouts.parent.tolist()):
        value = naive_value(collected, row)
        assert float(rollouts.reward[row]) == pytest.approx(value, abs=1e-6)
        assert collected.rewards[row].value == pytest.approx(value, abs=1e-6)
        if parent >= 0:
            expected = value - naive_value(collected, parent)
        else:
            group = (rollouts.parent < 0) & (rollouts.group == rollouts.group[row])
            roots = [naive_value(collected, i) for i in group.nonzero().flatten().tolist()]
            expected = value - sum(roots) / len(roots)
        assert float(batch.credit.advantage[row, 0]) == pytest.approx(expected, abs=1e-6)


def test_what_is_measured_is_the_policy_not_the_trees_shape(sampled) -> None:
    """Each prompt's value counts once, however often its responses branched."""
    _, collected = sampled
    rollouts = collected.rollouts
    roots = []
    for prompt in range(5):
        rows = ((rollouts.parent < 0) & (rollouts.group == prompt)).nonzero().flatten().tolist()
        roots.append(sum(naive_value(collected, row) for row in rows) / len(rows))
    measured = describe_rewards(collected)
    assert measured["reward"] == pytest.approx(sum(roots) / 5, abs=1e-6)
    assert measured["accuracy"] == pytest.approx(measured["reward"], abs=1e-6)
    assert measured["tree/branches"] == len(rollouts)
    assert measured["tree/tokens"] == int(rollouts.mask.sum())
    assert measured["response_length_max"] <= 24


def test_branches_without_credit_are_not_learned_from(warm) -> None:
    state = begun(warm("chains"))
    stepped = step(state)
    advantage = stepped.batch.credit.advantage[:, 0]
    assert stepped.metrics["selected/items"] == int((advantage.abs() > 1e-6).sum())
    assert 0 < stepped.metrics["selected/items"] < len(advantage)
    moved = (stepped.logp_new - stepped.batch.rollouts.logp_old).abs().amax(dim=1)
    assert float(moved[advantage.abs() <= 1e-6].max()) == 0.0
    assert stepped.metrics["agreement/ratio_error"] < 1e-4
    assert len(stepped.sampled.responses) == len(stepped.batch.rollouts)


def test_golden_tree() -> None:
    """Leaves [[1, 0], [0, 0]]: V = .25; .5, 0 (ALGORITHMS 4.10), by way of the trainer's grades."""
    from segcredit.train.tree import Node, grade_tree
    from segcredit.types import Reward, Rollouts

    state = build(make_plan(recipe(SMALL["chains"], "spo_tree", **TREE)))
    prompt = state.policy.encode(state.train.take(0, 1)[0])
    nothing = torch.zeros(0, dtype=torch.long)
    parent = torch.tensor([-1, -1, 0, 0, 1, 1])
    origins = [Node(prompt, nothing, prompt, 0, row) for row in parent.tolist()]
    ones = torch.ones(6, 1, dtype=torch.long)
    rollouts = Rollouts(
        tokens=ones,
        mask=ones.bool(),
        logp_old=torch.full((6, 1), -1.0),
        reward=torch.zeros(6),
        group=torch.zeros(6, dtype=torch.long),
        truncated=torch.zeros(6, dtype=torch.bool),
        parent=parent,
        logp_ref=torch.full((6, 1), -1.0),
        prompts=[prompt] * 6,
    )

    class Script:
        def __call__(self, responses):
            return [Reward(float(i == 0), "") for i in range(len(responses))]

        def close(self) -> None: ...

    state.reward = Script()
    tree = grade_tree(state, rollouts, origins)
    assert tree.rollouts.reward.tolist() == [0.5, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert tree.weight.tolist() == [0.0, 0.0, 0.25, 0.25, 0.25, 0.25]
    batch = state.algorithm.prepare(tree.rollouts)
    assert batch.credit.advantage[:, 0].tolist() == [0.25, -0.25, 0.5, -0.5, 0.0, 0.0]
