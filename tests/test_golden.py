"""Every golden number through the package itself, to 1e-6. The oracles have their own test."""

import json
import math
from dataclasses import replace
from pathlib import Path

import golden_batch as g
import numpy as np
import pytest
import torch
from batches import golden_rollouts, rollouts_of
from golden_batch import A, B
from ragged import layout
from torch import Tensor

from segcredit import algorithms
from segcredit.algorithms import PolicyGradient
from segcredit.algorithms.credit import GAE, LengthAdaptiveGAE
from segcredit.algorithms.objective import Clipped, TokenMean, Unclipped
from segcredit.core import advantages, group, losses, ratios, tracker
from segcredit.core.advantages import value_difference, whiten
from segcredit.core.losses import token_mean
from segcredit.partition import (
    Token,
    TopEntropy,
    exact_ceil,
    float_ceil,
    probability_accumulate,
    probability_cutpoints,
    response,
    tokens,
    top_entropy,
)
from segcredit.types import Algorithm, Batch, Loss, Outputs
from segcredit_lab.analysis.lift import TokenPool, lift
from segcredit_lab.analysis.ratio_bias import log_bound, log_gap
from segcredit_lab.analysis.reading import tail_starts

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
LAM = g.LAM


def t(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def run(algorithm: Algorithm) -> tuple[Batch, Loss]:
    rollouts, outputs = golden_rollouts()
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    return batch, algorithm.loss(outputs, batch)


def per_token(x: Tensor) -> tuple[list[float], list[float]]:
    return x[0, :6].tolist(), x[1, :2].tolist()


def per_segment(batch: Batch, x: Tensor) -> tuple[list[float], list[float]]:
    seg = batch.credit.segments
    read = seg.at_end(x)
    return read[0, : seg.num[0]].tolist(), read[1, : seg.num[1]].tolist()


def ends(segments: object, row: int, length: int) -> list[int]:
    return segments.end[row, : segments.num[row]].tolist()


def segmentation() -> dict[str, object]:
    rollouts, _ = golden_rollouts()
    mask = rollouts.mask
    k30, k100, k1 = (top_entropy(rollouts.entropy, mask, k) for k in (0.3, 1.0, 0.01))
    flat = top_entropy(torch.full((1, 10), 0.7), torch.ones(1, 10, dtype=torch.bool), 0.3)
    logp = t([g.PROB]).log()
    full = torch.ones(1, 6, dtype=torch.bool)
    spo = probability_cutpoints(logp, full, g.PROB_THRESHOLD, g.PROB_EVERY)
    gather = probability_accumulate(logp, full, g.PROB_THRESHOLD, g.PROB_EVERY)
    lengths = torch.arange(1, 2049)

    def mismatches(percent: int) -> list[int]:
        wrong = float_ceil(lengths, percent / 100) != exact_ceil(lengths, percent / 100)
        return lengths[wrong].tolist()

    return {
        "ends_k30": {"a": ends(k30, 0, 6), "b": ends(k30, 1, 2)},
        "ends_k100": {"a": ends(k100, 0, 6), "b": ends(k100, 1, 2)},
        "ends_k1_a": ends(k1, 0, 6),
        "ends_allequal_T10_k30": ends(flat, 0, 10),
        "prob_spo_ends_n2": ends(spo, 0, 6),
        "spo_chain_cut": ends(spo, 0, 6)[:-1],
        "prob_accumulate_ends_n2": ends(gather, 0, 6),
        "ceil_mismatch_k30": mismatches(30),
        **{f"ceil_mismatch_count_k{k}": len(mismatches(k)) for k in (10, 20, 30, 40, 55, 70, 90)},
    }


def sapo_paper() -> dict[str, object]:
    algorithm = algorithms.sapo(lam=LAM, kl=0.0)
    batch, loss = run(algorithm)
    rollouts = batch.rollouts
    segments = batch.credit.segments
    delta = advantages.segment_gae(
        advantages.terminal_reward(rollouts.reward, rollouts.mask),
        rollouts.value,
        segments,
        1.0,
        0.0,
    )
    ratio = ratios.geometric_mean_ratio(golden_rollouts()[1].logp, rollouts.logp_old, segments)
    _, by_token = run(replace(algorithm, reduce=TokenMean()))
    _, naive = run(algorithms.sapo_token_ratio(lam=LAM, kl=0.0))
    with_kl, _ = run(algorithms.sapo(lam=LAM, kl=0.1))
    shaped = advantages.kl_shaped_reward(
        rollouts.reward, rollouts.logp_old, rollouts.logp_ref, rollouts.mask, 0.1
    )
    single = PolicyGradient(
        credit=GAE(over=TopEntropy(0.3), lam=LAM),
        ratio=algorithm.ratio,
        surrogate=Unclipped(),
        reduce=algorithm.reduce,
    )
    only_a, outputs = rollouts_of([A])
    prepared = single.minibatch(single.prepare(only_a))
    single.loss(outputs, prepared).policy.backward()
    delta_a, delta_b = per_segment(batch, delta.advantage)
    A_a, A_b = per_segment(batch, batch.credit.advantage)
    R_a, R_b = per_segment(batch, batch.credit.value_target)
    ratio_a, ratio_b = per_token(ratio.detach())
    return {
        "sapo_paper_delta_a": delta_a,
        "sapo_paper_delta_b": delta_b,
        "sapo_paper_A_a": A_a,
        "sapo_paper_A_b": A_b,
        "sapo_paper_R_a": R_a,
        "sapo_paper_R_b": R_b,
        "sapo_ratio_a": ratio_a,
        "sapo_ratio_b": ratio_b,
        "sapo_paper_policy_loss_seqmean": loss.policy.item(),
        "sapo_paper_policy_loss_tokmean": by_token.policy.item(),
        "sapo_naiveIS_policy_loss_seqmean": naive.policy.item(),
        "sapo_paper_value_loss": loss.value.item(),
        "kl_seg_rewards_a": segments.sum(shaped)[0, :3].tolist(),
        "sapo_paper_A_kl_a": per_segment(with_kl, with_kl.credit.advantage)[0],
        "sapo_grad_unclipped_a": outputs.logp.grad[0, :6].tolist(),
    }


def sapo_authors() -> dict[str, object]:
    algorithm = algorithms.sapo_authors(lam=LAM, kl=0.0)
    batch, loss = run(algorithm)
    raw, _ = run(replace(algorithm, adjust=()))
    rollouts, _ = golden_rollouts()
    whole = response(rollouts.mask)
    reward = advantages.terminal_reward(rollouts.reward, rollouts.mask)
    at = {
        where: advantages.segment_gae(reward, rollouts.value, whole, 1.0, LAM, where).advantage[
            :, 0
        ]
        for where in ("start", "end")
    }
    raw_a, raw_b = per_segment(raw, raw.credit.advantage)
    R_a, R_b = per_segment(raw, raw.credit.value_target)
    white_a, white_b = per_token(batch.credit.advantage)
    return {
        "sapo_code_A_raw_a": raw_a,
        "sapo_code_A_raw_b": raw_b,
        "sapo_code_R_a": R_a,
        "sapo_code_R_b": R_b,
        "sapo_code_A_white_a": white_a,
        "sapo_code_A_white_b": white_b,
        "sapo_code_policy_loss": loss.policy.item(),
        "sapo_code_value_loss": loss.value.item(),
        "one_seg_paper_A": at["start"].tolist(),
        "one_seg_code_A": at["end"].tolist(),
    }


def token_ppo() -> dict[str, object]:
    algorithm = algorithms.ppo(lam=LAM, kl=0.0)
    batch, loss = run(algorithm)
    raw, raw_loss = run(replace(algorithm, adjust=()))
    ratio = ratios.token_ratio(golden_rollouts()[1].logp, raw.rollouts.logp_old, raw.rollouts.mask)
    decoupled, _ = run(algorithms.vc_ppo(lam=LAM, kl=0.0))
    vapo = replace(algorithms.vapo(), credit=LengthAdaptiveGAE(over=Token(), alpha=0.5))
    vapo_batch, vapo_loss = run(vapo)
    lengths = torch.tensor([6, 20, 100, 2000])
    raw_a, raw_b = per_token(raw.credit.advantage)
    R_a, R_b = per_token(raw.credit.value_target)
    white_a, white_b = per_token(batch.credit.advantage)
    ratio_a, ratio_b = per_token(ratio.detach())
    target_a, target_b = per_token(decoupled.credit.value_target)
    vapo_a, vapo_b = per_token(vapo_batch.credit.advantage)
    return {
        "ppo_A_raw_a": raw_a,
        "ppo_A_raw_b": raw_b,
        "ppo_R_a": R_a,
        "ppo_R_b": R_b,
        "ppo_A_white_a": white_a,
        "ppo_A_white_b": white_b,
        "ppo_ratio_a": ratio_a,
        "ppo_ratio_b": ratio_b,
        "ppo_policy_loss_white_tokmean": loss.policy.item(),
        "ppo_policy_loss_raw_tokmean": raw_loss.policy.item(),
        "ppo_value_loss": loss.value.item(),
        "vcppo_critic_target_a": target_a,
        "vcppo_critic_target_b": target_b,
        "vapo_lambda_alpha.05": advantages.length_adaptive_lambda(lengths, 0.05, False).tolist(),
        "vapo_A_alpha.5_a": vapo_a,
        "vapo_A_alpha.5_b": vapo_b,
        "vapo_pos_nll": vapo_loss.metrics["positive_nll"].item() / 0.1,
        "vapo_loss_alpha.5": vapo_loss.policy.item(),
    }


def groups() -> dict[str, object]:
    rewards, one = t(g.GROUP_REWARDS), torch.zeros(4, dtype=torch.long)
    no_kl, no_kl_loss = run(algorithms.grpo(kl=0.0))
    _, with_kl = run(algorithms.grpo(kl=0.01))
    _, narrow = run(algorithms.gspo())
    _, wide = run(algorithms.gspo(clip=(0.2, 0.2)))
    rloo, rloo_loss = run(algorithms.rloo(kl=0.05))
    _, reinforce = run(algorithms.rloo_reinforce(kl=0.05))
    rollouts, outputs = golden_rollouts()
    k3_a, k3_b = per_token(losses.k3(outputs.logp.detach(), rollouts.logp_ref))
    whole = response(rollouts.mask)
    return {
        "grpo_A_sample_std": group.group_zscore(rewards, one).tolist(),
        "grpo_A_pop_std": group.group_zscore(rewards, one, "population", 1e-8).tolist(),
        "grpo_A_nostd": group.group_zscore(rewards, one, "none").tolist(),
        "rloo_A": group.leave_one_out(rewards, one).tolist(),
        "grpo2_A": no_kl.credit.advantage[:, 0].tolist(),
        "k3_a": k3_a,
        "k3_b": k3_b,
        "grpo_loss_nokl": no_kl_loss.policy.item(),
        "grpo_loss_kl.01": with_kl.policy.item(),
        "gspo_ratio": ratios.geometric_mean_ratio(outputs.logp, rollouts.logp_old, whole)[
            :, 0
        ].tolist(),
        "gspo_loss_3e-4_4e-4": narrow.policy.item(),
        "gspo_loss_.2": wide.policy.item(),
        "rloo_kl_A": rloo.credit.advantage[:, 0].tolist(),
        "rloo_seq_ratio": ratios.raw_ratio(outputs.logp, rollouts.logp_old, whole)[:, 0].tolist(),
        "rloo_loss_clip.2": rloo_loss.policy.item(),
        "rloo_loss_reinforce": reinforce.policy.item(),
    }


def monte_carlo() -> dict[str, object]:
    full = torch.ones(1, 3, dtype=torch.bool)
    vine = value_difference(t([[0.0, 0.0, 1.0]]), t([g.STEP_VALUES]), full)

    # SPO-chain, on a's log-ratios with the probabilities of its own example
    place = layout([6], holes=False)
    rollouts, outputs = rollouts_of([A], place)
    logp_old = place.put([[math.log(p) for p in g.PROB]])
    logp = (logp_old + outputs.logp.detach() - rollouts.logp_old).requires_grad_()
    rollouts, outputs = rollouts.replace(logp_old=logp_old), replace(outputs, logp=logp)
    algorithm = algorithms.spo_chain(every=g.PROB_EVERY, kl=0.0)
    values = t([[99.0, *g.SPO_CUT_VALUES]])
    prepared = algorithm.prepare(rollouts, lambda *_: values)
    batch = algorithm.minibatch(prepared)
    unmasked = prepared.credit.advantage
    masked = torch.where(prepared.loss_mask, unmasked, 0.0)
    return {
        "vine_A": vine[0].tolist(),
        "spo_chain_A_unmasked": unmasked[0, :6].tolist(),
        "spo_chain_A_masked": masked[0, :6].tolist(),
        "spo_chain_A_white_on_mask": batch.credit.advantage[prepared.loss_mask].tolist(),
        "spo_chain_policy_loss": algorithm.loss(outputs, batch).policy.item(),
    }


def trees() -> dict[str, object]:
    # rows: the two depth-1 nodes, then the leaves of the first and of the second
    reward = t([0.0, 0.0, *g.TREE[0], *g.TREE[1]])
    parent = torch.tensor([-1, -1, 0, 0, 1, 1])
    one = torch.zeros(6, dtype=torch.long)
    edge, value = group.tree_advantage(reward, parent, one)
    normalized, _ = group.tree_advantage(reward, parent, one, normalize=True)
    return {
        "spo_tree_V": [value[:2].mean().item(), *value[:2].tolist()],
        "spo_tree_A_depth1": edge[:2].tolist(),
        "spo_tree_A_leaf": [edge[2:4].tolist(), edge[4:].tolist()],
        "spo_tree_A_depth1_grpo": normalized[:2].tolist(),
    }


def tracked() -> dict[str, object]:
    alpha, beta, reward, drift = (t(column) for column in zip(*g.TRACKED, strict=True))
    value = tracker.tracker_value(alpha, beta)
    new_alpha, new_beta = tracker.tracker_update(alpha, beta, reward, drift)
    rollouts, _ = golden_rollouts()
    algorithm = algorithms.single_stream_spo()
    batch = algorithm.prepare(rollouts.replace(baseline=value))
    first_alpha, first_beta = tracker.tracker_init(t([3.0]), 8)
    return {
        "sspo_v": value.tolist(),
        "sspo_A_raw": (reward - value).tolist(),
        "sspo_A_norm": batch.credit.advantage[:, 0].tolist(),
        "sspo_rho": tracker.tracker_forgetting(drift).tolist(),
        "sspo_alpha": new_alpha.tolist(),
        "sspo_beta": new_beta.tolist(),
        "sspo_weight": tracker.tracker_weight(value).tolist(),
        "sspo_init_S3_n8": [first_alpha.item(), first_beta.item()],
    }


def imitation_and_preference() -> dict[str, object]:
    rollouts, outputs = golden_rollouts()
    restem = algorithms.restem()
    kept = restem.minibatch(restem.prepare(rollouts))
    row_a = Outputs(logp=outputs.logp[:1])
    chosen, rejected = t([-1.0]), t([-2.0])

    steps = TopEntropy(0.3)
    dvo = algorithms.dvo(partition=steps, weight_cap=None)  # the paper's, without SPO's weight
    only_a, outputs_a = rollouts_of([A])
    batch = dvo.minibatch(dvo.prepare(only_a, lambda *_: t([g.STEP_VALUES])))
    segments = batch.credit.segments
    step = segments.sum(losses.k1(outputs_a.logp.detach(), only_a.logp_ref))
    return {
        "restem_loss": restem.loss(row_a, kept).policy.item(),
        "dpo_loss": losses.dpo(chosen, rejected, 0.1).item(),
        "dpop_loss_lam50": losses.dpo_positive(chosen, rejected, 0.1, 50.0).item(),
        "dpop_loss_lam5": losses.dpo_positive(chosen, rejected, 0.1, 5.0).item(),
        "dvo_seg_logratio": step[0].tolist(),
        "dvo_target": segments.at_start(batch.credit.advantage)[0].tolist(),
        "dvo_loss_beta.1": dvo.loss(outputs_a, batch).policy.item(),
    }


def analyses() -> dict[str, object]:
    x = t([[0.2, 0.2, 0.2]])
    one = response(torch.ones(1, 3, dtype=torch.bool))
    length, log_ratio = np.array([3]), np.array([0.2])
    gap, bound = np.exp(log_gap(length, log_ratio)), np.exp(log_bound(length, log_ratio))
    zero = torch.zeros_like(x)
    raw = ratios.raw_ratio(x, zero, one)[0, 0].item()
    mean = ratios.geometric_mean_ratio(x, zero, one)[0, 0].item()
    out: dict[str, object] = {"bias": [raw, mean, gap.item(), bound.item()]}
    entropy, jump = np.array(g.LIFT_ENTROPY), np.array(g.LIFT_JUMP)
    pool = TokenPool(np.arange(len(entropy)), entropy, jump, len(entropy))
    for q in (0.5, 0.7, 0.9):
        high, decisive = in_tail(entropy, q), in_tail(jump, g.LIFT_D)
        counts = [int(high.sum()), int(decisive.sum()), int((high & decisive).sum())]
        (value,) = lift(pool, np.array([q]), np.array([g.LIFT_D]))[0]
        out[f"lift_q{q}"] = [*counts, float(value)]
    return out


def in_tail(x: np.ndarray, q: float) -> np.ndarray:
    """Whether each value is at least the q-quantile, by the laboratory's rule."""
    ordered = np.sort(x)
    first_equal = np.searchsorted(ordered, ordered)
    start = tail_starts(first_equal, np.arange(1, len(x) + 1)[None], np.array([q]))[0, 0]
    return x >= ordered[start]


PRODUCED: dict[str, object] = {}
for produce in (
    segmentation,
    sapo_paper,
    sapo_authors,
    token_ppo,
    groups,
    monte_carlo,
    trees,
    tracked,
    imitation_and_preference,
    analyses,
):
    PRODUCED.update(produce())


def test_every_golden_key_is_produced() -> None:
    assert set(PRODUCED) == set(GOLDEN)


@pytest.mark.parametrize("key", sorted(GOLDEN))
def test_golden(key: str) -> None:
    _close(PRODUCED[key], GOLDEN[key])


def _close(got: object, want: object) -> None:
    if isinstance(want, dict):
        assert set(got) == set(want)
        for key in want:
            _close(got[key], want[key])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for x, y in zip(got, want, strict=True):
            _close(x, y)
    else:
        assert got == pytest.approx(want, abs=1e-6)


def test_unestimated_tail_gets_no_credit() -> None:
    full = torch.ones(1, 3, dtype=torch.bool)
    known = torch.tensor([[True, False, False]])
    got = value_difference(t([[0.0, 0.0, 1.0]]), t([[0.5, math.nan, math.nan]]), full, known)
    assert got.tolist() == [[0.5, 0.0, 0.0]]


def test_token_units_equal_their_own_partition() -> None:
    rollouts, _ = golden_rollouts()
    assert torch.equal(
        tokens(rollouts.mask).index, top_entropy(rollouts.entropy, rollouts.mask, 1.0).index
    )


def test_unclipped_surrogate_is_the_wide_clip() -> None:
    ratio, advantage = t([[0.5, 3.0]]), t([[1.0, -2.0]])
    wide = Clipped(1.0, 100.0)(ratio, advantage)
    assert torch.equal(wide, Unclipped()(ratio, advantage))
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert token_mean(wide, mask).item() == pytest.approx((-0.5 + 6.0) / 2)


def test_whitening_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two valid entries; got 1"):
        whiten(t([[1.0, 2.0]]), torch.tensor([[True, False]]))


def test_golden_batch_in_float32() -> None:
    for name in ("sapo", "sapo_authors", "ppo", "grpo"):
        algorithm = algorithms.ALGORITHMS[name]()
        found = []
        for dtype in (torch.float32, torch.float64):
            rollouts, outputs = golden_rollouts(dtype)
            batch = algorithm.minibatch(algorithm.prepare(rollouts))
            found.append(algorithm.loss(outputs, batch).total.item())
        assert found[0] == pytest.approx(found[1], abs=1e-6), B
