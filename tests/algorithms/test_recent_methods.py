"""DAPO, Dr. GRPO, CISPO, GMPO, soft adaptive, 80/20, REINFORCE++ and SAE.

Against verl's and TRL's own functions (fixtures/peers_2026.json), hand-worked numbers, naive
oracles and identities. Every batch has holes and garbage off the mask.
"""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Layout, layout

from segcredit import algorithms
from segcredit.algorithms import make_algorithm
from segcredit.algorithms.credit import Case, ReturnToGo, SegmentBootstrap, TopEntropyOnly
from segcredit.algorithms.objective import ClippedInsideMean, ClippedWeight, SoftGate
from segcredit.algorithms.requirements import requirements
from segcredit.columns import ENTROPY
from segcredit.partition import FixedLength, Newline, Token
from segcredit.partition.entropy import highest_in_batch
from segcredit.types import Outputs, Rollouts

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "peers_2026.json").read_text())
PEERS: dict[str, Any] = FIXTURE["peers"]
CLOSE = {"rel": 1e-6, "abs": 1e-6}
RECENT = (
    *("grpo_trl", "dapo", "dr_grpo", "cispo", "gmpo", "soft_adaptive", "high_entropy"),
    *("reinforce_pp", "reinforce_pp_baseline", "sae"),
)


def rollouts_of(batch: dict[str, Any], place: Layout, value: bool = False) -> Rollouts:
    rows = batch["rows"]
    return Rollouts(
        tokens=place.mask.long(),
        mask=place.mask,
        logp_old=place.put([row["logp_old"] for row in rows]),
        reward=torch.tensor(batch["reward"], dtype=torch.float64),
        group=torch.tensor(batch["group"]),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        logp_ref=place.put([row["logp_ref"] for row in rows]),
        entropy=place.put([row["entropy"] for row in rows]),
        value=place.put([[x / 3 for x in row["entropy"]] for row in rows]) if value else None,
    )


def case_of(number: int, value: bool = False) -> tuple[Layout, Rollouts, Outputs]:
    batch = FIXTURE["batches"][number]
    place = layout([len(row["logp"]) for row in batch["rows"]], seed=number)
    rollouts = rollouts_of(batch, place, value)
    logp = place.put([row["logp"] for row in batch["rows"]]).requires_grad_()
    return place, rollouts, Outputs(logp, rollouts.value)


def run(algorithm: Any, number: int) -> tuple[Any, Any, torch.Tensor]:
    """Batch, loss and gradient of a method on one of the fixture's batches."""
    _, rollouts, outputs = case_of(number, value=True)
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    loss = algorithm.loss(outputs, batch)
    loss.policy.backward()
    return batch, loss, outputs.logp.grad


@pytest.mark.parametrize(
    ("peer", "number"), [(p, i) for p in PEERS for i in range(len(PEERS[p]["results"]))]
)
def test_advantages_loss_and_gradient_are_the_peers(peer: str, number: int) -> None:
    found = PEERS[peer]["results"][number]
    place, *_ = case_of(number)
    named = {k: tuple(x) if isinstance(x, list) else x for k, x in PEERS[peer]["algorithm"].items()}
    batch, loss, grad = run(make_algorithm(**named), number)
    pairs = [(place.take(grad), found["grad"])]
    if "advantage" in found:
        pairs.append((place.take(batch.credit.advantage), found["advantage"]))
    for ours, theirs in pairs:
        for row, expected in zip(ours, theirs, strict=True):
            assert row == pytest.approx(expected, **CLOSE)
    assert loss.policy.item() == pytest.approx(found["loss"], **CLOSE)


def test_the_peers_differ_from_each_other() -> None:
    """The comparison above can tell the methods apart."""
    losses = sorted(PEERS[peer]["results"][1]["loss"] for peer in PEERS)
    assert sum(b - a > 1e-6 for a, b in itertools.pairwise(losses)) >= len(PEERS) - 2


