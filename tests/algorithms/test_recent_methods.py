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
from batches import golden_rollouts
from ragged import Layout, layout

from segcredit import algorithms
from segcredit.algorithms import make_algorithm
from segcredit.algorithms.credit import Case, ReturnToGo, SegmentBootstrap, TopEntropyOnly
from segcredit.algorithms.objective import ClippedInsideMean, ClippedWeight, SoftGate
from segcredit.algorithms.requirements import requirements
from segcredit.columns import ENTROPY
from segcredit.partition import FixedLength, Newline, Token
from segcredit.partition.entropy import highest_in_batch
from segcredit.train.columns import without_truncated
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


def golden(algorithm: Any) -> tuple[list[float], dict[str, float]]:
    """Advantages of the golden batch's eight tokens (golden_batch.py), and its loss by terms."""
    rollouts, outputs = golden_rollouts()
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    loss = algorithm.loss(outputs, batch)
    found = {name: x.item() for name, x in loss.metrics.items()}
    return batch.credit.advantage[rollouts.mask].tolist(), found | {"loss": loss.policy.item()}


def test_hand_numbers_of_whole_losses_dapo() -> None:
    """Responses a and b of six and two tokens, rewards 1 and 0, one group.

    Â = ±.5 / (√.5 + 1e-6) = ±.7071058.
    Ratios of a: e^.1 e^−.2 e^.3 e^.05 e^.25 e^−.1, at most 1.28: 1.105171 + .818731 + 1.28 +
    1.051271 + 1.28 + .904837 = 6.440010. Of b: e^−.3 = .740818, at least .8, and e^.4 = 1.491825,
    below the dual clip: 2.291825.
    Loss: −.7071058 (6.440010 − 2.291825) / 8 = −.3666507.
    """
    advantage, found = golden(algorithms.dapo())
    assert advantage == pytest.approx([0.7071058] * 6 + [-0.7071058] * 2, abs=1e-7)
    assert found["loss"] == pytest.approx(-0.3666507, abs=1e-7)
    assert found["clip_fraction"] == pytest.approx(3 / 8)


def test_hand_numbers_of_whole_losses_high_entropy() -> None:
    """The ⌈.2 · 8⌉ = 2 tokens of largest entropy are a's second and fifth, 1.2 and .9.

    Loss: −.7071058 (.818731 + 1.28) / 8 = −.1855031; the denominator is still all eight tokens.
    """
    advantage, found = golden(algorithms.high_entropy(0.2))
    assert advantage == pytest.approx([0, 0.7071058, 0, 0, 0.7071058, 0, 0, 0], abs=1e-7)
    assert found["loss"] == pytest.approx(-0.1855031, abs=1e-7)


def test_hand_numbers_of_whole_losses_reinforce_pp() -> None:
    """KL .01 in the reward, returns, whitening over the eight tokens, clip .2.

    log π_old − log π_ref of a: .1 −.1 .2 0 .1 −.05, from each token to the end: .25 .15 .25 .05
    .05 −.05; of b: .05 .1, so .15 .1. Returns: .9975 .9985 .9975 .9995 .9995 1.0005, −.0015 −.001.
    Their mean is .7488125, their unbiased variance .2143225, its root .4629498. Whitened:
    .5371803 .5393403 .5371803 .5415004 .5415004 .5436605, −1.6207211 −1.6196411.
    Ratios as above, at most 1.2 for a and at least .8 for b:
    .5371803 · 1.105171 + .5393403 · .818731 + .5371803 · 1.2 + .5415004 · 1.051271 +
    .5415004 · 1.2 + .5436605 · .904837 − 1.6207211 · .8 − 1.6196411 · 1.491825 = −.3219420.
    Loss: .3219420 / 8 = .0402428.
    """
    advantage, found = golden(algorithms.reinforce_pp())
    expected = [0.5371803, 0.5393403, 0.5371803, 0.5415004, 0.5415004, 0.5436605]
    assert advantage == pytest.approx([*expected, -1.6207211, -1.6196411], abs=1e-7)
    assert found["loss"] == pytest.approx(0.0402428, abs=1e-7)
    # without the KL the returns are the rewards: (1 − .75) / √(1.5/7) and −.75 / √(1.5/7)
    advantage, _ = golden(algorithms.reinforce_pp(kl=0.0))
    assert advantage == pytest.approx([0.5400617] * 6 + [-1.6201852] * 2, abs=1e-7)


