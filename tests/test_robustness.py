"""Traps that a second reader found: each was wrong once."""

import pytest
import torch
from batches import fake_monte_carlo, golden_rollouts, story
from each import each

from segcredit import algorithms, partition
from segcredit.algorithms import ALGORITHMS
from segcredit.algorithms.objective import LossKL, ResponseMean, TokenMean
from segcredit.core import advantages, group, losses, ratios
from segcredit.core.advantages import whiten
from segcredit.types import Outputs

pytestmark = pytest.mark.usefixtures("as_users_run_it")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rollouts_that_still_have_a_graph_are_constants(name: str) -> None:
    """logp_old = logp is the natural first step; its gradient must not cancel."""
    rollouts, _ = story(seed=3).lay_out(0, holes=True)
    algorithm = ALGORITHMS[name]()
    grads = []
    for detach in (True, False):
        logp = rollouts.logp_old.clone().requires_grad_()
        value = rollouts.value.clone().requires_grad_()
        old, ref, v = logp + 0.0, 1.1 * logp, value + 0.0
        columns = {"logp_old": old, "logp_ref": ref, "value": v}
        if detach:
            columns = {column: x.detach() for column, x in columns.items()}
        prepared = algorithm.prepare(rollouts.replace(**columns), fake_monte_carlo)
        batch = algorithm.minibatch(prepared)
        new = batch.rollouts.logp_old.detach().requires_grad_()
        now = batch.rollouts.value.detach().requires_grad_()
        algorithm.loss(Outputs(new, now), batch).total.backward()
        assert logp.grad is None
        assert value.grad is None
        grads.append(new.grad)
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)


def test_the_current_policy_may_be_the_old_one() -> None:
    rollouts, outputs = story(seed=3).lay_out(0, holes=True)
    logp = rollouts.logp_old.clone().requires_grad_()
    method = algorithms.sapo()
    batch = method.minibatch(method.prepare(rollouts.replace(logp_old=logp, logp_ref=logp)))
    method.loss(Outputs(logp, outputs.value), batch).policy.backward()
    assert logp.grad.abs().max() > 0


def test_means_of_half_precision_count_exactly() -> None:
    x, mask = torch.ones(2, 3001).bfloat16(), torch.ones(2, 3001, dtype=torch.bool)
    for mean in (losses.response_mean, losses.token_mean):
        assert mean(x, mask).item() == pytest.approx(1.0, abs=1e-6)


def test_integer_rewards_are_not_truncated() -> None:
    r, one = torch.tensor([1, 0, 0, 0]), torch.zeros(4, dtype=torch.long)
    assert group.group_zscore(r, one)[0].item() == pytest.approx(1.499997, abs=1e-5)
    assert group.leave_one_out(r, one)[1].item() == pytest.approx(-1 / 3)
    mask = torch.ones(1, 2, dtype=torch.bool)
    got = advantages.gae(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.25]]), mask, 1.0, 1.0)
    assert got.tolist() == [[0.5, 0.75]]
    assert whiten(torch.tensor([[0, 1]]), mask)[0, 1].item() == pytest.approx(0.7071, abs=1e-4)


@pytest.mark.parametrize("form", [ratios.token_ratio, ratios.geometric_mean_ratio])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_an_extreme_ratio_has_a_finite_gradient(form: object, advantage: float) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    units = mask if form is ratios.token_ratio else partition.tokens(mask)
    logp = torch.tensor([[99.0, 0.1]], requires_grad=True)
    A = torch.full((1, 2), advantage)
    losses.clipped_surrogate(form(logp, torch.zeros(1, 2), units), A, 0.2, 0.2).sum().backward()
    assert torch.isfinite(logp.grad).all()


def test_half_precision_is_not_refused() -> None:
    H = torch.rand(64, 4096).half() + 0.5
    mask = torch.ones(64, 4096, dtype=torch.bool)
    segments = partition.top_entropy(H, mask, 0.3)
    advantages.segment_gae(H, H, segments, 1.0, 0.9)


@each("num", range(1, 13))
def test_split_gives_as_many_mini_batches_as_asked(num: int) -> None:
    rollouts, _ = story(num_groups=3, per_group=4).lay_out(0, holes=False)
    assert len(algorithms.sapo().prepare(rollouts).split(num)) == num


def test_a_mask_that_is_a_view_is_stored_contiguously() -> None:
    full = torch.ones(3, 9, dtype=torch.bool)
    for made in (partition.tokens(full[:, 2:]), partition.fixed_length(full.T[:3], 2)):
        assert made.token_mask.is_contiguous()
        assert made.slot.is_contiguous()


def test_terms_of_one_name_are_refused() -> None:
    method = algorithms.grpo()
    terms = (LossKL(0.1, reduce=ResponseMean()), LossKL(0.1, reduce=TokenMean()))
    with pytest.raises(ValueError, match="needs its own name"):
        type(method)(method.credit, method.ratio, method.surrogate, method.reduce, terms=terms)


def test_a_subclass_of_a_part_is_called() -> None:
    class Louder(type(algorithms.sapo().ratio)):  # type: ignore[misc]
        def __call__(self, *args: object) -> torch.Tensor:
            raise RuntimeError("called")

    method = algorithms.sapo()
    mine = type(method)(method.credit, Louder(method.ratio.over), method.surrogate, method.reduce)
    rollouts, outputs = golden_rollouts()
    with pytest.raises(RuntimeError, match="called"):
        mine.loss(outputs, mine.minibatch(mine.prepare(rollouts)))


def test_a_batch_made_in_inference_mode_is_refused_in_words() -> None:
    rollouts, _ = golden_rollouts()
    method = algorithms.sapo()
    with torch.inference_mode():
        batch = method.prepare(rollouts)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        method.minibatch(batch)


