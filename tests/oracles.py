"""Naive reference oracles: one function per equation, loops over plain lists of floats.

They are written to be checked against the paper (SAPO, Eq. 1–13 and its appendices) and against
the algorithm reference (§), not to be fast, and share no code with the library that they test.

One response at a time: T tokens, 0-based, holes in the mask already cut out. `ends` lists the
segment-end indices e_m in increasing order; the last one is T − 1. V[t] is the value of the prefix
*before* token t. Functions named "…loss" or "…term" return what is minimized.
"""

import math
import re
import statistics
from fractions import Fraction
from typing import Literal, TypeAlias

Tree: TypeAlias = "float | list[Tree]"  # a leaf reward, or the children of a node
Node: TypeAlias = "tuple[float, list[Node]]"  # a number and the nodes below it
ValueAt: TypeAlias = Literal["start", "end"]

# --------------------------------------------------------------------------------------------
# Segmentation (§2): every rule returns segment-END indices, T − 1 always among them
# --------------------------------------------------------------------------------------------


def exact_count(length: int, fraction: str | float) -> int:
    """n = max(1, ⌈T·k⌉) in exact arithmetic, the fraction k read as a decimal (§2)."""
    return max(1, math.ceil(length * Fraction(str(fraction))))


def top_entropy_ends(entropy: list[float], fraction: str | float) -> list[int]:
    """Ends = {the n tokens of largest H} ∪ {T − 1}, ties in the order (−H, index) (Eq. 11, §2)."""
    length = len(entropy)
    ranked = sorted(range(length), key=lambda t: (-entropy[t], t))
    picks = ranked[: exact_count(length, fraction)]
    return sorted({*picks, length - 1})


def probability_ends_spo(prob: list[float], threshold: float, every: int) -> list[int]:
    """SPO's code: low = {t : p_t < threshold}; cuts = (low − 1)[::n]; ends = cuts ∪ {T − 1} (§2).

    A cut at −1 is the prompt state: a place to estimate a value at, but not the end of a segment.
    """
    low = [t for t, p in enumerate(prob) if p < threshold]
    cuts = [t - 1 for t in low][::every]
    return sorted({cut for cut in cuts if cut >= 0} | {len(prob) - 1})


def probability_ends_accumulate(prob: list[float], threshold: float, every: int) -> list[int]:
    """SAPO's wording of it: a segment ends ON its n-th token with p < threshold (§2)."""
    ends = []
    count = 0
    for t, p in enumerate(prob):
        count += p < threshold
        if count == every:
            ends.append(t)
            count = 0
    return sorted({*ends, len(prob) - 1})


def newline_ends(pieces: list[str]) -> list[int]:
    """A token whose text contains a newline ends its segment (§2).

    A segment of whitespace only (or of special tokens, whose text is empty) merges backwards; the
    blank ones at the very beginning have nothing before them and merge forward.
    """
    last = len(pieces) - 1
    ends: list[int] = []
    text = ""
    seen_text = False  # has any segment so far held more than whitespace?
    for t, piece in enumerate(pieces):
        text += piece
        if "\n" not in piece and t != last:
            continue
        if text.strip():  # a real segment: a new end
            ends.append(t)
            seen_text = True
        elif seen_text:  # blank: move the previous end here
            ends[-1] = t
        text = ""
    return ends or [last]  # nothing but whitespace: one segment


STEP = re.compile(r"^[#* ]*(Step [0-9]+)", re.MULTILINE)


def step_ends(pieces: list[str]) -> list[int]:
    """A segment ends at the token before the one that holds the "S" of a "Step <digits>" (§2).

    The marker stands at a line start, after any of '#', '*' and ' '. What precedes the first
    marker is a segment of its own, unless it is only whitespace, '#' and '*'.
    """
    owner = [t for t, piece in enumerate(pieces) for _ in piece]  # character → token
    holders = [owner[match.start(1)] for match in STEP.finditer("".join(pieces))]
    ends = {holder - 1 for holder in holders if holder > 0} | {len(pieces) - 1}
    if holders and not re.search(r"[^\s#*]", "".join(pieces[: holders[0]])):
        ends.discard(holders[0] - 1)  # such a preamble belongs to the first step
    return sorted(ends)