def test_hand_numbers_of_whole_losses_reinforce_pp_baseline() -> None:
    """Rewards less the group's mean: ±.5, whose mean over tokens is .25 and variance 1.5 / 7.

    Whitened .25 / .4629100 = .5400617 and −.75 / .4629100 = −1.6201852.
    Loss without KL: −(.5400617 · 6.280010 − 1.6201852 · 2.291825) / 8 = .0401984.
    log π_θ − log π_ref: .2 −.3 .5 .05 .35 −.15, −.25 .5; half their squares .02 .045 .125 .00125
    .06125 .01125, .03125 .125, mean .0525: the k2 term is 1e-5 · .0525, with coefficient 2: .105.
    """
    advantage, found = golden(algorithms.reinforce_pp_baseline(kl=0.0))
    assert advantage == pytest.approx([0.5400617] * 6 + [-1.6201852] * 2, abs=1e-7)
    assert found["loss"] == pytest.approx(0.0401984, abs=1e-7)
    _, found = golden(algorithms.reinforce_pp_baseline())
    assert found["kl_loss"] == pytest.approx(5.25e-7, abs=1e-12)
    _, found = golden(algorithms.reinforce_pp_baseline(kl=2.0))
    assert found["kl_loss"] == pytest.approx(0.105, abs=1e-7)
    assert found["loss"] == pytest.approx(0.0401984 + 0.105, abs=1e-7)


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


def group_of_six(steps: list[float]) -> tuple[Rollouts, torch.Tensor]:
    """Two prompts with three one-token responses, and their log-ratios."""
    rollouts = _rollouts(
        torch.ones(6, 1, dtype=torch.bool),
        reward=torch.tensor([0.0, 1.0, 0.2, 1.0, 0.0, 0.3], dtype=torch.float64),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
    )
    return rollouts, torch.tensor(steps, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.2, 0.6)])
@pytest.mark.parametrize("sign", [1, -1])
def test_gmpo_with_one_token_is_grpo_also_where_both_clip(
    low: float, high: float, sign: int
) -> None:
    """Log-ratios up to ±1; GRPO's clips are those bounds as ratios, 1 − e^−low and e^high − 1."""
    rollouts, steps = group_of_six([sign * x for x in (1.0, 0.7, -0.9, -0.5, 0.55, 0.1)])
    wide = (1 - math.exp(-low), math.exp(high) - 1)
    found = []
    for algorithm in (algorithms.gmpo(clip=(low, high)), algorithms.grpo(clip=wide, kl=0.0)):
        logp = steps.clone().requires_grad_()
        batch = algorithm.minibatch(algorithm.prepare(rollouts))
        loss = algorithm.loss(Outputs(logp), batch)
        loss.policy.backward()
        found.append((loss.policy.detach(), logp.grad, loss.metrics["clip_fraction"]))
    torch.testing.assert_close(found[0], found[1])
    assert 0 < found[0][2] < 1, "some tokens are clipped, and some are not"
    assert (found[0][1] == 0).any()


def gmpo_oracle(
    x: list[list[float]], advantage: list[float], low: float, high: float
) -> tuple[float, list[list[float]]]:
    """GMPO's objective (arXiv 2507.20673, Eq. 4), negated, and its gradient with respect to x.

    J = 1/G Σ_i {Π_t |min(ρ_t Â_i, clip(ρ_t, e^−low, e^high) Â_i)|}^(1/|o_i|) sgn(Â_i).
    """
    total, grad = 0.0, []
    for row, a in zip(x, advantage, strict=True):
        product, inside = 1.0, []
        for one in row:
            ratio = math.exp(one)
            clipped = min(max(ratio, math.exp(-low)), math.exp(high))
            product *= abs(min(ratio * a, clipped * a))
            inside.append(ratio * a <= clipped * a)  # the minimum is the unclipped product
        mean = product ** (1 / len(row)) * (a > 0 or -1)
        total -= mean / len(x)
        grad.append([-mean / len(row) / len(x) * keep for keep in inside])
    return total, grad


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.2, 0.6), (0.7, 0.1)])
@pytest.mark.parametrize("seed", range(3))
def test_gmpo_is_its_papers_formula(seed: int, low: float, high: float) -> None:
    chooser = random.Random(seed)
    lengths = [chooser.randint(1, 9) for _ in range(8)]
    place = layout(lengths, seed=seed)
    x = [[chooser.uniform(-1, 1) for _ in range(n)] for n in lengths]
    rollouts = _rollouts(
        place.mask,
        logp_old=place.put([[-2.0] * n for n in lengths]),
        reward=torch.tensor([chooser.random() for _ in lengths], dtype=torch.float64),
        group=torch.tensor([0] * 4 + [1] * 4),
    )
    algorithm = algorithms.gmpo(clip=(low, high))
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    advantage = [row[0] for row in place.take(batch.credit.advantage)]
    logp = place.put([[one - 2.0 for one in row] for row in x]).requires_grad_()
    loss = algorithm.loss(Outputs(logp), batch).policy
    loss.backward()
    expected, grad = gmpo_oracle(x, advantage, low, high)
    assert loss.item() == pytest.approx(expected, **CLOSE)
    for ours, theirs in zip(place.take(logp.grad), grad, strict=True):
        assert ours == pytest.approx(theirs, **CLOSE)
    assert any(g == 0 for row in grad for g in row)


