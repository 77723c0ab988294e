"""The oracles against the worked numbers, and against cases small enough to do by hand.

One function per method composes the oracles into that method's golden numbers, and says which
ratio, clip and reduction the composed losses use. Together they must produce every golden key.
"""

import json
import math
import statistics
from pathlib import Path

import oracles as o
import pytest
from golden_batch import (
    FRACTION,
    GAMMA,
    GROUP_REWARDS,
    LAM,
    LIFT_D,
    LIFT_ENTROPY,
    LIFT_JUMP,
    PROB,
    PROB_EVERY,
    PROB_THRESHOLD,
    SPO_CUT_VALUES,
    STEP_VALUES,
    TRACKED,
    TREE,
    A,
    B,
    Response,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())

BATCH = (A, B)
EPSILON = 0.2  # symmetric clip of the paper's reading, of PPO, GRPO, RLOO and SPO
CLIP_HIGHER = (0.2, 0.28)  # the authors' run script, VAPO
DUAL_CLIP = 3.0  # verl; binds on none of the golden tokens (no A < 0 has a ratio above 3)

Golden = dict[str, object]


def exp(xs: list[float]) -> list[float]:
    return [math.exp(x) for x in xs]


def add(xs: list[float], ys: list[float]) -> list[float]:
    return [x + y for x, y in zip(xs, ys, strict=True)]


def every_token(response: Response) -> list[int]:
    return list(range(response.length))


def outcome_reward(response: Response) -> list[float]:
    """The final reward on the last token and nothing before."""
    return [0.0] * (response.length - 1) + [response.reward]


def segment_credit(
    response: Response, ends: list[int], value_at: o.ValueAt, lam: float = LAM
) -> tuple[list[float], list[float]]:
    return o.segment_gae(outcome_reward(response), response.value, ends, GAMMA, lam, value_at)


def policy_rows(
    ratios: list[list[float]],
    advantages: list[list[float]],
    clip: tuple[float, float],
    dual_clip: float | None = None,
) -> list[list[float]]:
    """The clipped loss of every token, one row per response, not yet reduced."""
    return [
        [o.clipped_term(r, a, *clip, dual_clip) for r, a in zip(*row, strict=True)]
        for row in zip(ratios, advantages, strict=True)
    ]


# --------------------------------------------------------------------------------------------
# The golden numbers, method by method
# --------------------------------------------------------------------------------------------


def segmentation() -> Golden:
    numbers: Golden = {
        "ends_k30": {
            "a": o.top_entropy_ends(A.entropy, FRACTION),
            "b": o.top_entropy_ends(B.entropy, FRACTION),
        },
        "ends_k100": {
            "a": o.top_entropy_ends(A.entropy, 1.0),
            "b": o.top_entropy_ends(B.entropy, 1.0),
        },
        "ends_k1_a": o.top_entropy_ends(A.entropy, 0.01),
        "ends_allequal_T10_k30": o.top_entropy_ends([1.0] * 10, FRACTION),
        "prob_accumulate_ends_n2": o.probability_ends_accumulate(PROB, PROB_THRESHOLD, PROB_EVERY),
        "prob_spo_ends_n2": o.probability_ends_spo(PROB, PROB_THRESHOLD, PROB_EVERY),
        "ceil_mismatch_k30": ceil_mismatches(30),
    }
    for k in (10, 20, 30, 40, 55, 70, 90):
        numbers[f"ceil_mismatch_count_k{k}"] = len(ceil_mismatches(k))
    return numbers


def ceil_mismatches(k: int) -> list[int]:
    """Lengths T ≤ 2048 at which the ceiling of the double T·(k/100) is not the exact count.

    The product must be with the *fraction* k/100: ⌈(T·k)/100⌉, which divides last, never fails.
    """
    fraction = k / 100
    return [
        length
        for length in range(1, 2049)
        if max(1, math.ceil(length * fraction)) != o.exact_count(length, str(fraction))
    ]


