"""Dynamic sampling (rollout.refills), truncated responses without a gradient, soft penalty."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from train.small import SMALL, recipe, run_stage

from segcredit.algorithms import make_algorithm
from segcredit.config import RecipeError
from segcredit.models import Policy
from segcredit.rewards import MathReward
from segcredit.rewards.math import soft_length_penalty
from segcredit.train.build import build, make_plan
from segcredit.train.columns import weighted, without_truncated
from segcredit.train.metrics import RolloutBatch, varied_rewards
from segcredit.train.state import State
from segcredit.types import Outputs, Response, Reward, RewardFn, Rollouts

pytestmark = pytest.mark.usefixtures("unchecked")


class HalfHopeless:
    """Half of the prompts are never solved: their responses earn 0 whatever they say."""

    def __init__(self, inner: RewardFn) -> None:
        self.inner = inner

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        rewards = self.inner(responses)
        return [
            replace(x, value=0.0, correct=False) if hopeless(r) else x
            for x, r in zip(rewards, responses, strict=True)
        ]

    def close(self) -> None:
        self.inner.close()


def hopeless(response: Response) -> bool:
    return sum(map(ord, response.prompt.id)) % 2 == 0


def trained(folder: Any, steps: int, **rollout: int) -> tuple[State, list[dict[str, float]]]:
    settings = {"prompts": 16, "samples": 4, "max_tokens": 24, **rollout}
    made = recipe(SMALL["chains"], {"name": "grpo", "kl": 0.0}, steps=steps, rollout=settings)
    state = build(make_plan(made), Policy.from_pretrained(folder))
    state.reward = HalfHopeless(state.reward)
    last = len(made.stages) - 1
    return state, run_stage(state, last, made.stages[last])


def test_groups_without_spread_are_replaced(warm: Any) -> None:
    state, metrics = trained(warm("chains"), steps=3, refills=4)
    plain, without = trained(warm("chains"), steps=3)
    for step, other in zip(metrics, without, strict=True):
        assert step["refill/groups_found"] == 1.0
        assert 1 <= step["refill/batches"] <= 4
        assert step["refill/extra_tokens"] > 0
        seconds = sum(x for name, x in step.items() if name.startswith("time/"))
        tokens = 64 * step["response_length"] + step["refill/extra_tokens"]
        assert step["tokens_per_second"] * seconds == pytest.approx(tokens)
        assert step["groups/zero_std"] > 0.4, "reported of the first batch, before any selection"
        assert "refill/batches" not in other
    # the first batch is the same as without refills, so its accuracy is comparable
    assert metrics[0]["accuracy"] == without[0]["accuracy"]
    batches = sum(x["refill/batches"] for x in metrics)
    assert state.position == plain.position + 16 * batches
    assert state.position % 16 == 0


def test_a_limit_leaves_groups_without_spread(warm: Any) -> None:
    _, metrics = trained(warm("chains"), steps=2, refills=1, prompts=32, samples=2)
    for step in metrics:
        assert step["refill/batches"] <= 1
        assert 0 < step["refill/groups_found"] <= 1


def test_two_runs_with_refills_are_equal(warm: Any) -> None:
    (one, first), (other, second) = (trained(warm("chains"), steps=2, refills=3) for _ in range(2))
    for a, b in zip(one.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first[-1]["accuracy"] == second[-1]["accuracy"]


@pytest.mark.slow
def test_the_same_accuracy_in_fewer_updates(warm: Any) -> None:
    """Half of the prompts are hopeless: replacing them doubles what an update learns from.

    The accuracy on the prompts that can be solved, after every update; the cost is counted.
    """
    curves = {}
    for refills in (0, 4):
        _, metrics = trained(warm("chains"), steps=14, refills=refills)
        curves[refills] = [x["accuracy"] for x in metrics]
        if refills:
            extra = sum(x["refill/extra_tokens"] for x in metrics)
            assert extra > 0
    area = {key: sum(curve[4:]) / len(curve[4:]) for key, curve in curves.items()}
    assert area[4] > area[0] + 0.02, curves
    last = max(curves[0][-3:])
    reached = next(i for i, x in enumerate(curves[4]) if x >= last)
    assert reached < 13, curves


def test_joined_batches_by_hand() -> None:
    def part(lengths: list[int], reward: list[float], group: list[int]) -> RolloutBatch:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        rollouts = Rollouts.from_columns(
            mask,
            reward=torch.tensor(reward).float(),
            group=torch.tensor(group),
            entropy=mask.float(),
        )
        return RolloutBatch(rollouts, [None] * len(reward), [Reward(x, "") for x in reward])  # type: ignore[list-item]

    one, two = part([1, 2, 2, 1], [0, 1, 1, 1], [0, 0, 1, 1]), part([3, 1], [0.5, 0.5], [7, 7])
    varied = varied_rewards(one.rollouts.reward, one.rollouts.group)
    assert varied.tolist() == [True, True, False, False]
    assert not varied_rewards(two.rollouts.reward, two.rollouts.group).any()
    joined = RolloutBatch.join([one.select(varied.nonzero().flatten()), two])
    assert joined.rollouts.mask.sum(dim=1).tolist() == [1, 2, 3, 1]
    assert joined.rollouts.group.tolist() == [0, 0, 1, 1]
    assert joined.rollouts.reward.tolist() == [0, 1, 0.5, 0.5]
    assert [x.value for x in joined.rewards] == [0, 1, 0.5, 0.5]
    assert joined.rollouts.entropy is not None
    assert joined.rollouts.value is None


@pytest.mark.parametrize(
    "rollout", [{"samples": 1}, {"samples": 1, "tree": {"branching": [2, 2], "tokens": 4}}]
)
def test_refills_need_groups(rollout: dict[str, Any]) -> None:
    algorithm = "spo_tree" if "tree" in rollout else "sapo"
    with pytest.raises(RecipeError, match=r"rollout\.refills compares the rewards"):
        recipe(SMALL["chains"], algorithm, rollout={"prompts": 8, "refills": 2, **rollout})


def test_truncated_responses_have_no_gradient() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rollouts = Rollouts.from_columns(
        mask,
        logp_old=torch.full((2, 3), -1.0),
        logp_sampler=torch.full((2, 3), -1.2),
        reward=torch.tensor([0.0, 1.0]),
        group=torch.tensor([0, 0]),
        truncated=torch.tensor([True, False]),
    )
    algorithm = make_algorithm("grpo", kl=0.0)
    found = {}
    for name in ("all", "masked", "both"):
        batch = algorithm.prepare(rollouts)
        if name != "all":
            batch = without_truncated(batch)
        if name == "both":  # masks and importance weights multiply
            batch, _ = weighted(batch, 10.0)
        logp = rollouts.logp_old.clone().requires_grad_()
        algorithm.loss(Outputs(logp), algorithm.minibatch(batch)).policy.backward()
        found[name] = logp.grad
    assert (found["all"][0] != 0).all()
    assert (found["masked"][0] == 0).all()
    assert torch.equal(found["masked"][1], found["all"][1])
    assert torch.allclose(found["both"], found["masked"] * torch.exp(torch.tensor(0.2)))


def test_mask_truncated_is_for_methods_with_credit() -> None:
    with pytest.raises(ValueError, match=r"update\.mask_truncated weights advantages, but restem"):
        make_plan(recipe(SMALL["chains"], "restem", samples=2, update={"mask_truncated": True}))


def test_soft_length_penalty_is_dapos() -> None:
    """Limit 20,480 and interval 4,096, as in the paper."""
    for tokens, expected in ((16_000, 0), (16_384, 0), (18_432, 0.5), (20_480, 1), (30_000, 1)):
        assert soft_length_penalty(tokens, 20_480) == pytest.approx(expected)
    assert MathReward(length_penalty="soft").length_penalty == "soft"
    with pytest.raises(ValueError, match="None, 'authors' or 'soft'; got 'hard'"):
        MathReward(length_penalty="hard")  # type: ignore[arg-type]
