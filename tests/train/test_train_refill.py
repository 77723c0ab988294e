"""Dynamic sampling (rollout.refills), truncated responses without a gradient, soft penalty."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from train.small import SMALL, recipe, run_stage

from segcredit.algorithms import make_algorithm
from segcredit.config import RecipeError
from segcredit.core.group import group_zscore
from segcredit.models import Policy
from segcredit.rewards import MathReward
from segcredit.rewards.math import soft_length_penalty
from segcredit.train.build import build, make_plan
from segcredit.train.collect import Context
from segcredit.train.columns import weighted, without_truncated
from segcredit.train.metrics import Metrics, RolloutBatch, varied, varied_rewards
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.types import Outputs, Prompt, Response, Reward, RewardFn, Rollouts

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
    return hopeless_prompt(response.prompt)


def hopeless_prompt(prompt: Prompt) -> bool:
    return sum(map(ord, prompt.id)) % 2 == 0


def prepared(folder: Any, steps: int, **rollout: Any) -> tuple[State, Any]:
    """A run at the beginning of its last stage, and that stage."""
    settings = {"prompts": 16, "samples": 4, "max_tokens": 24, **rollout}
    made = recipe(SMALL["chains"], {"name": "grpo", "kl": 0.0}, steps=steps, rollout=settings)
    state = build(make_plan(made), Policy.from_pretrained(folder))
    state.reward = HalfHopeless(state.reward)
    state.stage, state.stage_step = len(made.stages) - 1, 0
    stage_of(state).enter()
    return state, made.stages[-1]


def trained(folder: Any, steps: int, **rollout: Any) -> tuple[State, list[dict[str, float]]]:
    state, stage = prepared(folder, steps, **rollout)
    return state, run_stage(state, state.stage, stage)


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

    Accuracy on held-out prompts that can be solved, after every update, with the same random
    numbers. The cost is counted: dynamic sampling needs fewer updates, not fewer tokens.
    """
    target, reached, tokens = 0.65, {}, {}
    for refills in (0, 4):
        state, stage = prepared(warm("chains"), steps=22, refills=refills)
        solvable = [x for x in state.train.take(10_000, 400) if not hopeless_prompt(x)][:128]
        spent, curve = 0.0, []
        for _ in range(stage.steps):
            metrics = stage_of(state, stage).step()[0]
            state.stage_step += 1
            state.step += 1
            spent += 64 * metrics["response_length"] + metrics.get("refill/extra_tokens", 0.0)
            found = Context(state, Metrics(), ("held out",)).sample(solvable, samples=2)
            assert found.rollouts.correct is not None
            curve.append(float(found.rollouts.correct.float().mean()))
            if curve[-1] >= target and refills not in reached:
                reached[refills], tokens[refills] = len(curve), spent
        print(f"refills={refills}: {tokens.get(refills)} tokens, {curve}")
        assert refills in reached, curve
    print(f"updates to {target}: {reached}; tokens: {tokens}")
    assert reached[4] < reached[0], (reached, tokens)


class LongIsWorse(HalfHopeless):
    """A penalty after grading, as DAPO's for length, that differs within every group."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        rewards = super().__call__(responses)
        return [
            replace(x, value=x.value - 0.01 * (place % 4) - 0.001 * r.num_tokens)
            for place, (x, r) in enumerate(zip(rewards, responses, strict=True))
        ]


def test_a_length_penalty_keeps_no_group(warm: Any) -> None:
    """DAPO's condition: 0 < number of correct responses < G."""
    kept = {}
    for by in ("auto", "reward"):
        settings = {} if by == "auto" else {"refill_by": by}
        state, stage = prepared(warm("chains"), steps=1, refills=4, **settings)
        state.reward = LongIsWorse(state.reward.inner)
        metrics, result = stage_of(state, stage).step()
        correct = result.sampled.rollouts.correct
        assert correct is not None
        number = correct.view(-1, 4).sum(dim=1)
        kept[by] = ((number > 0) & (number < 4)).float().mean()
        assert metrics["refill/groups_found"] == 1.0
        assert (metrics["refill/groups_kept"] == 1.0) == (by == "reward")
    assert kept["auto"] == 1.0
    assert kept["reward"] < 0.6, "by reward, groups without a correct response stay"