def sapo_paper() -> Golden:
    numbers: Golden = {}
    advantages, errors = [], []
    for name, seq in zip("ab", BATCH, strict=True):
        advantage, target = segment_credit(seq, seq.ends, "start")
        delta, _ = segment_credit(seq, seq.ends, "start", lam=0.0)  # λ = 0 leaves δ alone (Eq. 7)
        numbers[f"sapo_paper_delta_{name}"] = delta
        numbers[f"sapo_paper_A_{name}"] = advantage
        numbers[f"sapo_paper_R_{name}"] = target
        numbers[f"sapo_ratio_{name}"] = o.spread(o.segment_ratio(seq.log_ratio, seq.ends), seq.ends)
        advantages.append(o.spread(advantage, seq.ends))
        errors.append(o.value_loss(seq.value_now, seq.value, target, seq.ends, "start"))

    # Eq. 9: segment ratio, raw advantage, ε = .2 on both sides, no dual clip; mean over the T
    # tokens of a response, then over responses. "tokmean" is the same rows, all tokens alike.
    ratios = [numbers["sapo_ratio_a"], numbers["sapo_ratio_b"]]
    rows = policy_rows(ratios, advantages, (EPSILON, EPSILON))
    numbers["sapo_paper_policy_loss_seqmean"] = o.response_mean(rows)
    numbers["sapo_paper_policy_loss_tokmean"] = o.token_mean(rows)

    # The naive-IS ablation: token ratios under segment advantages, otherwise Eq. 9.
    rows = policy_rows([exp(seq.log_ratio) for seq in BATCH], advantages, (EPSILON, EPSILON))
    numbers["sapo_naiveIS_policy_loss_seqmean"] = o.response_mean(rows)

    # Eq. 10: V_φ read at segment starts, no ½, no clip; mean over the M segments of a response,
    # then over responses.
    numbers["sapo_paper_value_loss"] = o.response_mean(errors)

    # −s_m·Â_m/T, the derivative of response a's own loss (no 1/B) without clipping (Eq. 13).
    ratio_a, advantage_a = numbers["sapo_ratio_a"], advantages[0]
    numbers["sapo_grad_unclipped_a"] = [
        -r * a / A.length for r, a in zip(ratio_a, advantage_a, strict=True)
    ]

    # k1 KL in the reward, β = .1, summed undiscounted inside each segment.
    reward = o.token_rewards(A.reward, A.logp_old, A.logp_ref, 0.1)
    numbers["kl_seg_rewards_a"] = [sum(reward[b : e + 1]) for b, e in o.spans(A.ends)]
    numbers["sapo_paper_A_kl_a"], _ = o.segment_gae(reward, A.value, A.ends, GAMMA, LAM, "start")

    for reading, value_at in (("paper", "start"), ("code", "end")):
        credits = [segment_credit(seq, [seq.length - 1], value_at)[0] for seq in BATCH]
        numbers[f"one_seg_{reading}_A"] = [credit[0] for credit in credits]
    return numbers


def sapo_code() -> Golden:
    numbers: Golden = {}
    advantages, errors = [], []
    for name, seq in zip("ab", BATCH, strict=True):
        advantage, target = segment_credit(seq, seq.ends, "end")
        numbers[f"sapo_code_A_raw_{name}"] = advantage
        numbers[f"sapo_code_R_{name}"] = target
        advantages.append(o.spread(advantage, seq.ends))
        errors.append(
            o.value_loss(seq.value_now, seq.value, target, seq.ends, "end", clip=0.5, half=True)
        )
    white = [[min(max(a, -5.0), 5.0) for a in row] for row in o.whiten(advantages)]
    numbers["sapo_code_A_white_a"], numbers["sapo_code_A_white_b"] = white

    # Segment ratio, whitened (over all 8 tokens) and ±5-clamped advantage, ε = .2/.28, c = 3,
    # mean over all tokens of the batch.
    ratios = [o.spread(o.segment_ratio(seq.log_ratio, seq.ends), seq.ends) for seq in BATCH]
    numbers["sapo_code_policy_loss"] = o.token_mean(
        policy_rows(ratios, white, CLIP_HIGHER, DUAL_CLIP)
    )
    # V_φ read at segment ends, ½, clip ±.5 around the old values, mean over all 5 ends of the
    # batch. The clip binds once: V_φ = 1.4 against V_old = .7 gives 1.2, but the maximum takes
    # the unclipped error of 1.4, so the value is that of the unclipped loss.
    numbers["sapo_code_value_loss"] = o.token_mean(errors)
    return numbers