def test_hand_numbers_of_surrogates() -> None:
    """ρ = 1.5 and 0.5, Â = 2 and −2; logits of the sigmoid by hand."""
    ratio = torch.tensor([[1.5, 0.5]], dtype=torch.float64)
    advantage = torch.tensor([[2.0, -2.0]], dtype=torch.float64)
    gate = SoftGate()(ratio, advantage)[0].tolist()
    # −σ(.5)·4·2 and +σ(1.05·(−.5))·(4/1.05)·2
    sigmoid = [1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.525))]
    assert gate == pytest.approx([-8 * sigmoid[0], 8 / 1.05 * sigmoid[1]])
    assert gate == pytest.approx([-4.979675, 2.831877], abs=1e-6)

    mask = torch.ones(1, 2, dtype=torch.bool)
    segments = FixedLength(2)(_rollouts(mask))
    logp = ratio.log()
    old = torch.zeros_like(logp)
    loss, watched = ClippedWeight(0.0, 1.2).from_log_probs(logp, old, advantage, segments)
    # −min(1.5, 1.2)·2·log 1.5 and −0.5·(−2)·log 0.5
    assert loss[0].tolist() == pytest.approx([-2.4 * math.log(1.5), math.log(0.5)])
    assert watched["clip_fraction"][0].tolist() == [1.0, 0.0]

    up = torch.full_like(advantage, 1.0)
    loss, watched = ClippedInsideMean(0.4, 0.4).from_log_probs(logp, old, up, segments)
    # log 1.5 = .405 is clipped to .4; log .5 = −.693 is not, since Â > 0
    assert loss[0].tolist() == pytest.approx([-math.exp((0.4 + math.log(0.5)) / 2)] * 2)
    assert watched["clip_fraction"][0].tolist() == [1.0, 0.0]
    loss, _ = ClippedInsideMean(0.4, 0.4).from_log_probs(logp, old, -up, segments)
    assert loss[0].tolist() == pytest.approx([math.exp((math.log(1.5) - 0.4) / 2)] * 2)


def _rollouts(mask: torch.Tensor, **columns: Any) -> Rollouts:
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    rows = len(mask)
    given = {"tokens": mask.long(), "mask": mask, "logp_old": zeros, **columns}
    given.setdefault("reward", torch.ones(rows, dtype=torch.float64))
    given.setdefault("group", torch.zeros(rows, dtype=torch.long))
    return Rollouts(truncated=torch.zeros(rows, dtype=torch.bool), **given)


def test_hand_numbers_of_credit() -> None:
    """Four tokens in two segments, V = .1 .4 .3 .6, r = −.2 at the second token, 1 at the end."""
    mask = torch.ones(1, 4, dtype=torch.bool)
    value = torch.tensor([[0.1, 0.4, 0.3, 0.6]], dtype=torch.float64)
    reward = torch.tensor([[0.0, -0.2, 0.0, 1.0]], dtype=torch.float64)
    rollouts = _rollouts(mask, value=value)
    credit = SegmentBootstrap(FixedLength(2), lam=0.5)
    got = credit(Case(rollouts, reward, credit.over(rollouts)))
    # Â at starts: Â_3 = 1 − .3 = .7; Â_1 = −.2 + .3 − .1 + .5·.7 = .35
    # inside: Â_4 = 1 − .6 = .4; Â_2 = −.2 + .3 + .35 − .4 = .05
    assert got.advantage[0].tolist() == pytest.approx([0.35, 0.05, 0.7, 0.4])
    assert got.value_target[0].tolist() == pytest.approx([0.45, 0.45, 1.0, 1.0])
    again = ReturnToGo(0.5)
    total = again(Case(rollouts, reward, Token()(rollouts))).advantage[0].tolist()
    assert total == pytest.approx([-0.1 + 0.125, -0.2 + 0.25, 0.5, 1.0])


