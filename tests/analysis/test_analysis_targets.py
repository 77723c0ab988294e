"""Eq. 14 and Eq. 16 of the paper, by hand and against loops."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import row, some_rollouts, write_run

from segcredit.runlog import read_run
from segcredit_lab.analysis import AnalysisSettings, analyze_runs
from segcredit_lab.analysis.lift import TokenPool, jump_stages, mean_jumps
from segcredit_lab.analysis.reading import read_steps
from segcredit_lab.analysis.segments import unit_of
from segcredit_lab.analysis.targets import (
    BUCKETS,
    FIXED,
    Horizon,
    fixed_sums,
    recorded_sums,
    segment_sums,
    target_variance,
)

FEW = AnalysisSettings(resamples=50)


def pool(entropy: list[float], jump: list[float], owner: list[int] | None = None) -> TokenPool:
    who = np.array(owner or [0] * len(entropy))
    return TokenPool(
        who, np.array(entropy, float), np.array(jump, float), int(who.max(initial=0)) + 1
    )


# ── Eq. 14 ───────────────────────────────────────────────────────────────────────────────────────


def test_mean_jumps_by_hand() -> None:
    """Entropies 1 … 5: the median is 3, the .75-quantile 4."""
    found = pool([3, 1, 5, 2, 4], [0.3, 0.1, 0.7, 0.1, 0.3])
    once = np.ones((1, 1), dtype=np.int64)
    above, overall = mean_jumps(found, once, np.array([0.0, 0.5, 0.75, 0.9]))
    assert overall.tolist() == [pytest.approx(0.3)]
    assert above[0].tolist() == pytest.approx([0.3, 1.3 / 3, 0.5, 0.7])


def test_tokens_of_the_same_entropy_stay_together() -> None:
    found = pool([1, 1, 1, 1], [0.0, 0.2, 0.4, 0.6])
    above, overall = mean_jumps(found, np.ones((1, 1), dtype=np.int64), np.array([0.5, 0.95]))
    assert above[0].tolist() == pytest.approx([0.3, 0.3])
    assert overall[0] == pytest.approx(0.3)


def naive_jumps(found: TokenPool, counts: np.ndarray, q: float) -> tuple[float, float]:
    """Eq. 14 with every response written out as often as it is drawn."""
    entropy: list[float] = []
    jump: list[float] = []
    for response, times in enumerate(counts):
        for _ in range(int(times)):
            for place in range(len(found.owner)):
                if found.owner[place] == response:
                    entropy.append(float(found.entropy[place]))
                    jump.append(float(found.jump[place]))
    if not entropy:
        return math.nan, math.nan
    limit = np.quantile(entropy, q)
    chosen = [d for h, d in zip(entropy, jump, strict=True) if h >= limit]
    return sum(chosen) / len(chosen), sum(jump) / len(jump)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 40))
def test_draws_of_responses_are_as_if_written_out(seed: int, responses: int, tokens: int) -> None:
    rng = np.random.default_rng(seed)
    found = TokenPool(
        np.sort(rng.integers(0, responses, tokens)),
        rng.integers(0, 6, tokens) / 4,  # with ties
        rng.uniform(size=tokens),
        responses,
    )
    counts = rng.multinomial(responses, np.full(responses, 1 / responses), size=4)
    quantiles = np.array([0.0, 0.25, 0.5, 0.75])
    above, overall = mean_jumps(found, counts, quantiles)
    for number, drawn in enumerate(counts):
        for at, q in enumerate(quantiles):
            expected = naive_jumps(found, drawn, float(q))
            got = (above[number, at], overall[number])
            assert got == pytest.approx(expected, nan_ok=True)


def test_a_claim_that_holds_and_one_that_does_not() -> None:
    rng = np.random.default_rng(0)

    def stage(sign: float) -> tuple[float, float]:
        pools = []
        for _ in range(3):
            entropy = rng.uniform(size=400)
            jump = 1.0 + sign * entropy + rng.normal(0, 0.1, 400)
            pools.append(pool([*entropy], [*jump], [*np.repeat(np.arange(20), 20)]))
        early, _, late = jump_stages(pools, FEW)
        assert (early.ratio.name, late.ratio.name) == ("early", "late")
        assert early.ratio.mean[0] == pytest.approx(1.0), "above the 0-quantile are all tokens"
        return tuple(late.ratio.over_responses[:, -1])

    assert stage(1.0)[0] > 1.1
    assert stage(-0.9)[1] < 0.9


# ── Eq. 16 ───────────────────────────────────────────────────────────────────────────────────────


def test_variances_by_hand() -> None:
    """Pieces of two tokens: means 2, 6 and 2 of targets 1 3 5 7 and 2 2."""
    owner = np.array([0, 0, 0, 0, 1, 1])
    unit = np.array([0, 0, 1, 1, 2, 2])
    target = np.array([1.0, 3.0, 5.0, 7.0, 2.0, 2.0])
    made = np.array([1.0, 5.0, 3.0])
    sums = segment_sums(owner, unit, target, made, np.zeros(3, dtype=np.int64), 2, 1)
    assert sums.shape == (2, 1, 9)
    found = target_variance(sums.sum(axis=0)[None, None])
    assert found.num[0, 0] == 3
    assert found.claimed[0, 0] == pytest.approx(0.5)
    assert found.token[0, 0] == pytest.approx(38 / 9)  # mean 10/3, mean of squares 46/3
    assert found.mean_ratio[0, 0] == pytest.approx((32 / 9) / (38 / 9))
    assert found.target_ratio[0, 0] == pytest.approx((8 / 3) / (38 / 9))
    assert found.correlation[0, 0] == pytest.approx((32 / 38 - 0.5) / 0.5)


def test_variance_between_steps_does_not_count() -> None:
    owner, unit = np.array([0, 1]), np.array([0, 1])
    group = np.zeros(2, dtype=np.int64)
    one = segment_sums(owner, unit, np.array([0.0, 2.0]), np.array([0.0, 2.0]), group, 2, 1)
    far = segment_sums(owner, unit, np.array([100.0, 102.0]), np.array([0.0, 2.0]), group, 2, 1)
    found = target_variance(np.stack([x.sum(axis=0)[None] for x in (one, far)]))
    assert found.token[0, 0] == pytest.approx(1.0)


def naive_targets(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    """R̂ = Â + V by the recursion of GAE."""
    made, following, after = [0.0] * len(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + gamma * following - values[t]
        after = delta + gamma * lam * after
        following = values[t]
        made[t] = after + values[t]
    return made


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.9), (0.98, 0.5), (1.0, 0.0)])
def test_equal_pieces_are_those_of_a_loop(tmp_path: Path, gamma: float, lam: float) -> None:
    (step,) = read_steps(read_run(write_run(tmp_path, rollouts=some_rollouts(1, responses=7))))
    found = target_variance(fixed_sums(step, Horizon(gamma, lam)).sum(axis=0)[None, None])
    for at, length in enumerate(FIXED):
        tokens: list[float] = []
        means: list[float] = []
        segments: list[float] = []
        for response, reward in enumerate(step.reward.tolist()):
            values = step.value[step.owner == response].tolist()
            each = naive_targets(values, reward, gamma, lam)
            whole = naive_targets(values[::length], reward, gamma**length, lam**length)
            for first, target in zip(range(0, len(values), length), whole, strict=True):
                if first + length <= len(values):
                    tokens += each[first : first + length]
                    means.append(sum(each[first : first + length]) / length)
                    segments.append(target)
        if len(means) < 2:
            assert math.isnan(found.mean_ratio[0, at])
            continue
        assert found.num[0, at] == len(means)
        assert found.token[0, at] == pytest.approx(np.var(tokens), rel=1e-6)
        assert found.mean_ratio[0, at] == pytest.approx(np.var(means) / np.var(tokens), rel=1e-6)
        expected = np.var(segments) / np.var(tokens)
        assert found.target_ratio[0, at] == pytest.approx(expected, rel=1e-6)


def test_recorded_segments_are_grouped_by_length(tmp_path: Path) -> None:
    steps = read_steps(read_run(write_run(tmp_path, rollouts=some_rollouts(1, responses=9))))
    (step,) = [x.without_holes() for x in steps]
    sums = recorded_sums(step, Horizon(1.0, 0.9), Horizon(1.0, 0.8)).sum(axis=0)
    lengths = np.bincount(unit_of(step.owner, step.segment))
    for at, (first, last) in enumerate(BUCKETS):
        inside = (lengths >= first) & (lengths <= last)
        assert sums[at, 0] == inside.sum()
        assert sums[at, 6] == lengths[inside].sum()
    tokens: list[float] = []
    means: list[float] = []
    segments: list[float] = []
    for response, reward in enumerate(step.reward.tolist()):
        values = step.value[step.owner == response].tolist()
        which = step.segment[step.owner == response].tolist()
        starts = [t for t in range(len(which)) if t == 0 or which[t] != which[t - 1]]
        each = naive_targets(values, reward, 1.0, 0.9)
        whole = naive_targets([values[t] for t in starts], reward, 1.0, 0.8)
        for first, last, target in zip(starts, [*starts[1:], len(values)], whole, strict=True):
            if last - first == 2:
                tokens += each[first:last]
                means.append(sum(each[first:last]) / 2)
                segments.append(target)
    found = target_variance(sums[None, None])
    assert len(means) > 3
    assert found.mean_ratio[0, 1] == pytest.approx(np.var(means) / np.var(tokens), rel=1e-6)
    assert found.target_ratio[0, 1] == pytest.approx(np.var(segments) / np.var(tokens), rel=1e-6)


def test_with_full_returns_nothing_falls_and_independent_targets_fall_as_claimed(
    tmp_path: Path,
) -> None:
    (step,) = read_steps(read_run(write_run(tmp_path, rollouts=some_rollouts(1, responses=30))))
    full = target_variance(fixed_sums(step, Horizon(1.0, 1.0)).sum(axis=0)[None, None])
    assert full.mean_ratio[0, :3] == pytest.approx([1.0, 1.0, 1.0])
    assert full.target_ratio[0, :3] == pytest.approx([1.0, 1.0, 1.0])
    assert full.correlation[0, 1:3] == pytest.approx([1.0, 1.0])
    # values are drawn independently, and at λ = 0 a target is the next value
    rng = np.random.default_rng(1)
    rows = [row(rng, n) | {"reward": float(rng.uniform())} for n in range(2000)]
    (many,) = read_steps(read_run(write_run(tmp_path, "many", rollouts={1: rows})))
    free = target_variance(fixed_sums(many, Horizon(1.0, 0.0)).sum(axis=0)[None, None])
    assert free.mean_ratio[0, 1] == pytest.approx(0.5, abs=0.03)
    assert free.mean_ratio[0, 2] == pytest.approx(0.25, abs=0.03)
    assert free.correlation[0, 2] == pytest.approx(0.0, abs=0.05)


# ── As analyses of a run ─────────────────────────────────────────────────────────────────────────


def test_both_analyses_of_a_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, rollouts=some_rollouts(6, responses=12)))
    found = {x.name: x for x in analyze_runs([run], FEW, ["jumps", "targets"]).done}
    jumps, targets = found["jumps"], found["targets"]
    assert [*jumps.numbers["stages"]] == ["early", "middle", "late"]
    assert not jumps.numbers["critic"]["at_every_token"]
    assert "arbitrary between them" in jumps.note
    assert jumps.numbers["stages"]["late"]["ratio"][0] == pytest.approx(1.0)
    assert [x["length"] for x in targets.numbers["equal_pieces"]] == ["1", "2", "4", "8"]
    assert [x["length"] for x in targets.numbers["recorded"]] == ["1", "2", "3"]
    length = targets.numbers["tokens_per_segment"]
    assert targets.numbers["lam_per_token"] == pytest.approx(0.9 ** (1 / length), rel=1e-4)
    for x in targets.numbers["equal_pieces"]:
        assert x["mean_ratio_low"] <= x["mean_ratio"] <= x["mean_ratio_high"]
    assert [row[0] for row in targets.table.rows if row[0]] == ["equal pieces", "recorded"]


def test_a_critic_at_every_token_needs_no_warning(tmp_path: Path) -> None:
    method = {"name": "sapo", "value_everywhere": True}
    run = read_run(write_run(tmp_path, rollouts=some_rollouts(3), algorithm=method))
    for analysis in analyze_runs([run], FEW, ["jumps", "targets"]).done:
        assert "arbitrary" not in analysis.note


def test_tokens_as_segments_are_cut_into_pieces_only(tmp_path: Path) -> None:
    rollouts = some_rollouts(3)
    for rows in rollouts.values():
        for made in rows:
            made["segment"] = [*range(len(made["tokens"]))]
    run = read_run(write_run(tmp_path, rollouts=rollouts, algorithm="ppo"))
    (analysis,) = analyze_runs([run], FEW, ["targets"]).done
    assert analysis.numbers["recorded"] == []
    assert analysis.numbers["lam_per_token"] == pytest.approx(0.95)


def test_runs_that_lack_something(tmp_path: Path) -> None:
    plain = read_run(write_run(tmp_path, "a", some_rollouts(without=("value",))))
    constant = some_rollouts(2)
    for rows in constant.values():
        for made in rows:
            made["reward"], made["value"] = 1.0, [1.0] * len(made["tokens"])
    same = read_run(write_run(tmp_path, "b", constant))
    for run, names in ((plain, {"jumps", "targets"}), (same, {"jumps", "targets"})):
        skipped = {x.name: x.reason for x in analyze_runs([run], FEW, ["jumps", "targets"]).skipped}
        assert skipped.keys() == names
    assert "whose targets differ" in skipped["targets"]
    assert "V is the same at all tokens" in skipped["jumps"]