def token_ppo() -> Golden:
    numbers: Golden = {}
    raw, errors = [], []
    for name, seq in zip("ab", BATCH, strict=True):
        advantage = o.gae(outcome_reward(seq), seq.value, GAMMA, LAM)
        target = add(advantage, seq.value)  # formed before whitening
        numbers[f"ppo_A_raw_{name}"] = advantage
        numbers[f"ppo_R_{name}"] = target
        numbers[f"ppo_ratio_{name}"] = exp(seq.log_ratio)
        raw.append(advantage)
        errors.append(
            o.value_loss(
                seq.value_now, seq.value, target, every_token(seq), "start", clip=0.5, half=True
            )
        )
    white = o.whiten(raw)
    numbers["ppo_A_white_a"], numbers["ppo_A_white_b"] = white

    # Token ratio, ε = .2 on both sides, c = 3, mean over all tokens; with and without whitening.
    ratios = [exp(seq.log_ratio) for seq in BATCH]
    clip = (EPSILON, EPSILON)
    numbers["ppo_policy_loss_white_tokmean"] = o.token_mean(
        policy_rows(ratios, white, clip, DUAL_CLIP)
    )
    numbers["ppo_policy_loss_raw_tokmean"] = o.token_mean(policy_rows(ratios, raw, clip, DUAL_CLIP))
    # ½, clip ±.5 around the old values (max of both errors), mean over all tokens.
    numbers["ppo_value_loss"] = o.token_mean(errors)
    return numbers


def vc_ppo_and_vapo() -> Golden:
    numbers: Golden = {
        "vapo_lambda_alpha.05": [o.length_adaptive_lambda(n, 0.05) for n in (6, 20, 100, 2000)],
    }
    advantages = []
    for name, seq in zip("ab", BATCH, strict=True):
        # λ_critic = 1 for the targets, λ_actor for the advantages.
        monte_carlo = o.gae(outcome_reward(seq), seq.value, GAMMA, lam=1.0)
        numbers[f"vcppo_critic_target_{name}"] = add(monte_carlo, seq.value)
        lam = o.length_adaptive_lambda(seq.length, alpha=0.5)
        advantages.append(o.gae(outcome_reward(seq), seq.value, GAMMA, lam))
        numbers[f"vapo_A_alpha.5_{name}"] = advantages[-1]

    # Raw (not whitened) advantage, token ratio, ε = .2/.28, mean over all tokens of the batch,
    # plus μ = .1 times the NLL of the *current* policy over the tokens of the correct response a.
    ratios = [exp(seq.log_ratio) for seq in BATCH]
    numbers["vapo_pos_nll"] = o.nll(A.logp)
    policy_loss = o.token_mean(policy_rows(ratios, advantages, CLIP_HIGHER))
    numbers["vapo_loss_alpha.5"] = policy_loss + 0.1 * o.nll(A.logp)
    return numbers


def grpo_and_gspo() -> Golden:
    group = o.group_zscore([A.reward, B.reward], "sample", 1e-6)
    numbers: Golden = {
        "grpo_A_sample_std": o.group_zscore(GROUP_REWARDS, "sample", 1e-6),  # verl
        "grpo_A_pop_std": o.group_zscore(GROUP_REWARDS, "population", 1e-8),  # SPO's code
        "grpo_A_nostd": o.group_zscore(GROUP_REWARDS, "none", 0.0),
        "grpo2_A": group,
        "gspo_ratio": [o.gspo_ratio(seq.log_ratio) for seq in BATCH],
    }
    kl = [
        [o.k3(new, ref) for new, ref in zip(seq.logp, seq.logp_ref, strict=True)] for seq in BATCH
    ]
    numbers["k3_a"], numbers["k3_b"] = kl

    # Group {a, b}, sample std + 1e-6; token ratio, ε = .2 on both sides; mean over the tokens of
    # a response, then over responses. The k3 of the *current* policy (logp, not logp_old) against
    # the reference is reduced in the same way and enters with .01.
    advantages = [[a] * seq.length for a, seq in zip(group, BATCH, strict=True)]
    ratios = [exp(seq.log_ratio) for seq in BATCH]
    loss = o.response_mean(policy_rows(ratios, advantages, (EPSILON, EPSILON)))
    numbers["grpo_loss_nokl"] = loss
    numbers["grpo_loss_kl.01"] = loss + 0.01 * o.response_mean(kl)

    # GSPO: one ratio and one term per response, mean over responses.
    ratios = [[ratio] for ratio in numbers["gspo_ratio"]]
    per_response = [[a] for a in group]
    for key, clip in (("3e-4_4e-4", (3e-4, 4e-4)), (".2", (EPSILON, EPSILON))):
        numbers[f"gspo_loss_{key}"] = o.response_mean(policy_rows(ratios, per_response, clip))
    return numbers


