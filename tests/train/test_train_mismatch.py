"""A sampler that computes a little differently: measured, and corrected when asked."""

import math
from dataclasses import replace

import pytest
import torch
from batches import golden_rollouts
from tiny_runs import RECIPE, changed

from segcredit.algorithms import make_algorithm
from segcredit.config import RecipeError, parse_recipe
from segcredit.train.build import _reads_drawn, make_plan
from segcredit.train.columns import describe_mismatch, weighted
from segcredit.types import Batch, Outputs, Rollouts


def shifted(by: float) -> tuple[Rollouts, Outputs]:
    """The sampler gave every second token a probability e^by times too small."""
    rollouts, outputs = golden_rollouts()
    every_second = torch.arange(rollouts.mask.shape[1]) % 2 == 0
    sampled = rollouts.logp_old - by * every_second * rollouts.mask
    return rollouts.replace(logp_sampler=sampled), outputs


def test_nothing_is_said_where_the_sampler_is_the_trainer() -> None:
    assert describe_mismatch(golden_rollouts()[0]) == {}


def test_distance_by_hand() -> None:
    rollouts, _ = shifted(0.1)
    mask = rollouts.mask
    share = float((mask[:, ::2].sum()) / mask.sum())
    found = describe_mismatch(rollouts)
    assert found["agreement/sampler_kl"] == pytest.approx(share * (math.exp(0.1) - 1 - 0.1))
    assert found["agreement/sampler_difference"] == pytest.approx(share * 0.1)
    assert found["agreement/sampler_largest"] == pytest.approx(0.1)


def test_only_what_the_sampler_told_is_compared() -> None:
    rollouts, _ = shifted(0.1)
    assert rollouts.logp_sampler is not None
    some = rollouts.logp_sampler.clone()
    some[1:] = torch.nan
    mask = rollouts.mask[:1]
    share = float(mask[:, ::2].sum() / mask.sum())
    found = describe_mismatch(rollouts.replace(logp_sampler=some))
    assert found["agreement/sampler_difference"] == pytest.approx(share * 0.1)


@pytest.mark.parametrize(
    ("algorithm", "rollout", "reads"),
    [
        ("sapo", {}, False),  # recomputed
        ("sapo", {"mismatch_cap": 2.0}, True),
        ("restem", {"samples": 2}, True),  # never recomputed, but recorded
    ],
)
def test_who_reads_log_probabilities_as_vllm_drew_them(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, rollout: dict[str, object], reads: bool
) -> None:
    monkeypatch.setattr("segcredit.train.build.engine_problem", lambda name: None)
    given = changed(
        algorithm=algorithm,
        stages=[RECIPE["stages"][0], {"kind": "optimize", "steps": 1}],
        reward="exact",
    )
    given["rollout"] |= {"engine": "vllm"} | rollout
    assert _reads_drawn(make_plan(parse_recipe(given))) is reads


def test_another_model_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"uses another model.*rollout\.engine=hf"):
        describe_mismatch(shifted(-4.0)[0])
    rollouts = shifted(0.0)[0]
    assert rollouts.logp_sampler is not None
    damaged = rollouts.replace(logp_sampler=rollouts.logp_sampler * torch.nan)
    with pytest.raises(ValueError, match="KL = nan"):
        describe_mismatch(damaged)


