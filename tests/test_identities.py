"""The identities that tie the methods together, numbered as in the algorithm reference (§6)."""

from dataclasses import replace

import oracles as o
import pytest
import torch
from batches import fake_monte_carlo, story
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, cases, discount, tenths

from segcredit import algorithms, partition
from segcredit.algorithms import PolicyGradient
from segcredit.algorithms.credit import GAE, ValueDifference
from segcredit.algorithms.objective import (
    BoundaryMSE,
    Clipped,
    GeometricMean,
    ResponseMean,
    TokenMean,
    TokenRatio,
)
from segcredit.core import group, losses, ratios, tracker
from segcredit.core.advantages import (
    length_adaptive_lambda,
    segment_gae,
    terminal_reward,
    value_difference,
)
from segcredit.core.segments import Segments
from segcredit.partition import Response, Token, TopEntropy
from segcredit.types import Outputs

seeds = pytest.mark.parametrize("seed", range(4))
TIGHT = {"rtol": 0, "atol": 1e-12}


def made(case: Case) -> Segments:
    return Segments.from_ends(case.place.marks(case.ends), case.place.mask)


def final(case: Case) -> torch.Tensor:
    """An outcome reward per response."""
    return torch.tensor([row[0] for row in case.reward], dtype=torch.float64)