def rloo() -> Golden:
    # k1 with β = .05, log π_old − log π_ref summed over the response, inside the reward.
    rewards = [sum(o.token_rewards(seq.reward, seq.logp_old, seq.logp_ref, 0.05)) for seq in BATCH]
    advantage = o.leave_one_out(rewards)
    ratio = [o.raw_segment_ratio(seq.log_ratio, [seq.length - 1])[0] for seq in BATCH]
    # TRL: one term per response from the unnormalized ratio, ε = .2, mean over responses.
    rows = policy_rows([[r] for r in ratio], [[a] for a in advantage], (EPSILON, EPSILON))
    # The RLOO paper: −A_i·Σ_t log π_θ (current policy, token SUM, no ratio), mean over responses.
    reinforce = [-a * sum(seq.logp) for a, seq in zip(advantage, BATCH, strict=True)]
    return {
        "rloo_A": o.leave_one_out(GROUP_REWARDS),
        "rloo_kl_A": advantage,
        "rloo_seq_ratio": ratio,
        "rloo_loss_clip.2": o.response_mean(rows),
        "rloo_loss_reinforce": statistics.fmean(reinforce),
    }


def monte_carlo_methods() -> Golden:
    numbers: Golden = {"vine_A": o.value_difference(1.0, list(STEP_VALUES))}

    ends = o.probability_ends_spo(PROB, PROB_THRESHOLD, PROB_EVERY)
    cuts = ends[:-1]  # PROB starts above the threshold, so there is no cut at −1
    # Segment 1 starts at the prompt, which was not estimated: it gets 0.
    unmasked = o.spread(o.value_difference(1.0, [None, *SPO_CUT_VALUES]), ends)
    low = [t for t, p in enumerate(PROB) if p < PROB_THRESHOLD]
    (white,) = o.whiten([[unmasked[t] for t in low]])  # statistics over the low tokens only
    # Token ratio (A's log-ratios), ε = .2 on both sides, whitened advantage, mean over the 3 low
    # tokens only. No KL in the golden number.
    ratio = exp([A.log_ratio[t] for t in low])
    numbers |= {
        "spo_chain_cut": cuts,
        "spo_chain_A_unmasked": unmasked,
        "spo_chain_A_masked": [
            a if p <= PROB_THRESHOLD else 0.0 for a, p in zip(unmasked, PROB, strict=True)
        ],
        "spo_chain_A_white_on_mask": white,
        "spo_chain_policy_loss": o.token_mean(policy_rows([ratio], [white], (EPSILON, EPSILON))),
    }

    root, children = o.tree_values(TREE)
    edges = o.tree_advantages(TREE, normalize=False)
    numbers |= {
        "spo_tree_V": [root, *(value for value, _ in children)],
        "spo_tree_A_depth1": [a for a, _ in edges],
        "spo_tree_A_leaf": [[a for a, _ in below] for _, below in edges],
        "spo_tree_A_depth1_grpo": [a for a, _ in o.tree_advantages(TREE, normalize=True)],
    }
    return numbers


def single_stream() -> Golden:
    values = [o.tracker_value(alpha, beta) for alpha, beta, _, _ in TRACKED]
    raw = [reward - value for (_, _, reward, _), value in zip(TRACKED, values, strict=True)]
    rhos = [o.tracker_rho(drift, 0.06, 0.875, 0.96) for _, _, _, drift in TRACKED]
    updated = [
        o.tracker_update(alpha, beta, reward, rho)
        for (alpha, beta, reward, _), rho in zip(TRACKED, rhos, strict=True)
    ]
    return {
        "sspo_v": values,
        "sspo_A_raw": raw,
        "sspo_A_norm": o.batch_normalize(raw),
        "sspo_rho": rhos,
        "sspo_alpha": [alpha for alpha, _ in updated],
        "sspo_beta": [beta for _, beta in updated],
        "sspo_weight": [o.tracker_weight(value, 0.05) for value in values],
        "sspo_init_S3_n8": list(o.tracker_init(3, 8, 0.875)),
    }