@pytest.mark.parametrize("name", ["sapo", "ppo", "grpo", "rloo", "grpo_spo", "rloo_spo"])
@pytest.mark.parametrize("by", [0.3, -0.3, 2.0])
def test_weights_multiply_each_tokens_part_of_the_loss(name: str, by: float) -> None:
    """Against the loss with shares times min(π_old / π_sampler, cap)."""
    cap = 2.0
    rollouts, outputs = shifted(by)
    algorithm = make_algorithm(name)
    batch = algorithm.prepare(rollouts)
    made, measured = weighted(batch, cap)
    ours = algorithm.loss(outputs, algorithm.minibatch(made)).metrics["policy_loss"]

    plain = algorithm.minibatch(batch)
    every_second = (torch.arange(rollouts.mask.shape[1]) % 2 == 0) & rollouts.mask
    ones = torch.ones(rollouts.mask.shape, dtype=torch.float64)
    weight = torch.where(every_second, min(math.exp(by), cap) * ones, ones)
    share = plain.shares["policy"] * weight
    by_hand: Batch = replace(plain, shares={**plain.shares, "policy": share})
    expected = algorithm.loss(outputs, by_hand).metrics["policy_loss"]
    assert float(ours) == pytest.approx(float(expected), rel=1e-6)
    plainly = algorithm.loss(outputs, plain).metrics["policy_loss"]
    assert float(plainly) != pytest.approx(float(expected), rel=1e-3)
    cut = float(every_second.sum() / rollouts.mask.sum()) if by > math.log(cap) else 0.0
    assert measured["agreement/weights_cut"] == pytest.approx(cut)


def test_whitening_per_mini_batch_does_not_see_the_weights() -> None:
    """Rewards 1 and 0, two tokens each: Â is ±1, whitened ±√¾ over the four tokens.

    Weights 3 (capped at 2), ½ and 1, ¼ at ratio 1; the loss is −¼ √¾ (2 + ½ − 1 − ¼).
    """
    weight = torch.tensor([[3.0, 0.5], [1.0, 0.25]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    old = torch.full((2, 2), -1.0, dtype=torch.float64)
    rollouts = Rollouts(
        tokens=mask.long(),
        mask=mask,
        logp_old=old,
        logp_sampler=old - weight.log(),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group=torch.zeros(2, dtype=torch.long),
        truncated=torch.zeros(2, dtype=torch.bool),
    )
    algorithm = make_algorithm("grpo_spo", kl=0.0)
    made, _ = weighted(algorithm.prepare(rollouts), cap=2.0)
    batch = algorithm.minibatch(made)
    logp = old.clone().requires_grad_()
    loss = algorithm.loss(Outputs(logp), batch)
    loss.policy.backward()
    root = math.sqrt(0.75)
    assert batch.credit.advantage.tolist() == [
        pytest.approx([root, root]),
        pytest.approx([-root, -root]),
    ]
    assert loss.policy.item() == pytest.approx(-0.25 * root * 1.25)
    capped = weight.clamp(max=2.0)
    signs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    assert torch.allclose(logp.grad, 0.25 * root * signs * capped)
    assert loss.metrics["ratio"].item() == pytest.approx(1.0), "what is watched is not weighted"
    parts = [
        algorithm.loss(Outputs(logp[[row]]), batch.select(torch.tensor([row]))).policy.item()
        for row in (0, 1)
    ]
    assert parts == pytest.approx([-0.25 * root * 2.5, 0.25 * root * 1.25])


@pytest.mark.parametrize("name", ["sapo", "sapo_authors", "ppo"])
def test_credit_itself_is_left_alone(name: str) -> None:
    batch = make_algorithm(name).prepare(shifted(0.3)[0])
    made, _ = weighted(batch, 2.0)
    assert made.credit is batch.credit


def test_value_targets_stay() -> None:
    batch = make_algorithm("sapo").prepare(shifted(0.3)[0])
    made, _ = weighted(batch, 2.0)
    assert made.credit is not None
    assert batch.credit is not None
    assert torch.equal(made.credit.value_target, batch.credit.value_target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mismatch_cap": 2.0}, r"set rollout\.old_logp=recompute"),
        ({"engine": "vllm", "old_logp": "sampler"}, "vLLM returns no entropies"),
        ({"mismatch_cap": 0.5, "old_logp": "recompute"}, "greater than or equal to 1"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], message: str) -> None:
    recipe = changed()
    recipe["rollout"] = {**recipe["rollout"], **settings}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(recipe, "recipe.yaml")
