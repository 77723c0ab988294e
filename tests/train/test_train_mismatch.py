"""A sampler that computes a little differently: measured, and corrected when asked."""

import math
from dataclasses import replace

import pytest
import torch
from batches import golden_rollouts
from tiny_policies import policy
from tiny_runs import RECIPE, changed

from segcredit.algorithms import make_algorithm
from segcredit.algorithms.requirements import requirements
from segcredit.config import RecipeError, parse_recipe
from segcredit.models import Policy
from segcredit.rollout import EngineSettings, HFEngine
from segcredit.train.build import make_plan
from segcredit.train.columns import describe_mismatch, weighted
from segcredit.train.models import rollout_engine
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
    plan = make_plan(parse_recipe(given))
    made: list[EngineSettings] = []

    def make(name: str, policy: Policy, settings: EngineSettings) -> HFEngine:
        made.append(settings)
        return HFEngine.from_policy(policy, settings)

    monkeypatch.setattr("segcredit.train.models.make_engine", make)
    rollout_engine(plan.recipe, requirements(plan.algorithm), policy("qwen2"))
    assert made[0].needs_logp is reads


def test_dynamic_sampling_may_leave_nothing_to_compare() -> None:
    rollouts = shifted(0.5)[0]
    unknown = torch.full_like(rollouts.logp_old, torch.nan)
    assert describe_mismatch(rollouts.replace(logp_sampler=unknown)) == {}


def test_another_model_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"uses another model.*rollout\.engine=hf"):
        describe_mismatch(shifted(-4.0)[0])
    rollouts = shifted(0.0)[0]
    # engines refuse NaN of their own (check_finite); in logp_sampler it means: not reported
    damaged = rollouts.replace(logp_old=rollouts.logp_old * torch.nan)
    with pytest.raises(ValueError, match="KL = nan"):
        describe_mismatch(damaged)


def test_a_token_without_a_probability_has_no_weight_to_compute() -> None:
    """NaN for some tokens is fine as long as it is only compared (vLLM returns every eighth)."""
    rollouts = shifted(0.0)[0]
    assert rollouts.logp_sampler is not None
    part = rollouts.logp_sampler.clone()
    part[0] = torch.nan
    rollouts = rollouts.replace(logp_sampler=part)
    assert describe_mismatch(rollouts)
    with pytest.raises(ValueError, match="logp_sampler must be finite wherever the mask is True"):
        weighted(make_algorithm("grpo").prepare(rollouts), 2.0)


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
        (
            {"mismatch_over": "response"},
            r"mismatch_over has no effect without rollout\.mismatch_cap",
        ),
        ({"mismatch_floor": 2.0}, "less than or equal to 1"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, object], message: str) -> None:
    recipe = changed()
    recipe["rollout"] = {**recipe["rollout"], **settings}
    with pytest.raises(RecipeError, match=message):
        parse_recipe(recipe, "recipe.yaml")


def enumerated(noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All 27 responses of three tokens over three words: log π, log q, rewards, one row each.

    π and q (the sampler, with noisy logits) depend on the position and on the word before.
    """
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 4, 3, generator=draw, dtype=torch.float64)
    noisy = logits + noise * torch.randn(3, 4, 3, generator=draw, dtype=torch.float64)
    words = torch.cartesian_prod(*[torch.arange(3)] * 3)
    before = torch.cat([torch.full((27, 1), 3), words[:, :2]], dim=1)
    place = torch.arange(3).expand(27, 3)
    logp, logq = (x.log_softmax(-1)[place, before, words] for x in (logits, noisy))
    return logp, logq, torch.rand(27, generator=draw, dtype=torch.float64), words


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_bias_of_the_gradient_before_and_after(noise: float) -> None:
    """The expected gradient with respect to log π, by enumeration of all responses.

    Weights over the whole response make the expectation exact; per token they remove a part.
    """
    logp, logq, reward, _ = enumerated(noise)
    mask = torch.ones(27, 3, dtype=torch.bool)
    rollouts = Rollouts(
        tokens=mask.long(),
        mask=mask,
        logp_old=logp,
        logp_sampler=logq,
        reward=reward,
        group=torch.arange(27),
        truncated=torch.zeros(27, dtype=torch.bool),
    )
    algorithm = replace(make_algorithm("reinforce_pp", kl=0.0), adjust=())
    batch = algorithm.prepare(rollouts)

    def expected(sampler: torch.Tensor, made: Batch) -> torch.Tensor:
        """E over responses of ∇ loss, each response weighted by its probability."""
        current = logp.clone().requires_grad_()
        prepared = algorithm.minibatch(made)
        share = sampler.sum(dim=1).exp()[:, None].expand(27, 3)
        prepared = replace(prepared, shares={**prepared.shares, "policy": share})
        algorithm.loss(Outputs(current), prepared).policy.backward()
        assert current.grad is not None
        return current.grad

    exact = expected(logp, batch)
    bias = {"none": (expected(logq, batch) - exact).norm()}
    for over in ("token", "response"):
        made, measured = weighted(batch, 1e9, over)
        assert measured["agreement/weights_cut"] == 0.0
        bias[over] = (expected(logq, made) - exact).norm()
    assert bias["response"] < 1e-6 * exact.norm()
    assert bias["response"] < bias["token"] < bias["none"]
    # a cap brings a part of the bias back
    capped, measured = weighted(batch, 1.05, "response")
    assert measured["agreement/weights_cut"] > 0
    assert bias["response"] < (expected(logq, capped) - exact).norm() < bias["none"]


def test_units_masks_and_floors_by_hand() -> None:
    """Ratios 4, ½, 1 and 1, ¼ in segments of two tokens."""
    ratio = torch.tensor([[4.0, 0.5, 1.0], [1.0, 0.25, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    old = torch.full((2, 3), -1.0, dtype=torch.float64)
    rollouts = Rollouts(
        tokens=mask.long(),
        mask=mask,
        logp_old=old,
        logp_sampler=torch.where(mask, old - ratio.log(), torch.nan),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group=torch.zeros(2, dtype=torch.long),
        truncated=torch.zeros(2, dtype=torch.bool),
        value=torch.zeros(2, 3, dtype=torch.float64),
    )
    sapo = make_algorithm("sapo", kl=0.0, partition={"name": "fixed", "size": 2})
    batch = sapo.prepare(rollouts)
    for settings, weights, cut in (
        ((3.0,), [[3, 0.5, 1], [1, 0.25]], 1 / 5),
        ((3.0, "token", True), [[0, 0.5, 1], [1, 0.25]], 1 / 5),
        ((3.0, "token", True, 0.5), [[0, 0.5, 1], [1, 0]], 2 / 5),
        ((3.0, "token", False, 0.5), [[3, 0.5, 1], [1, 0.5]], 2 / 5),
        ((1.5, "segment"), [[1.5, 1.5, 1], [0.25, 0.25]], 2 / 5),
        ((1.5, "response", True), [[0, 0, 0], [0.25, 0.25]], 3 / 5),
    ):
        made, measured = weighted(batch, *settings)
        assert made.weight is not None
        found = [row[keep].tolist() for row, keep in zip(made.weight, mask, strict=True)]
        for row, expected in zip(found, weights, strict=True):
            assert row == pytest.approx(expected), settings
        assert measured["agreement/weights_cut"] == pytest.approx(cut), settings