def offline_methods() -> Golden:
    # DVO's step sums are those of the *current* policy against the reference, x + (old − ref),
    # over the three entropy segments of a; mean over steps.
    to_ref = add(A.log_ratio, A.ref_gap)
    sums = [sum(to_ref[b : e + 1]) for b, e in o.spans(A.ends)]
    targets = o.value_difference(1.0, list(STEP_VALUES))
    return {
        "restem_loss": o.nll(A.logp),  # the current policy on the one response kept
        "dpo_loss": o.dpo(-1.0, -2.0, 0.1),
        "dpop_loss_lam50": o.dpo_positive(-1.0, -2.0, 0.1, 50.0),
        "dpop_loss_lam5": o.dpo_positive(-1.0, -2.0, 0.1, 5.0),
        "dvo_seg_logratio": sums,
        "dvo_target": targets,
        "dvo_loss_beta.1": o.dvo(sums, targets, 0.1),
    }


def analyses() -> Golden:
    numbers: Golden = {"bias": list(o.ratio_bias(3, 0.2))}
    large = [jump >= o.quantile_linear(LIFT_JUMP, LIFT_D) for jump in LIFT_JUMP]
    for q in (0.5, 0.7, 0.9):
        high = [h >= o.quantile_linear(LIFT_ENTROPY, q) for h in LIFT_ENTROPY]
        both = sum(a and b for a, b in zip(high, large, strict=True))
        # |A|, |D|, |A ∩ D|, Lift
        numbers[f"lift_q{q}"] = [
            sum(high),
            sum(large),
            both,
            o.lift(LIFT_ENTROPY, LIFT_JUMP, q, LIFT_D),
        ]
    return numbers


PRODUCED: Golden = (
    segmentation()
    | sapo_paper()
    | sapo_code()
    | token_ppo()
    | vc_ppo_and_vapo()
    | grpo_and_gspo()
    | rloo()
    | monte_carlo_methods()
    | single_stream()
    | offline_methods()
    | analyses()
)


def flat(x: object) -> list[float]:
    """The numbers of a nested golden entry, in order."""
    if isinstance(x, dict):
        return [number for key in sorted(x) for number in flat(x[key])]
    if isinstance(x, list):
        return [number for item in x for number in flat(item)]
    return [x]


def shape(x: object) -> object:
    """The nesting of a golden entry, without its numbers."""
    if isinstance(x, dict):
        return {key: shape(item) for key, item in x.items()}
    return [shape(item) for item in x] if isinstance(x, list) else None


def test_every_golden_number_is_produced():
    assert set(PRODUCED) == set(GOLDEN)


@pytest.mark.parametrize("key", GOLDEN)
def test_golden(key: str):
    assert shape(PRODUCED[key]) == shape(GOLDEN[key])
    assert flat(PRODUCED[key]) == pytest.approx(flat(GOLDEN[key]), rel=0, abs=1e-6)


# --------------------------------------------------------------------------------------------
# Cases by hand, for what the golden numbers do not reach
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "fraction", "count"),
    [
        (10, 0.3, 3),
        (11, 0.3, 4),
        (1, 0.3, 1),
        (5, 0.0, 1),
        (7, 1.0, 7),
        (20, 0.55, 11),
        (100, "0.07", 7),
    ],
)
def test_exact_count(length: int, fraction: str | float, count: int):
    assert o.exact_count(length, fraction) == count


def test_one_token_is_one_segment():
    assert o.top_entropy_ends([0.3], 0.3) == [0]
    assert o.probability_ends_spo([0.1], 0.9, 5) == [0]
    assert o.newline_ends(["\n"]) == [0]
    assert o.step_ends(["Step 1"]) == [0]
    assert o.fixed_length_ends(1, 4) == [0]