def fixed_length_ends(length: int, size: int) -> list[int]:
    """Ends = L − 1, 2L − 1, …, T − 1 (§2)."""
    return sorted({*range(size - 1, length, size), length - 1})


# --------------------------------------------------------------------------------------------
# Segments and tokens (Eq. 5)
# --------------------------------------------------------------------------------------------


def spans(ends: list[int]) -> list[tuple[int, int]]:
    """(b_m, e_m) with b_1 = 0 and b_{m+1} = e_m + 1 (the paper, Eq. 5, 0-based)."""
    starts = [0, *(end + 1 for end in ends[:-1])]
    return list(zip(starts, ends, strict=True))


def spread(per_segment: list[float], ends: list[int]) -> list[float]:
    """x_t := x_{m(t)}: the number of a segment, once per token of it (the paper, below Eq. 7)."""
    per_token = []
    for x, (b, e) in zip(per_segment, spans(ends), strict=True):
        per_token += [x] * (e - b + 1)
    return per_token


# --------------------------------------------------------------------------------------------
# Advantages with a critic (Eq. 4, 6, 7)
# --------------------------------------------------------------------------------------------


def token_rewards(
    final_reward: float, logp_old: list[float], logp_ref: list[float], coef: float
) -> list[float]:
    """r_t = −coef·(log π_old − log π_ref)_t, plus the final reward on the last token (§4.2, 9)."""
    rewards = [-coef * k1(old, ref) for old, ref in zip(logp_old, logp_ref, strict=True)]
    rewards[-1] += final_reward
    return rewards