def run(algorithm: PolicyGradient, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rollouts, outputs = story(seed=seed).lay_out(seed, holes=True)
    batch = algorithm.minibatch(algorithm.prepare(rollouts, fake_monte_carlo))
    loss = algorithm.loss(outputs, batch)
    loss.total.backward()
    return loss.total.detach(), outputs.logp.grad, outputs.value.grad


@seeds
@pytest.mark.parametrize("value_at", ["start", "end"])
def test_1_one_token_per_segment_is_ppo(seed: int, value_at: str) -> None:
    def method(units: object, ratio: object) -> PolicyGradient:
        return PolicyGradient(
            credit=GAE(over=units, lam=0.9, value_at=value_at),
            ratio=ratio,
            surrogate=Clipped(0.2, 0.28, dual=3.0),
            reduce=TokenMean(),
            critic=BoundaryMSE(reduce=TokenMean(), half=True, clip=0.5),
        )

    every = TopEntropy(1.0)
    got = run(method(every, GeometricMean(over=every)), seed)
    want = run(method(Token(), TokenRatio()), seed)
    for x, y in zip(got, want, strict=True):
        assert torch.allclose(x, y, **TIGHT)


@given(cases(), discount)
def test_2_one_segment_is_gspo_and_its_advantage_knows_no_lambda(case: Case, lam: float) -> None:
    put, mask = case.place.put, case.place.mask
    whole = partition.response(mask)
    ratio = ratios.geometric_mean_ratio(put(case.log_ratio), torch.zeros(mask.shape), whole)
    reward = final(case)
    for where, t in (("start", 0), ("end", -1)):
        credit = segment_gae(terminal_reward(reward, mask), put(case.value), whole, 1.0, lam, where)
        for i, row in enumerate(case.place.take(credit.advantage)):
            want = reward[i].item() - case.value[i][t]
            assert row == pytest.approx([want] * len(row))
    for i, row in enumerate(case.place.take(ratio)):
        assert row == pytest.approx([o.gspo_ratio(case.log_ratio[i])] * len(row))


@given(cases())
def test_3_with_gamma_lambda_one_advantage_is_reward_to_go_less_value(case: Case) -> None:
    put, mask = case.place.put, case.place.mask
    fine, coarse = made(case), partition.response(mask)
    one = segment_gae(put(case.reward), put(case.value), fine, 1.0, 1.0)
    for i, ends in enumerate(case.ends):
        spans = o.spans(ends)
        to_go = [sum(case.reward[i][b:]) for b, _ in spans]
        want = [g - case.value[i][b] for g, (b, _) in zip(to_go, spans, strict=True)]
        assert case.place.take(one.advantage)[i] == pytest.approx(o.spread(want, ends))
        assert case.place.take(one.value_target)[i] == pytest.approx(o.spread(to_go, ends))
    merged = segment_gae(put(case.reward), put(case.value), coarse, 1.0, 1.0)
    assert torch.allclose(
        coarse.at_start(merged.advantage), coarse.at_start(one.advantage), **TIGHT
    )


@given(cases())
def test_4_with_gamma_one_td_errors_telescope(case: Case) -> None:
    put, segments = case.place.put, made(case)
    reward = final(case)
    td = segment_gae(terminal_reward(reward, case.place.mask), put(case.value), segments, 1.0, 0.0)
    total = segments.at_start(td.advantage).sum(dim=1)
    first = torch.tensor([row[0] for row in case.value], dtype=torch.float64)
    assert torch.allclose(total, reward - first, **TIGHT)


@given(cases())
def test_5_lambda_zero_with_monte_carlo_values_is_vineppo(case: Case) -> None:
    put, segments = case.place.put, made(case)
    reward = terminal_reward(final(case), case.place.mask)
    sapo = segment_gae(reward, put(case.value), segments, 1.0, 0.0)
    vine = value_difference(segments.sum(reward), segments.at_start(put(case.value)), segments.mask)
    assert torch.allclose(segments.at_start(sapo.advantage), vine, **TIGHT)


@seeds
@pytest.mark.parametrize("name", ["sapo", "sapo_authors", "ppo", "grpo", "gspo", "rloo", "vineppo"])
def test_6_at_the_old_policy_nothing_is_clipped(name: str, seed: int) -> None:
    algorithm = replace(algorithms.ALGORITHMS[name](), terms=())
    rollouts, outputs = story(seed=seed).lay_out(seed, holes=True)
    batch = algorithm.minibatch(algorithm.prepare(rollouts, fake_monte_carlo))
    same = Outputs(logp=rollouts.logp_old.clone().requires_grad_(), value=outputs.value)
    loss = algorithm.loss(same, batch)
    assert loss.metrics["clip_fraction"].item() == 0.0
    assert loss.metrics["ratio"].item() == pytest.approx(1.0, abs=1e-12)
    if name in ("sapo_authors", "ppo"):  # whitened and averaged over the same tokens
        assert loss.policy.item() == pytest.approx(0.0, abs=1e-9)


@given(cases())
def test_7_the_geometric_mean_lies_between(case: Case) -> None:
    segments = made(case)
    zero = torch.zeros(case.place.mask.shape)
    x = case.place.put(case.log_ratio)
    mean = case.place.take(ratios.geometric_mean_ratio(x, zero, segments))
    token = case.place.take(ratios.token_ratio(x, zero, case.place.mask))
    for i, ends in enumerate(case.ends):
        for b, e in o.spans(ends):
            inside = token[i][b : e + 1]
            assert min(inside) - 1e-9 <= mean[i][b] <= max(inside) + 1e-9
            assert mean[i][b] <= sum(inside) / len(inside) + 1e-9


@given(cases())
def test_8_equation_13_by_autograd(case: Case) -> None:
    """∂J/∂log π_t = (1/T)·s_m Â_m: the 1/|z_m| cancels against the segment's |z_m| equal terms."""
    put, segments, mask = case.place.put, made(case), case.place.mask
    logp, old = put(case.log_ratio).requires_grad_(), torch.zeros(mask.shape, dtype=torch.float64)
    credit = segment_gae(put(case.reward), put(case.value), segments, 1.0, 0.9)
    ratio = ratios.geometric_mean_ratio(logp, old, segments)
    length = mask.sum(dim=1, keepdim=True)
    (torch.where(mask, ratio * credit.advantage, 0.0) / length).sum().backward()
    s, A, grad = (case.place.take(x) for x in (ratio.detach(), credit.advantage, logp.grad))
    for i, ends in enumerate(case.ends):
        T = len(case.value[i])
        # Eq. 13 as printed: a double sum over tokens and the tokens of their segments
        want = [0.0] * T
        for b, e in o.spans(ends):
            for t in range(b, e + 1):
                for k in range(b, e + 1):
                    want[k] += s[i][t] * A[i][t] / (T * (e - b + 1))
        assert grad[i] == pytest.approx(want)
        assert grad[i] == pytest.approx([s[i][t] * A[i][t] / T for t in range(T)])
    assert (logp.grad[~mask] == 0).all()


def test_9_is_in_test_invariance() -> None:
    """Padding width and content, row order, micro-batches, holes: every method has its test."""
    from algorithms import test_invariance

    assert set(test_invariance.METHODS) >= set(algorithms.ALGORITHMS)


@seeds
def test_10_vc_ppo_with_equal_lambdas_is_ppo(seed: int) -> None:
    got = run(algorithms.vc_ppo(lam=0.95, lam_critic=0.95), seed)
    want = run(algorithms.ppo(lam=0.95), seed)
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)
    assert length_adaptive_lambda(torch.tensor([3]), 1e12).item() == pytest.approx(1.0)