def test_probability_rules():
    assert o.probability_ends_spo([0.5, 0.95, 0.5], 0.9, 1) == [1, 2]  # the cut at −1 is no end
    assert o.probability_ends_spo([0.95, 0.9], 0.9, 1) == [1]  # p = .9 is not low: no cut
    assert o.probability_ends_accumulate([0.95, 0.9], 0.9, 1) == [1]
    assert o.probability_ends_accumulate([0.5] * 5, 0.9, 2) == [1, 3, 4]


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["a", " b", "c"], [2]),  # no newline
        (["a", "\n", "b", "\n", "c"], [1, 3, 4]),
        (["a", ".\n", "\n", "b", ""], [2, 4]),  # a blank line merges backwards
        (["a", "\n", "b", "\n", ""], [1, 4]),  # and so does the end-of-sequence token
        (["a", "\n", "  ", "\n", "b"], [3, 4]),
        (["\n", "\n", "a", "\n", "b"], [3, 4]),  # blank lines at the beginning merge forward
        (["\n", " ", ""], [2]),  # nothing but blanks
        (["a\nb", "c"], [0, 1]),  # the newline inside a token still ends the segment after it
    ],
)
def test_newline_ends(pieces: list[str], ends: list[int]):
    assert o.newline_ends(pieces) == ends


@pytest.mark.parametrize(
    ("pieces", "ends"),
    [
        (["no", " marker", ""], [2]),
        (["Step", " 1", ":", " x", "\n", "Step", " 2", ":", " y", ""], [4, 9]),
        (["So", ".\n", "Step", " 1", "\n", "Step", " 2"], [1, 4, 6]),  # a preamble of its own
        (["\n", "##", " ", "Step", " 1", "\n", "Step", " 2"], [5, 7]),  # only marks: no preamble
        (["", "**", "St", "ep 1", "**\n", "** ", "Step 2"], [5, 6]),  # the token with the "S"
        (["x\nStep", " 1", "\n\nStep", " 2"], [1, 3]),  # no token before the first "S"
        (["see ", "Step", " 1"], [2]),  # not at a line start
        (["Step", " one"], [1]),  # no digits
        (["a\n", "Step 1\nStep 2", " b"], [0, 2]),  # two markers in a token cut once
    ],
)
def test_step_ends(pieces: list[str], ends: list[int]):
    assert o.step_ends(pieces) == ends


def test_fixed_length_ends():
    assert o.fixed_length_ends(7, 3) == [2, 5, 6]
    assert o.fixed_length_ends(6, 3) == [2, 5]
    assert o.fixed_length_ends(2, 3) == [1]


def test_spans_and_spread():
    assert o.spans([1, 4, 5]) == [(0, 1), (2, 4), (5, 5)]
    assert o.spread([1.0, 2.0, 3.0], [1, 4, 5]) == [1, 1, 2, 2, 2, 3]


def test_gae_discounts_per_unit():
    # δ = [0 + .5·.4 − .2, 1 − .4] = [0, .6]; Â = [0 + .5·.5·.6, .6]
    assert o.gae([0.0, 1.0], [0.2, 0.4], gamma=0.5, lam=0.5) == pytest.approx([0.15, 0.6])


def test_gae_sum_is_the_recursion():
    reward, value, gamma, lam = [0.1, -0.2, 0.3, 1.0], [0.5, 0.6, 0.4, 0.7], 0.97, 0.9
    expected, advantage, next_value = [], 0.0, 0.0
    for r, v in zip(reversed(reward), reversed(value), strict=True):
        advantage = r + gamma * next_value - v + gamma * lam * advantage
        next_value = v
        expected.insert(0, advantage)
    assert o.gae(reward, value, gamma, lam) == pytest.approx(expected)


def test_one_token_per_segment_is_token_gae():
    for value_at in ("start", "end"):
        advantage, target = segment_credit(A, every_token(A), value_at)
        assert advantage == pytest.approx(GOLDEN["ppo_A_raw_a"], abs=1e-6)
        assert target == pytest.approx(GOLDEN["ppo_R_a"], abs=1e-6)