def test_what_must_differ_within_a_group_by_hand() -> None:
    """Three pairs: all wrong with two lengths, one right of two, both right."""
    rollouts = Rollouts.from_columns(
        torch.ones(6, 2, dtype=torch.bool),
        reward=torch.tensor([0.0, -0.5, 1.0, 0.0, 1.0, 1.0]),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        correct=torch.tensor([False, False, True, False, True, True]),
    )
    mixed = [False, False, True, True, False, False]
    assert varied(rollouts, "auto").tolist() == mixed
    assert varied(rollouts, "correct").tolist() == mixed
    assert varied(rollouts, "reward").tolist() == [True, True, True, True, False, False]
    unsaid = rollouts.replace(correct=None)
    assert varied(unsaid, "auto").tolist() == varied(rollouts, "reward").tolist()
    with pytest.raises(ValueError, match=r"Set rollout\.refill_by=reward, or return"):
        varied(unsaid, "correct")


def test_refill_by_needs_refills() -> None:
    with pytest.raises(RecipeError, match=r"refill_by has no effect without rollout\.refills"):
        recipe(SMALL["chains"], "grpo", samples=4, rollout={"samples": 4, "refill_by": "reward"})


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


def with_truncated(lengths: Sequence[int], truncated: Sequence[bool]) -> Rollouts:
    """Random responses of two prompts, some of them truncated, with every column."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def column() -> torch.Tensor:
        return torch.rand(mask.shape, generator=draw, dtype=torch.float64)

    return Rollouts.from_columns(
        mask,
        logp_old=-column(),
        logp_sampler=-column(),
        logp_ref=-column(),
        entropy=column(),
        value=column(),
        reward=torch.tensor([float(x % 3 == 0) for x in range(len(lengths))], dtype=torch.float64),
        group=torch.arange(len(lengths)) // (len(lengths) // 2),
        truncated=torch.tensor(truncated),
    )


@pytest.mark.parametrize(
    "algorithm",
    [
        make_algorithm("grpo", kl=0.1),
        make_algorithm("grpo_verl", kl=0.1),
        make_algorithm("dr_grpo", max_tokens=8, kl=0.1),
        make_algorithm("dapo").with_entropy_bonus(0.1),
        make_algorithm("gmpo", kl=0.1),
        make_algorithm("vineppo", kl=0.1, partition={"name": "fixed", "size": 2}),
        make_algorithm("sapo", kl=0.1),
    ],
    ids=lambda x: type(x.credit).__name__ + type(x.reduce).__name__,
)
def test_a_mini_batch_loses_its_truncated_responses(algorithm: Any) -> None:
    """Loss, KL, entropy bonus, denominators and metrics are those of the other responses.

    The advantages are computed before, among all responses, and the critic learns from all.
    """
    rollouts = with_truncated([3, 6, 2, 6, 4, 5], [False, True, False, True, False, False])
    finished = (~rollouts.truncated).nonzero().flatten()
    values = lambda _, segments, *__: torch.rand(segments.mask.shape, dtype=torch.float64)  # noqa: E731
    torch.manual_seed(0)
    batch = algorithm.prepare(rollouts, values)
    draw = torch.Generator().manual_seed(4)
    shift = 0.3 * torch.rand(rollouts.mask.shape, generator=draw, dtype=torch.float64)
    found = []
    for made, rows in (
        (algorithm.minibatch(without_truncated(batch)), torch.arange(6)),
        (algorithm.minibatch(batch.select(finished)), finished),
    ):
        logp = (rollouts.logp_old + shift)[rows].requires_grad_()
        loss = algorithm.loss(Outputs(logp, rollouts.value[rows], rollouts.entropy[rows]), made)
        loss.policy.backward()
        found.append((loss, logp.grad))
    (masked, grad), (alone, expected) = found
    assert (grad[rollouts.truncated] == 0).all()
    torch.testing.assert_close(grad[finished], expected)
    for name in masked.metrics.keys() - {"value_loss"}:
        torch.testing.assert_close(masked.metrics[name], alone.metrics[name])
    if masked.value is not None:
        whole = algorithm.minibatch(batch)
        value = algorithm.loss(Outputs(rollouts.logp_old + shift, rollouts.value), whole).value
        assert torch.equal(masked.value, value)


def test_a_mini_batch_of_truncated_responses_has_no_gradient() -> None:
    for name in ("grpo", "dr_grpo", "dapo", "sapo_authors"):
        algorithm = make_algorithm(name)
        rollouts = with_truncated([3, 4], [True, True]).replace(group=torch.tensor([0, 0]))
        logp = rollouts.logp_old.clone().requires_grad_()
        batch = algorithm.minibatch(without_truncated(algorithm.prepare(rollouts)))
        loss = algorithm.loss(Outputs(logp, rollouts.value), batch)
        loss.policy.backward()
        assert (logp.grad == 0).all()
        assert all(x.isfinite() for x in loss.metrics.values())


def test_masked_and_weighted() -> None:
    """The second response is worth twice as much alone, and its tokens have the weight e^.2."""
    rollouts = with_truncated([3, 2], [True, False]).replace(group=torch.tensor([0, 0]))
    rollouts = rollouts.replace(logp_sampler=rollouts.logp_old - 0.2)
    algorithm = make_algorithm("grpo", kl=0.0)
    grad = {}
    for name in ("all", "masked", "both"):
        batch = algorithm.prepare(rollouts)
        if name != "all":
            batch = without_truncated(batch)
        if name == "both":
            batch, _ = weighted(batch, 10.0)
        logp = rollouts.logp_old.clone().requires_grad_()
        algorithm.loss(Outputs(logp), algorithm.minibatch(batch)).policy.backward()
        grad[name] = logp.grad
    assert (grad["all"][0] != 0).all()
    assert (grad["masked"][0] == 0).all()
    torch.testing.assert_close(grad["masked"][1], 2 * grad["all"][1])
    torch.testing.assert_close(grad["both"], grad["masked"] * 1.2214027581601699)


def test_mask_truncated_is_for_methods_with_credit() -> None:
    with pytest.raises(ValueError, match=r"update\.mask_truncated is for .*, and restem"):
        make_plan(recipe(SMALL["chains"], "restem", samples=2, update={"mask_truncated": True}))


def test_soft_length_penalty_is_dapos() -> None:
    """Limit 20,480 and interval 4,096, as in the paper."""
    for tokens, expected in ((16_000, 0), (16_384, 0), (18_432, 0.5), (20_480, 1), (30_000, 1)):
        assert soft_length_penalty(tokens, 20_480) == pytest.approx(expected)
    assert MathReward(length_penalty="soft").length_penalty == "soft"
    with MathReward(accuracy=2.0, length_penalty="soft") as reward:
        prompt = Prompt("p", ({"role": "user", "content": "?"},), answer="1")
        given = [("\\boxed{1}", 100), ("\\boxed{1}", 90), ("\\boxed{2}", 10), ("\\boxed{2}", 95)]
        found = reward([Response(prompt, text, n, n == 100, 100) for text, n in given])
    papers = torch.tensor([1.0 - 1.0, 1.0 - 0.5, -1.0, -1.0 - 0.75])  # rewards 1 and −1
    group = torch.zeros(4, dtype=torch.long)
    ours = group_zscore(torch.tensor([x.value for x in found]), group)
    torch.testing.assert_close(ours, group_zscore(papers, group))
    with pytest.raises(ValueError, match="None, 'authors' or 'soft'; got 'hard'"):
        MathReward(length_penalty="hard")  # type: ignore[arg-type]