@given(
    st.lists(tenths, min_size=2, max_size=6), st.integers(-3, 3), st.sampled_from([0.5, 2.0, 10.0])
)
def test_11_groups(rewards: list[float], shift: int, scale: float) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    one = torch.zeros(len(r), dtype=torch.long)
    G = len(r)
    centered = group.group_zscore(r, one, "none")
    assert torch.allclose(group.leave_one_out(r, one), G / (G - 1) * centered, **TIGHT)
    assert torch.allclose(group.leave_one_out(r + shift, one), group.leave_one_out(r, one), **TIGHT)
    if r.max() > r.min():
        z = group.group_zscore(r, one, "sample", 0.0)
        assert torch.allclose(group.group_zscore(scale * r + shift, one, "sample", 0.0), z)


@given(tenths, tenths, tenths, tenths)
def test_12_dpo_positive_and_k3(w: float, x: float, a: float, b: float) -> None:
    chosen, rejected = torch.tensor([w]).double(), torch.tensor([x]).double()
    plain = losses.dpo(chosen, rejected, 0.1)
    assert torch.equal(losses.dpo_positive(chosen, rejected, 0.1, 0.0), plain)
    if w >= 0:
        assert torch.equal(losses.dpo_positive(chosen, rejected, 0.1, 50.0), plain)
    k3 = losses.k3(torch.tensor([[a]]).double(), torch.tensor([[b]]).double()).item()
    assert k3 >= 0
    assert (k3 == 0) == (a == b)


@given(st.lists(st.lists(tenths, min_size=1, max_size=4), min_size=1, max_size=4))
def test_13_sibling_advantages_sum_to_zero(leaves: list[list[float]]) -> None:
    inner = len(leaves)
    reward = torch.tensor([0.0] * inner + [x for row in leaves for x in row], dtype=torch.float64)
    parent = torch.tensor([-1] * inner + [i for i, row in enumerate(leaves) for _ in row])
    edge, _ = group.tree_advantage(reward, parent, torch.zeros_like(parent))
    for above in range(-1, inner):
        assert edge[parent == above].sum().item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("drift", "rho"), [(0.0, 0.96), (0.006, 2**-0.1), (9.0, 0.875)])
def test_14_tracker_strength_settles(drift: float, rho: float) -> None:
    alpha, beta = tracker.tracker_init(torch.tensor([4.0]).double(), 8)
    for step in range(2000):
        reward = torch.tensor([float(step % 2)]).double()
        alpha, beta = tracker.tracker_update(alpha, beta, reward, torch.tensor([drift]).double())
    assert (alpha + beta).item() == pytest.approx(1 / (1 - rho))
    assert 8.0 - 1e-9 <= (alpha + beta).item() <= 25.0 + 1e-9


@seeds
def test_zero_values_give_every_segment_the_reward(seed: int) -> None:
    rollouts, _ = story(seed=seed).lay_out(seed, holes=True)
    nothing = rollouts.replace(value=torch.zeros_like(rollouts.logp_old))
    credit = GAE(over=TopEntropy(0.3), lam=1.0)
    batch = PolicyGradient(credit, TokenRatio(), Clipped(), ResponseMean()).prepare(nothing)
    want = torch.where(rollouts.mask, rollouts.reward[:, None], 0.0)
    assert torch.allclose(batch.credit.advantage, want, **TIGHT)


@seeds
def test_gspo_token_has_gspos_value_and_gradient(seed: int) -> None:
    for x, y in zip(
        run(algorithms.gspo(tokenwise=True), seed)[:2],
        run(algorithms.gspo(), seed)[:2],
        strict=True,
    ):
        assert torch.allclose(x, y, **TIGHT)


@seeds
def test_spo_chain_without_masks_is_a_value_difference(seed: int) -> None:
    rollouts, _ = story(seed=seed).lay_out(seed, holes=True)
    chain = algorithms.spo_chain()
    batch = chain.prepare(rollouts, fake_monte_carlo)
    units = chain.credit.over
    assert isinstance(chain.credit, ValueDifference)
    segments = units(rollouts)
    known = units.estimated(rollouts, segments)
    first = segments.mask.clone()
    first[:, 1:] = False
    assert torch.equal(known | first, segments.mask)  # all but perhaps the prompt
    unknown = segments.spread((~known).double()).bool() & rollouts.mask
    assert (batch.credit.advantage[unknown] == 0).all()


def test_response_credit_has_one_unit() -> None:
    rollouts, _ = story().lay_out(0, holes=True)
    assert Response()(rollouts).width == 1