def test_unclipped_gradient_by_finite_differences():
    """Eq. 13 from Eq. 9: the derivative of response a's loss by each of its log-probs."""
    advantage, _ = segment_credit(A, A.ends, "start")
    per_token = o.spread(advantage, A.ends)

    def loss(log_ratio: list[float]) -> float:
        ratio = o.spread(o.segment_ratio(log_ratio, A.ends), A.ends)
        return o.response_mean(policy_rows([ratio], [per_token], (math.inf, math.inf)))

    step = 1e-5
    for t, expected in enumerate(GOLDEN["sapo_grad_unclipped_a"]):
        up, down = list(A.log_ratio), list(A.log_ratio)
        up[t] += step
        down[t] -= step
        assert (loss(up) - loss(down)) / (2 * step) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss"),
    [
        (1.5, 1.0, None, -1.28),  # clipped above
        (0.5, 1.0, None, -0.5),  # a good token is not clipped from below
        (0.5, -1.0, None, 0.8),  # clipped below
        (5.0, -1.0, None, 5.0),  # a bad token is not clipped from above …
        (5.0, -1.0, 3.0, 3.0),  # … but for the dual clip,
        (5.0, 1.0, 3.0, -1.28),  # which leaves A > 0 alone
        (2.0, -1.0, 3.0, 2.0),
    ],
)
def test_clipped_term(ratio: float, advantage: float, dual_clip: float | None, loss: float):
    assert o.clipped_term(ratio, advantage, 0.2, 0.28, dual_clip) == pytest.approx(loss)


def test_reductions():
    rows = [[1.0, 2.0, 3.0], [6.0]]
    assert o.response_mean(rows) == 4.0
    assert o.token_mean(rows) == 3.0
    assert o.constant_mean(rows, 24.0) == 0.5


def test_value_clip_keeps_the_larger_error():
    # V_old = 0, V = 1, clip .5 → .5. Target 1: errors 0 and .25; target 0: errors 1 and .25.
    assert o.value_loss([1.0], [0.0], [1.0], [0], "start", clip=0.5) == [0.25]
    assert o.value_loss([1.0], [0.0], [0.0], [0], "start", clip=0.5) == [1.0]
    assert o.value_loss([1.0], [0.0], [0.0], [0], "start", clip=0.5, half=True) == [0.5]


def test_value_difference_without_estimates():
    assert o.value_difference(1.0, [0.5, None, None]) == [0.5, 0.0, 0.0]  # §4.9
    assert o.value_difference(1.0, [None, 0.25]) == [0.0, 0.75]


def test_equal_rewards_give_no_advantage():
    assert o.group_zscore([1.0, 1.0], "sample", 1e-6) == [0.0, 0.0]
    assert o.group_zscore([1.0, 1.0], "population", 1e-8) == [0.0, 0.0]
    assert o.leave_one_out([1.0, 1.0]) == [0.0, 0.0]


def test_a_group_or_batch_of_one_is_undefined():
    for undefined in (
        lambda: o.group_zscore([1.0], "sample", 1e-6),
        lambda: o.leave_one_out([1.0]),
        lambda: o.batch_normalize([1.0]),
        lambda: o.whiten([[1.0]]),
    ):
        with pytest.raises(statistics.StatisticsError):
            undefined()


def test_uneven_tree():
    value, children = o.tree_values([[1.0, 0.0], 0.0])
    assert (value, [v for v, _ in children]) == (0.25, [0.5, 0.0])
    assert o.tree_advantages([[1.0, 0.0], 0.0], normalize=False) == [
        (0.25, [(0.5, []), (-0.5, [])]),
        (-0.25, []),
    ]
    assert o.tree_advantages([[2.0]], normalize=True) == [(0.0, [(0.0, [])])]


def test_kl_estimators():
    assert o.k1(-1.0, -1.5) == 0.5
    assert o.k2(-1.0, -1.5) == 0.125
    assert o.k3(-1.0, -1.5) == pytest.approx(math.exp(-0.5) - 0.5)
    assert o.k3(-1.0, -1.0) == 0.0


def test_dpo_survives_large_margins():
    assert o.dpo(-1e4, 1e4, 1.0) == 2e4
    assert o.dpo_positive(1.0, 0.0, 0.1, 50.0) == o.dpo(1.0, 0.0, 0.1)


def test_ratio_bias_is_within_its_bound():
    for length, shift in ((1, 0.3), (5, -0.2), (40, 0.05)):
        _, _, gap, bound = o.ratio_bias(length, shift)
        assert gap <= bound


def test_quantile_positions_are_exact():
    assert o.quantile_linear([3.0, 1.0, 2.0], 0.5) == 2.0
    assert o.quantile_linear([0.0, 10.0], "0.25") == 2.5
    # .55·100 is 55.00000000000001 in doubles; the quantile is the 55th point all the same.
    assert o.quantile_linear([float(x) for x in range(101)], 0.55) == 55.0