def test_selecting_rows_of_a_tree_moves_the_parents() -> None:
    rollouts, _ = story(seed=1).lay_out(0, holes=False)
    backwards = torch.arange(len(rollouts)).flip(0)
    method = algorithms.spo_tree()
    straight = method.prepare(rollouts).credit.advantage[rollouts.mask]
    turned = method.prepare(rollouts.select(backwards))
    restored = turned.select(backwards)
    assert torch.allclose(straight, restored.credit.advantage[rollouts.mask])
    with pytest.raises(ValueError, match="Keep whole trees together"):
        method.prepare(rollouts.select(torch.tensor([1, 2, 3])))


def test_boolean_rows_and_torn_pairs_are_refused() -> None:
    rollouts, _ = story(seed=2).lay_out(0, holes=False)
    with pytest.raises(ValueError, match="boolean mask"):
        rollouts.select(rollouts.reward > 0)
    batch = algorithms.dpo().prepare(rollouts)
    for rows in ([1, 0], [0], [1, 2]):
        with pytest.raises(ValueError, match="adjacent rows together"):
            batch.select(torch.tensor(rows))


def test_shapes_of_the_whole_losses_are_checked() -> None:
    rollouts, outputs = golden_rollouts()
    segments = partition.top_entropy(rollouts.entropy, rollouts.mask, 0.3)
    shares = losses.response_shares(rollouts.mask, torch.float64)
    A = torch.zeros_like(rollouts.logp_old)
    good = [outputs.logp, rollouts.logp_old, A]
    for place in range(3):
        bad = list(good)
        bad[place] = bad[place][:, :-1]
        with pytest.raises((ValueError, TypeError)):
            losses.segment_policy_loss(*bad, segments, 0.2, 0.2, shares=shares)
    with pytest.raises((ValueError, TypeError)):
        losses.segment_policy_loss(*good, segments, 0.2, 0.2, shares=shares[:, :1])
    with pytest.raises((ValueError, TypeError)):
        losses.boundary_value_loss(
            outputs.value, rollouts.value, A, segments, shares=shares[:, :1].expand(-1, 9)
        )


def test_one_lambda_per_response_means_just_that() -> None:
    rollouts, _ = golden_rollouts()
    segments = partition.tokens(rollouts.mask)
    reward = advantages.terminal_reward(rollouts.reward, rollouts.mask)
    for lam in (torch.tensor([0.9]), torch.tensor(0.9), torch.full((2, 1), 0.9)):
        with pytest.raises(ValueError, match=r"one per response, shape \(2,\)"):
            advantages.segment_gae(reward, rollouts.value, segments, 1.0, lam)


def test_a_non_finite_reward_is_named_by_group_methods() -> None:
    rollouts, _ = story().lay_out(0, holes=False)
    reward = rollouts.reward.clone()
    reward[3] = torch.nan
    for name in ("grpo", "rloo", "spo_tree", "single_stream_spo"):
        with pytest.raises(ValueError, match="must be finite"):
            ALGORITHMS[name]().prepare(rollouts.replace(reward=reward), fake_monte_carlo)
    for name in ("restem", "dpo", "dpo_positive", "dvo", "vineppo", "spo_chain"):
        for bad in (torch.nan, torch.inf, -torch.inf):
            reward[3] = bad
            some = rollouts.replace(reward=reward, truncated=torch.arange(len(rollouts)) == 3)
            with pytest.raises(ValueError, match="reward must be finite"):
                ALGORITHMS[name]().prepare(some, fake_monte_carlo)
    bad_ref = rollouts.logp_ref.clone()
    bad_ref[rollouts.mask] = torch.nan
    with pytest.raises(ValueError, match="logp_ref must be finite"):
        algorithms.sapo().prepare(rollouts.replace(logp_ref=bad_ref))


BAD_SETTINGS = {
    "value clip": lambda: algorithms.objective.BoundaryMSE(clip=-1.0),
    "limit": lambda: algorithms.objective.TokenRatio(limit=-1.0),
    "dual clip": lambda: algorithms.objective.Clipped(dual=float("nan")),
    "threshold": lambda: algorithms.spo_tree(threshold=90.0),
    "kl": lambda: algorithms.sapo(kl=-1.0),
    "kl loss": lambda: algorithms.grpo(kl=-1.0),
    "beta": lambda: algorithms.dpo(beta=-1.0),
    "samples": lambda: algorithms.vineppo(samples=0),
    "most": lambda: algorithms.vineppo(most=0),
    "alpha": lambda: algorithms.vapo(alpha=-1.0),
    "std": lambda: algorithms.grpo(std="pop"),
    "eps": lambda: algorithms.grpo(eps=-1.0),
    "kl_clamp": lambda: algorithms.grpo(kl_clamp=0.0),
    "a reduction": lambda: algorithms.grpo(reduce="tokens"),
    "per_prompt": lambda: algorithms.restem(per_prompt=0),
    "temperature": lambda: algorithms.restem(temperature=0.0),
    "temperature of pairs": lambda: algorithms.dpo(temperature=-1.0),
    "truncated": lambda: algorithms.vineppo(truncated_reward=float("nan")),
    "weight": lambda: algorithms.dvo(weight_cap=0.0),
    "pairs": lambda: algorithms.dpo_positive(penalty=-1.0),
    "two partitions": lambda: algorithms.sapo(fraction=0.1, partition=partition.Newline()),
}


@each("name", BAD_SETTINGS)
def test_bad_settings_fail_when_the_method_is_made(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be|got"):
        BAD_SETTINGS[name]()