def gae(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """Â_m = Σ_{l=0}^{M−m} (γλ)^l δ_{m+l} as the sum it is (the paper, Eq. 7; tokens: Eq. 4).

    δ_m = r_m + γ V(s_{m+1}) − V(s_m), with V = 0 past the end (Eq. 6).
    """
    count = len(reward)
    next_value = [*value[1:], 0.0]
    delta = [reward[m] + gamma * next_value[m] - value[m] for m in range(count)]
    return [
        sum((gamma * lam) ** step * delta[m + step] for step in range(count - m))
        for m in range(count)
    ]


def segment_gae(
    token_reward: list[float],
    value: list[float],
    ends: list[int],
    gamma: float,
    lam: float,
    value_at: ValueAt,
) -> tuple[list[float], list[float]]:
    """Â_m and R̂_m = Â_m + V(s_m), one per segment (the paper, Eq. 6–7).

    r_m = Σ_{t=b_m}^{e_m} r_t, undiscounted. V(s_m) is V[b_m] ("start": the paper) or V[e_m]
    ("end": the authors' code, §4.2, row 1).
    """
    reward = [sum(token_reward[t] for t in range(b, e + 1)) for b, e in spans(ends)]
    state_value = [value[b if value_at == "start" else e] for b, e in spans(ends)]
    advantage = gae(reward, state_value, gamma, lam)
    target = [a + v for a, v in zip(advantage, state_value, strict=True)]
    return advantage, target


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """λ(l) = 1 − 1/(α·l), not clamped: negative for l < 1/α (VAPO, §4.5)."""
    return 1 - 1 / (alpha * length)


def whiten(rows: list[list[float]]) -> list[list[float]]:
    """(A − mean)/√(var + 1e-8) over all tokens of all rows, unbiased variance (verl, §0)."""
    tokens = [a for row in rows for a in row]
    mean = statistics.fmean(tokens)
    std = math.sqrt(statistics.variance(tokens) + 1e-8)
    return [[(a - mean) / std for a in row] for row in rows]


# --------------------------------------------------------------------------------------------
# Advantages without a critic (§4.6–4.11)
# --------------------------------------------------------------------------------------------


def group_zscore(
    rewards: list[float], std: Literal["sample", "population", "none"], eps: float
) -> list[float]:
    """A_i = (r_i − mean_G)/(std_G + ε); "none": A_i = r_i − mean_G (GRPO, §4.6).

    The sample standard deviation of a group of one is undefined and raises.
    """
    mean = statistics.fmean(rewards)
    if std == "none":
        return [r - mean for r in rewards]
    scale = statistics.stdev(rewards) if std == "sample" else statistics.pstdev(rewards)
    return [(r - mean) / (scale + eps) for r in rewards]


def leave_one_out(rewards: list[float]) -> list[float]:
    """A_i = r_i − mean_{j≠i} r_j (RLOO, §4.7); a group of one is undefined and raises."""
    return [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def value_difference(reward: float, state_value: list[float | None]) -> list[float]:
    """A_m = r_m + V̂_{m+1} − V̂_m, with V̂ = 0 past the end (VinePPO, §4.9; SPO-chain, §4.10).

    r_m is the final reward for the last unit and 0 before. V̂_m = None: never estimated; then unit
    m itself gets 0, and the unit before it reads the observed return in its place.
    """
    last = len(state_value) - 1
    advantage = []
    for m, own in enumerate(state_value):
        if own is None:
            advantage.append(0.0)
        elif m == last:
            advantage.append(reward + 0.0 - own)
        else:
            following = state_value[m + 1]
            advantage.append((reward if following is None else following) - own)
    return advantage


def tree_values(tree: Tree) -> Node:
    """V(leaf) = its reward, V(node) = mean of V(children); as (V, [children…]) (SPO, §4.10)."""
    if not isinstance(tree, list):
        return float(tree), []
    children = [tree_values(child) for child in tree]
    return statistics.fmean(value for value, _ in children), children


def tree_advantages(tree: Tree, normalize: bool) -> list[Node]:
    """A(edge) = V(child) − V(parent), one (A, [edges below…]) per edge below the root (§4.10).

    Normalized: divided by the population std of the siblings' values + 1e-8. No edge leads to the
    root, so the answer is the list of the root's edges; it is empty for a leaf.
    """
    if not isinstance(tree, list):
        return []
    parent, children = tree_values(tree)
    values = [value for value, _ in children]
    scale = statistics.pstdev(values) + 1e-8 if normalize else 1.0
    return [
        ((value - parent) / scale, tree_advantages(child, normalize))
        for value, child in zip(values, tree, strict=True)
    ]


def tracker_init(successes: float, samples: int, rho_min: float) -> tuple[float, float]:
    """N₀ = 1/(1 − ρ_min); α = N₀(S + ½)/(n + 1); β = N₀(n − S + ½)/(n + 1) (§4.11)."""
    strength = 1 / (1 - rho_min)
    alpha = strength * (successes + 0.5) / (samples + 1)
    beta = strength * (samples - successes + 0.5) / (samples + 1)
    return alpha, beta


def tracker_value(alpha: float, beta: float) -> float:
    """v̂ = α/(α + β), read before the update (single-stream SPO, §4.11)."""
    return alpha / (alpha + beta)


def tracker_rho(drift: float, half_life: float, rho_min: float, rho_max: float) -> float:
    """ρ = clip(2^(−D/half-life), ρ_min, ρ_max) (single-stream SPO, §4.11)."""
    return min(max(2 ** (-drift / half_life), rho_min), rho_max)


def tracker_update(alpha: float, beta: float, reward: float, rho: float) -> tuple[float, float]:
    """α ← ρα + r; β ← ρβ + 1 − r, for r in [0, 1] (single-stream SPO, §4.11)."""
    return rho * alpha + reward, rho * beta + 1 - reward


def tracker_weight(value: float, floor: float) -> float:
    """Weight of a prompt = √(v̂(1 − v̂)) + floor (single-stream SPO, §4.11)."""
    return math.sqrt(value * (1 - value)) + floor


def batch_normalize(xs: list[float]) -> list[float]:
    """(x − mean)/std over the sequences of a batch, unbiased std, no ε (§4.11).

    The worked numbers do not settle ε: any of 0 … 1e-6 reproduces them.
    """
    mean, std = statistics.fmean(xs), statistics.stdev(xs)
    return [(x - mean) / std for x in xs]


# --------------------------------------------------------------------------------------------
# Ratios (Eq. 2, 8, appendix)
# --------------------------------------------------------------------------------------------


def segment_ratio(log_ratio: list[float], ends: list[int]) -> list[float]:
    """s_m(θ) = exp(1/|z_m| · Σ_{t=b_m}^{e_m} x_t), one per segment (the paper, Eq. 8)."""
    return [math.exp(sum(log_ratio[b : e + 1]) / (e - b + 1)) for b, e in spans(ends)]


def raw_segment_ratio(log_ratio: list[float], ends: list[int]) -> list[float]:
    """R_m = exp(Σ_{t=b_m}^{e_m} x_t), one per segment (the paper, appendix, Eq. 20)."""
    return [math.exp(sum(log_ratio[b : e + 1])) for b, e in spans(ends)]


def gspo_ratio(log_ratio: list[float]) -> float:
    """s = exp(1/T · Σ_t x_t): Eq. 8 with one segment (GSPO, §4.8)."""
    return math.exp(sum(log_ratio) / len(log_ratio))


def ratio_bias(length: int, mean_log_ratio: float) -> tuple[float, float, float, float]:
    """e^{Lμ}, e^{μ}, their distance and its bound e^{L|μ|}(L − 1)|μ| (appendix, Eq. 25–26)."""
    raw = math.exp(length * mean_log_ratio)
    geometric = math.exp(mean_log_ratio)
    shift = abs(mean_log_ratio)
    return raw, geometric, abs(raw - geometric), math.exp(length * shift) * (length - 1) * shift


# --------------------------------------------------------------------------------------------
# Losses and their reductions (Eq. 3, 9, 10)
# --------------------------------------------------------------------------------------------


def clipped_term(
    ratio: float,
    advantage: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> float:
    """−min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high)·A), the loss of one token (the paper, Eq. 3, 9).

    Dual clip, only where A < 0: the minimum is kept from falling below c·A (§4.2, row 4).
    """
    clipped_ratio = min(max(ratio, 1 - clip_low), 1 + clip_high)
    term = min(ratio * advantage, clipped_ratio * advantage)
    if dual_clip is not None and advantage < 0:
        term = max(term, dual_clip * advantage)
    return -term


def response_mean(rows: list[list[float]]) -> float:
    """1/B · Σ_i 1/T_i · Σ_t x_{i,t}: the 1/T of Eq. 9 (the 1/M of Eq. 10), then over responses."""
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def token_mean(rows: list[list[float]]) -> float:
    """Σ_i Σ_t x_{i,t} / Σ_i T_i: every token of the batch weighs the same (§0)."""
    return sum(sum(row) for row in rows) / sum(len(row) for row in rows)


def constant_mean(rows: list[list[float]], denominator: float) -> float:
    """Σ_i Σ_t x_{i,t} / denominator: a sum over a constant that no length can change."""
    return sum(sum(row) for row in rows) / denominator


def value_loss(
    value: list[float],
    value_old: list[float],
    target_per_segment: list[float],
    ends: list[int],
    value_at: ValueAt,
    clip: float | None = None,
    half: bool = False,
) -> list[float]:
    """(V_φ(s_m) − R̂_m)², one per segment, for the caller to reduce (the paper, Eq. 10).

    With `clip`, as verl: max of that and of the error of clip(V_φ, V_old − c, V_old + c); `half`
    puts ½ before either (§4.2, row 6). `value_at` as in `segment_gae`.
    """
    errors = []
    for target, (b, e) in zip(target_per_segment, spans(ends), strict=True):
        t = b if value_at == "start" else e
        error = (value[t] - target) ** 2
        if clip is not None:
            near = min(max(value[t], value_old[t] - clip), value_old[t] + clip)
            error = max(error, (near - target) ** 2)
        errors.append(0.5 * error if half else error)
    return errors


def k1(logp: float, logp_ref: float) -> float:
    """k1 = log π − log π_ref (§0)."""
    return logp - logp_ref


def k2(logp: float, logp_ref: float) -> float:
    """k2 = ½(log π − log π_ref)²."""
    return 0.5 * (logp - logp_ref) ** 2


def k3(logp: float, logp_ref: float) -> float:
    """k3 = e^d − d − 1 with d = log π_ref − log π (§0)."""
    d = logp_ref - logp
    return math.exp(d) - d - 1


def nll(logp: list[float]) -> float:
    """−1/T · Σ_t log π_θ(y_t), the mean over the tokens of one response (RestEM, §4.12)."""
    return -sum(logp) / len(logp)


def _minus_log_sigmoid(z: float) -> float:
    """−log σ(z) = log(1 + e^{−z}), arranged so that no exponential overflows."""
    return max(0.0, -z) + math.log1p(math.exp(-abs(z)))


def dpo(delta_w: float, delta_l: float, beta: float) -> float:
    """−log σ(β(Δ_w − Δ_l)), Δ = Σ_t (log π − log π_ref)_t (DPO, §4.13)."""
    return _minus_log_sigmoid(beta * (delta_w - delta_l))


def dpo_positive(delta_w: float, delta_l: float, beta: float, lam: float) -> float:
    """−log σ(β(Δ_w − Δ_l − λ·max(0, −Δ_w))), the hinge inside the sigmoid (DPOP, §4.13)."""
    return _minus_log_sigmoid(beta * (delta_w - delta_l - lam * max(0.0, -delta_w)))


def dvo(step_log_ratios: list[float], targets: list[float], beta: float) -> float:
    """1/M · Σ_m ½(β·Σ_{t∈m}(log π − log π_ref)_t − target_m)² (DVO, §4.14).

    `step_log_ratios` holds the inner sum, one number per step; target_m = r_m + V_{m+1} − V_m.
    """
    pairs = list(zip(step_log_ratios, targets, strict=True))
    return sum(0.5 * (beta * total - target) ** 2 for total, target in pairs) / len(pairs)


# --------------------------------------------------------------------------------------------
# Analyses (Eq. 12, §5)
# --------------------------------------------------------------------------------------------


def quantile_linear(xs: list[float], q: str | float) -> float:
    """Linear between the order statistics around position q·(n − 1), q read as a decimal (§5)."""
    ordered = sorted(xs)
    position = Fraction(str(q)) * (len(xs) - 1)
    below = math.floor(position)
    above = math.ceil(position)
    return ordered[below] + float(position - below) * (ordered[above] - ordered[below])


def image_weights(image_kl: list[list[float] | None], floor: float) -> list[float]:
    """Weights of responses by their mean KL (VPPO); None: the prompt has no image."""
    means = [None if row is None else sum(row) / len(row) for row in image_kl]
    seen = [x for x in means if x is not None]
    if not seen or max(seen) - min(seen) <= 1e-6:
        return [1.0] * len(means)
    scaled = {x: (x - min(seen)) / (max(seen) - min(seen)) for x in seen}
    highest = floor + (1 - floor) / (sum(scaled[x] for x in seen) / len(seen))
    return [1.0 if x is None else floor + scaled[x] * (highest - floor) for x in means]


def most_dependent(image_kl: list[float], fraction: str) -> list[bool]:
    """The ⌈T · fraction⌉ tokens of largest KL; ties go to the earlier token."""
    ranked = sorted(range(len(image_kl)), key=lambda t: (-image_kl[t], t))
    kept = set(ranked[: math.ceil(Fraction(fraction) * len(image_kl))])
    return [t in kept for t in range(len(image_kl))]


def lift(entropy: list[float], value_jump: list[float], q: str | float, d: str | float) -> float:
    """Lift = P(D | A)/P(D), A = {H ≥ quantile_q(H)}, D = {ΔV ≥ quantile_d(ΔV)} (Eq. 12, §5)."""
    high_entropy = [h >= quantile_linear(entropy, q) for h in entropy]
    large_jump = [jump >= quantile_linear(value_jump, d) for jump in value_jump]
    both = sum(a and b for a, b in zip(high_entropy, large_jump, strict=True))
    return (both / sum(high_entropy)) / (sum(large_jump) / len(large_jump))