@pytest.mark.parametrize("seed", range(4))
def test_segment_bootstrap_is_the_recursion_with_two_lambdas(seed: int) -> None:
    """Naive oracle: Â_t = δ_t + λ_t Â_{t+1}, λ_t = λ at the end of a segment and 1 inside."""
    chooser = random.Random(seed)
    lengths = [chooser.randint(1, 11) for _ in range(6)]
    place = layout(lengths, seed=seed)
    value = [[chooser.gauss(0, 1) for _ in range(n)] for n in lengths]
    reward = [[chooser.gauss(0, 0.3) for _ in range(n)] for n in lengths]
    low = [[chooser.random() < 0.4 for _ in range(n)] for n in lengths]
    logp_old = [[math.log(0.05 if x else 0.9) for x in row] for row in low]
    rollouts = _rollouts(place.mask, value=place.put(value), logp_old=place.put(logp_old))
    algorithm = algorithms.sae(threshold=0.2, lam=0.8, lam_critic=0.3)
    credit = algorithm.credit
    got = credit(Case(rollouts, place.put(reward), credit.over(rollouts)))
    for lam, ours, less_value in ((0.8, got.advantage, True), (0.3, got.value_target, False)):
        for row, v, r, cut in zip(place.take(ours), value, reward, low, strict=True):
            expected, after = [0.0] * len(v), 0.0
            for t in reversed(range(len(v))):
                last = t + 1 == len(v)
                step = lam if not last and cut[t + 1] else 1.0
                after = r[t] + (0.0 if last else v[t + 1]) - v[t] + step * after
                expected[t] = after if less_value else after + v[t]
            assert row == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize("number", range(3))
def test_sae_with_a_cut_at_every_token_is_ppo(number: int) -> None:
    sae, ppo = run(algorithms.sae(partition=Token()), number), run(algorithms.ppo(), number)
    assert sae[1].policy.item() == pytest.approx(ppo[1].policy.item(), **CLOSE)
    assert sae[1].value.item() == pytest.approx(ppo[1].value.item(), **CLOSE)
    torch.testing.assert_close(sae[2], ppo[2], rtol=1e-6, atol=1e-8)
    cuts = run(algorithms.sae(threshold=0.5), number)
    assert abs(cuts[1].policy.item() - ppo[1].policy.item()) > 1e-4


def test_sae_with_lambda_one_needs_no_segments() -> None:
    for number in range(3):
        one, other = (
            run(algorithms.sae(lam=1.0, partition=x), number)[0].credit.advantage
            for x in (Token(), FixedLength(3))
        )
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_gmpo_with_one_token_is_grpo() -> None:
    """One token per response and log-ratios inside both clips: the two losses coincide."""
    mask = torch.ones(6, 1, dtype=torch.bool)
    rollouts = _rollouts(
        mask,
        reward=torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 0.0], dtype=torch.float64),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    steps = torch.tensor([0.05, -0.1, 0.1, 0.15, -0.12, 0.0], dtype=torch.float64)[:, None]
    found = []
    for algorithm in (algorithms.gmpo(), algorithms.grpo(kl=0.0)):
        logp = steps.clone().requires_grad_()
        batch = algorithm.minibatch(algorithm.prepare(rollouts))
        loss = algorithm.loss(Outputs(logp), batch).policy
        loss.backward()
        found.append((loss.detach(), logp.grad))
    torch.testing.assert_close(found[0], found[1])


def test_gmpo_without_clipping_is_gspo() -> None:
    for number in range(3):
        gmpo, gspo = algorithms.gmpo(clip=(50.0, 50.0)), algorithms.gspo(clip=(0.99, 1e6))
        torch.testing.assert_close(run(gmpo, number)[2], run(gspo, number)[2])