@pytest.mark.parametrize("name", ["gmpo", "gspo"])
def test_weights_per_token_are_averaged_where_tokens_share_a_ratio(name: str) -> None:
    """Weights 2 and ½ at the two tokens of the first response, 1 in the second: mean 1.25."""
    rollouts = _rollouts(
        torch.ones(2, 2, dtype=torch.bool),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    algorithm = make_algorithm(name)
    prepared = algorithm.prepare(rollouts)
    grad = {}
    for kind, weight in (("none", None), ("tokens", [2.0, 0.5]), ("response", [1.25, 1.25])):
        rows = None if weight is None else torch.tensor([weight, [1.0, 1.0]], dtype=torch.float64)
        logp = rollouts.logp_old.clone().requires_grad_()
        batch = algorithm.minibatch(replace(prepared, weight=rows))
        algorithm.loss(Outputs(logp), batch).policy.backward()
        grad[kind] = logp.grad
    torch.testing.assert_close(grad["tokens"], grad["response"])
    torch.testing.assert_close(grad["tokens"][0], 1.25 * grad["none"][0])
    torch.testing.assert_close(grad["tokens"][1], grad["none"][1])


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
    kl_loss = {"kl": 0.0} if name == "reinforce_pp_baseline" else {}  # the only one with a KL loss
    algorithm = make_algorithm(name, **kl_loss)
    _, rollouts, _ = case_of(1, value=True)
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    logp = rollouts.logp_old.clone().requires_grad_()
    loss = algorithm.loss(Outputs(logp, rollouts.value), batch)
    loss.policy.backward()
    mask = rollouts.mask
    expected = -(batch.share("policy") * batch.credit.advantage)[mask]
    assert (expected != 0).any()
    torch.testing.assert_close(logp.grad[mask], expected, rtol=1e-6, atol=1e-12)
    assert "kl_loss" not in loss.metrics


@pytest.mark.parametrize("name", [*RECENT, "grpo", "grpo_deepseekmath", "grpo_verl", "gspo"])
@pytest.mark.parametrize("moved", [-300.0, -95.0, 95.0, 300.0])
@pytest.mark.parametrize("reward", [[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratios_that_overflow_give_no_nan(
    name: str, moved: float, reward: list[float], dtype: torch.dtype
) -> None:
    """e^88 overflows in float32, and a token with advantage or share 0 would give 0 · ∞."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1], [1, 1, 0]]).bool()
    old = torch.tensor([[-0.5, -1.0, -2.0]]).expand(4, 3).to(dtype)
    rollouts = Rollouts.from_columns(
        mask,
        logp_old=old,
        reward=torch.tensor(reward),
        group=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([True, False, False, True]),
        logp_ref=old - 0.25,
        entropy=old.abs(),
        value=torch.zeros(4, 3),
    )
    algorithm = make_algorithm(name)
    for leave_out in (False, True):
        batch = algorithm.prepare(rollouts)
        batch = algorithm.minibatch(without_truncated(batch) if leave_out else batch)
        logp = (old + moved).requires_grad_()
        loss = algorithm.loss(Outputs(logp, rollouts.value), batch)
        loss.policy.backward()
        assert loss.policy.isfinite()
        assert loss.policy.dtype == torch.float32
        assert logp.grad.isfinite().all()
        assert all(x.isfinite() for x in loss.metrics.values())


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