@pytest.mark.parametrize("number", range(3))
def test_dr_grpo_is_grpo_without_std_and_with_constant_denominators(number: int) -> None:
    grpo = replace(
        algorithms.grpo(std="none", kl=0.0), reduce=algorithms.dr_grpo(max_tokens=16).reduce
    )
    mine = algorithms.dr_grpo(max_tokens=16)
    torch.testing.assert_close(run(mine, number)[2], run(grpo, number)[2])
    half = run(algorithms.dr_grpo(max_tokens=32), number)
    torch.testing.assert_close(run(mine, number)[2], 2 * half[2])
    # its metrics are means all the same
    assert 0.5 < half[1].metrics["ratio"].item() < 2.0


@pytest.mark.parametrize("number", range(3))
def test_high_entropy_at_100_percent_is_its_base(number: int) -> None:
    all_tokens, base = (run(x, number) for x in (algorithms.high_entropy(1.0), algorithms.dapo()))
    assert all_tokens[1].policy.item() == base[1].policy.item()
    assert torch.equal(all_tokens[2], base[2])
    part = run(algorithms.high_entropy(0.2), number)[2]
    kept = part != 0
    torch.testing.assert_close(part[kept], base[2][kept])
    assert 0 < kept.sum() < (base[2] != 0).sum()


def test_highest_in_batch_compares_all_responses() -> None:
    entropy = torch.tensor([[5.0, 4.0, 3.0], [2.0, 1.0, float("nan")]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    for fraction, expected in ((0.01, 1), (0.2, 1), (0.25, 2), (0.5, 3), (1.0, 5)):
        assert highest_in_batch(entropy, mask, fraction).sum() == expected, fraction
    eleven = torch.arange(11.0)[None]  # 1 - 0.7 is 0.30000000000000004
    assert highest_in_batch(eleven, torch.ones(1, 11, dtype=torch.bool), 0.7).sum() == 8
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert not highest_in_batch(entropy, empty, 0.2).any()
    with pytest.raises(ValueError, match=r"For top-20% pass 0\.20"):
        algorithms.high_entropy(20)
    with pytest.raises(ValueError, match="entropy"):
        highest_in_batch(entropy, torch.ones_like(mask), 0.2)


def test_wrapped_credit_keeps_what_the_inner_one_requires() -> None:
    needed = requirements(algorithms.high_entropy())
    assert needed.compares_groups
    assert ENTROPY in needed.columns
    inner = algorithms.ppo().credit
    assert TopEntropyOnly(inner).needs == inner.needs | {ENTROPY}


@pytest.mark.parametrize("name", RECENT)
def test_at_the_old_policy_the_gradient_is_the_plain_policy_gradient(name: str) -> None:
    """At π_θ = π_old every ratio is 1, so the gradient is −share · Â per token, alike for units."""
    algorithm = make_algorithm(name)
    _, rollouts, _ = case_of(1, value=True)
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    logp = rollouts.logp_old.clone().requires_grad_()
    loss = algorithm.loss(Outputs(logp, rollouts.value), batch)
    policy = loss.metrics["policy_loss"]
    kl = loss.metrics.get("kl_loss", torch.zeros(()))
    loss.policy.backward()
    mask = rollouts.mask
    expected = -(batch.share("policy") * batch.credit.advantage)[mask]
    if "kl_loss" not in loss.metrics:
        got = logp.grad[mask]
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    assert policy.isfinite()
    assert kl.isfinite()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: algorithms.cispo(weight=(1.2, 0.8)), "0 ≤ low < high; got 1.2 and 0.8"),
        (lambda: algorithms.soft_adaptive(positive=0.0), "positive must be"),
        (lambda: algorithms.gmpo(clip=(0.0, 0.4)), "low must be"),
        (lambda: algorithms.sae(lam=95), "lam must be in"),
        (lambda: algorithms.reinforce_pp(gamma=2.0), "gamma must be in"),
    ],
)
def test_wrong_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_by_name_with_a_partition() -> None:
    assert make_algorithm("gmpo", partition="newline").ratio.over == Newline()
    assert make_algorithm("sae", partition={"name": "fixed", "size": 4}).credit.over == (
        FixedLength(4)
    )
