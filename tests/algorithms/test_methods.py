"""What is particular to single methods."""

from dataclasses import replace

import pytest
import torch
from batches import fake_monte_carlo, golden_rollouts, story

from segcredit import algorithms
from segcredit.algorithms import ALGORITHMS, PolicyGradient, make_algorithm
from segcredit.algorithms.dpo import DirectPreference
from segcredit.algorithms.objective import BoundaryMSE, Clipped, TokenRatio
from segcredit.columns import ENTROPY, LOGP_REF, PIECES
from segcredit.core.group import rank_within
from segcredit.partition import Newline, ProbabilityCutpoints, Token, TopEntropy, tokens
from segcredit.types import Batch, NothingToLearn, Outputs, Rollouts


def test_sapo_shares_one_partition() -> None:
    rollouts, _ = golden_rollouts()
    batch = algorithms.sapo().prepare(rollouts)
    assert batch.ratio_segments is batch.credit.segments


def test_sapo_takes_any_partition() -> None:
    rollouts, _ = story().lay_out(0, holes=True)
    method = algorithms.sapo(partition=Newline())
    assert PIECES in method.needs
    assert ENTROPY not in method.needs
    lines = Newline()(rollouts)
    assert torch.equal(method.prepare(rollouts).credit.segments.index, lines.index)


def test_naive_is_differs_from_sapo_in_the_ratio_alone() -> None:
    sapo, naive = algorithms.sapo(), algorithms.sapo_token_ratio()
    same = ("credit", "surrogate", "reduce", "critic", "kl", "adjust", "only", "terms")
    assert all(getattr(sapo, f) == getattr(naive, f) for f in same)
    assert naive.ratio.over == Token()
    assert sapo.ratio.over == TopEntropy(0.3)


def test_the_authors_rounding_differs_at_55_percent() -> None:
    """Their advantages pick 56 of 100 tokens, their ratio 55."""
    method = algorithms.sapo_authors(fraction=0.55)
    rollouts, _ = golden_rollouts()
    wide = torch.ones(1, 100, dtype=torch.bool)
    H = torch.arange(100.0).flip(0)[None]
    batch_of_one = rollouts.select(torch.tensor([0])).replace(
        tokens=wide.long(), mask=wide, logp_old=-H, entropy=H, value=H / 100, logp_ref=-H
    )
    prepared = method.prepare(batch_of_one)
    assert prepared.credit.segments.num.tolist() == [57]
    assert prepared.ratio_segments.num.tolist() == [56]


def test_restem_keeps_correct_and_complete_responses() -> None:
    rollouts, _ = story(seed=1).lay_out(0, holes=False)
    cut = rollouts.replace(truncated=torch.arange(len(rollouts)) % 4 == 0)
    kept = algorithms.restem().prepare(cut).rollouts
    assert len(kept) == int(((cut.reward >= 1) & ~cut.truncated).sum())
    assert (kept.reward == 1).all()
    with pytest.raises(ValueError, match="nothing to imitate"):
        algorithms.restem(threshold=2.0).prepare(rollouts)


def test_pairs_stay_inside_prompts_and_within_the_limit() -> None:
    rollouts, _ = story(num_groups=3, per_group=6, seed=2).lay_out(0, holes=False)
    for limit in (1, 3, 64):
        method = algorithms.dpo()
        method = type(method)(beta=0.1, pairs_per_prompt=limit)
        paired = method.prepare(rollouts).rollouts
        chosen, rejected = (
            paired.select(torch.arange(0, len(paired), 2)),
            paired.select(torch.arange(1, len(paired), 2)),
        )
        assert torch.equal(chosen.group, rejected.group)
        assert (chosen.reward == 1).all()
        assert (rejected.reward < 1).all()
        want = []
        for g in rollouts.group.unique().tolist():
            right = int(((rollouts.group == g) & (rollouts.reward >= 1)).sum())
            want.append(min(limit, right * (6 - right)))
        assert len(chosen) == sum(want)


def test_all_right_or_all_wrong_gives_no_pair() -> None:
    rollouts, _ = story().lay_out(0, holes=False)
    with pytest.raises(ValueError, match="no prompt has both"):
        algorithms.dpo().prepare(rollouts.replace(reward=torch.ones(len(rollouts)).double()))


def test_no_positive_response_means_no_nll() -> None:
    rollouts, outputs = golden_rollouts()
    method = algorithms.vapo()
    batch = method.minibatch(method.prepare(rollouts.replace(reward=torch.zeros(2).double())))
    assert method.loss(outputs, batch).metrics["positive_nll"].item() == 0.0


def test_spo_without_unlikely_tokens_gives_no_credit_and_no_loss() -> None:
    rollouts, outputs = golden_rollouts()
    sure = torch.where(rollouts.mask, torch.full_like(rollouts.logp_old, -0.01), torch.nan)
    method = algorithms.spo_chain(kl=0.0)
    prepared = method.prepare(rollouts.replace(logp_old=sure), fake_monte_carlo)
    assert prepared.credit.segments.num.tolist() == [1, 1]
    assert (prepared.credit.advantage == 0).all()
    batch = method.minibatch(prepared)
    assert method.loss(Outputs(outputs.logp), batch).policy.item() == 0.0


def drawn_pairs(rollouts: Rollouts, most: int, seed: int) -> list[tuple[int, int]]:
    """Row numbers of the chosen and the rejected."""
    numbered = rollouts.replace(baseline=torch.arange(len(rollouts)).double())
    batch = DirectPreference(pairs_per_prompt=most).prepare(
        numbered, generator=torch.Generator().manual_seed(seed)
    )
    rows = batch.rollouts.baseline.long()
    return list(zip(rows[0::2].tolist(), rows[1::2].tolist(), strict=True))


def test_pairs_are_a_random_sample_without_replacement() -> None:
    rollouts, _ = story(num_groups=2, per_group=8, longest=3).lay_out(0, holes=False)
    half = rollouts.replace(reward=(torch.arange(16) % 2).double())
    every = drawn_pairs(half, 64, seed=0)
    assert len(set(every)) == len(every) == 2 * 16
    assert drawn_pairs(half, 5, seed=3) == drawn_pairs(half, 5, seed=3)
    count = dict.fromkeys(every, 0)
    for seed in range(300):
        some = drawn_pairs(half, 5, seed)
        assert len(set(some)) == len(some) == 2 * 5
        for pair in some:
            count[pair] += 1
    # each of the 16 pairs of a prompt is drawn with probability 5/16: 94 of 300, ± 8
    assert min(count.values()) > 60
    assert max(count.values()) < 130


@pytest.mark.parametrize("name", ["dpo", "dpo_positive"])
def test_a_truncated_response_is_rejected_but_never_chosen(name: str) -> None:
    rollouts, _ = story(num_groups=1, per_group=4, longest=3).lay_out(0, holes=False)
    cut = torch.tensor([True, False, False, True])
    some = rollouts.replace(
        reward=torch.tensor([1.0, 1.0, 0.0, 0.0]).double(),
        truncated=cut,
        baseline=torch.arange(4).double(),
    )
    rows = ALGORITHMS[name]().prepare(some).rollouts.baseline.long()
    assert sorted(rows.view(-1, 2).tolist()) == [[1, 0], [1, 2], [1, 3]]


def test_the_record_of_a_kl_names_its_tokens_only_where_they_are_not_all() -> None:
    """Studies find finished runs by this text: GRPO's did not change when SPO's KL did."""
    said = "LossKL(coef=0.01, estimator=k3, reduce=ResponseMean())"
    assert said in repr(algorithms.grpo())
    for method in (algorithms.spo_chain(), algorithms.spo_tree()):
        assert "only_in_loss=True" in repr(method)


@pytest.mark.parametrize("name", ["vineppo", "spo_chain", "dvo"])
def test_what_a_truncated_response_earns(name: str) -> None:
    """Nothing in VinePPO and SPO chain, whatever its grade; elsewhere its grade."""
    rollouts, _ = story(seed=4).lay_out(0, holes=True)
    cut = rollouts.replace(truncated=torch.arange(len(rollouts)) % 2 == 0)
    assert (cut.truncated & (cut.reward > 0)).any()
    lost = rollouts.replace(reward=torch.where(cut.truncated, 0.0, rollouts.reward))
    method = ALGORITHMS[name]()
    found = method.prepare(cut, fake_monte_carlo).credit.advantage
    same = rollouts if name == "dvo" else lost
    assert torch.equal(found, method.prepare(same, fake_monte_carlo).credit.advantage)
    if name != "dvo":
        graded = ALGORITHMS[name](truncated_reward=None)
        as_graded = graded.prepare(cut, fake_monte_carlo).credit.advantage
        whole = method.prepare(rollouts, fake_monte_carlo).credit.advantage
        assert torch.equal(as_graded, whole)
        assert not torch.equal(found, whole)


def test_restem_keeps_at_most_so_many_per_prompt() -> None:
    rollouts, _ = story(num_groups=2, per_group=30, longest=3).lay_out(0, holes=False)
    right = rollouts.replace(reward=torch.ones(60).double())
    assert len(algorithms.restem().prepare(right).rollouts) == 20
    assert len(algorithms.restem(per_prompt=30).prepare(right).rollouts) == 60


def test_rank_within_groups() -> None:
    assert rank_within(torch.tensor([7, 3, 7, 7, 3])).tolist() == [0, 0, 1, 2, 1]


@pytest.mark.parametrize("reward", [[1.0, 0.0], [0.0, 1.0]])
def test_rloo_survives_a_ratio_that_overflows(reward: list[float]) -> None:
    mask = torch.ones(2, 400, dtype=torch.bool)
    old = torch.full((2, 400), -1.0)
    columns = {"tokens": mask.long(), "mask": mask, "logp_old": old, "logp_ref": old}
    rollouts = Rollouts(
        **columns,
        reward=torch.tensor(reward),
        group=torch.zeros(2, dtype=torch.long),
        truncated=torch.zeros(2, dtype=torch.bool),
    )
    method = algorithms.rloo()
    batch = method.minibatch(method.prepare(rollouts))
    logp = torch.full((2, 400), -0.5, requires_grad=True)  # the log-ratio sums to 200
    loss = method.loss(Outputs(logp), batch)
    loss.total.backward()
    assert torch.isfinite(loss.total)
    assert torch.isfinite(logp.grad).all()


def test_dual_clip_counts_as_clipped() -> None:
    ratio, advantage = torch.tensor([[5.0, 2.0]]), torch.tensor([[-1.0, -1.0]])
    assert Clipped(dual=3.0).metrics(ratio, advantage)["clip_fraction"].tolist() == [[1.0, 0.0]]


def test_reinforce_reports_no_ratio() -> None:
    rollouts, outputs = golden_rollouts()
    method = algorithms.rloo_reinforce()
    loss = method.loss(outputs, method.minibatch(method.prepare(rollouts)))
    assert set(loss.metrics) == {"policy_loss"}


def test_spo_with_a_single_unlikely_token_does_not_stop() -> None:
    rollouts, outputs = golden_rollouts()
    sure = torch.where(rollouts.mask, torch.full_like(rollouts.logp_old, -0.01), torch.nan)
    sure[0, 2] = -2.0
    method = algorithms.spo_chain(kl=0.0)
    batch = method.minibatch(method.prepare(rollouts.replace(logp_old=sure), fake_monte_carlo))
    assert torch.isfinite(method.loss(Outputs(outputs.logp), batch).policy)


def test_vineppo_can_limit_the_steps_it_estimates() -> None:
    rollouts, _ = story(seed=4).lay_out(0, holes=True)
    asked = []

    def monte_carlo(rollouts, segments, estimated, samples):
        asked.append(estimated)
        return fake_monte_carlo(rollouts, segments, estimated, samples)

    batch = algorithms.vineppo(most=2).prepare(rollouts, monte_carlo)
    assert asked[0].sum(dim=1).max() == 3, "the prompt and two steps"
    assert (batch.credit.per_segment[:, 3:] == 0).all()


def test_dvo_leaves_out_steps_without_a_value() -> None:
    rollouts, outputs = golden_rollouts()
    method = algorithms.dvo(partition=ProbabilityCutpoints(every=1, threshold=0.5))
    batch = method.minibatch(method.prepare(rollouts, fake_monte_carlo))
    segments = batch.credit.segments
    known = method.credit.estimated(rollouts, segments)
    assert not known.all()
    assert torch.equal(batch.share("policy") > 0, known)
    assert torch.isfinite(method.loss(outputs, batch).policy)


def test_a_critic_needs_value_targets() -> None:
    with pytest.raises(ValueError, match=r"Pass critic=None, or credit=GAE"):
        replace(algorithms.grpo(), critic=BoundaryMSE())


def test_split_covers_every_row_once_and_keeps_pairs() -> None:
    rollouts, _ = story(num_groups=4, per_group=6, seed=3).lay_out(0, holes=False)
    numbered = rollouts.replace(baseline=torch.arange(len(rollouts)).double())
    for method in (algorithms.sapo(), algorithms.dpo()):
        batch = method.prepare(numbered)
        parts = batch.split(3, torch.Generator().manual_seed(0))
        seen = torch.cat([p.rollouts.baseline for p in parts])
        assert sorted(seen.tolist()) == sorted(batch.rollouts.baseline.tolist())
        for part in parts:
            if part.rows_per_item == 2:
                assert (part.rollouts.reward[0::2] == 1).all()
                assert (part.rollouts.reward[1::2] < 1).all()


def test_loss_before_minibatch_says_what_to_call() -> None:
    rollouts, outputs = golden_rollouts()
    method = algorithms.sapo()
    with pytest.raises(ValueError, match=r"algorithm\.minibatch\(batch\)"):
        method.loss(outputs, method.prepare(rollouts))


def test_unprepared_batch_says_what_to_call() -> None:
    rollouts, _ = golden_rollouts()
    with pytest.raises(ValueError, match=r"algorithm\.prepare\(rollouts\)"):
        algorithms.sapo().minibatch(Batch(rollouts=rollouts, loss_mask=rollouts.mask))


def test_settings_reach_the_parts() -> None:
    method = make_algorithm("sapo", fraction=0.5, lam=0.9, kl=0.0)
    assert method.credit.over == TopEntropy(0.5)
    assert method.credit.lam == 0.9
    assert method.kl is None
    assert LOGP_REF not in method.needs


def test_a_critic_that_learns_everywhere_is_read_at_every_token() -> None:
    """Against the definition: mean over responses of each one's mean over tokens."""
    rollouts, outputs = golden_rollouts()
    assert outputs.value is not None
    outputs = Outputs(outputs.logp.detach(), outputs.value.detach())
    everywhere, plain = algorithms.sapo(value_everywhere=True), algorithms.sapo()
    batch = everywhere.minibatch(everywhere.prepare(rollouts))
    assert batch.credit is not None
    assert batch.credit.value_target is not None
    error = (outputs.value - batch.credit.value_target).square().where(rollouts.mask, 0.0)
    by_hand = (error.sum(dim=1) / rollouts.mask.sum(dim=1)).mean()
    assert float(everywhere.loss(outputs, batch).value) == pytest.approx(float(by_hand))
    other = plain.minibatch(plain.prepare(rollouts))
    assert torch.equal(other.credit.advantage, batch.credit.advantage)
    assert float(plain.loss(outputs, other).value) != pytest.approx(float(by_hand))


def test_vapo_imitates_what_is_correct_not_what_has_a_full_reward() -> None:
    """.9 for the answer and .1 for the format: right without format is .9, format alone .1."""
    rollouts, _ = story(num_groups=1, per_group=4, seed=3).lay_out(0, holes=True)
    method = algorithms.vapo()

    def imitated(**columns: object) -> list[bool]:
        batch = method.minibatch(method.prepare(rollouts.replace(**columns)))
        return (batch.shares["positive_nll"] > 0).any(dim=1).tolist()

    reward = torch.tensor([0.9, 1.0, 0.1, 0.0]).double()
    right = torch.tensor([True, True, False, False])
    assert imitated(reward=reward, correct=right) == [True, True, False, False]
    assert imitated(reward=reward, correct=~right) == [False, False, True, True], "the flag decides"
    assert imitated(reward=reward - 0.3, correct=right) == [True, True, False, False]
    assert imitated(reward=reward) == [True, True, False, False], "from .5 where nothing is said"
    stricter = replace(method, terms=(replace(method.terms[0], threshold=1.0),))
    assert algorithms.vapo(threshold=1.0) == stricter


def test_restem_and_dpo_learn_from_what_is_correct_not_from_the_size_of_the_reward() -> None:
    """A right answer without format (.9) is imitated and chosen, one with a length penalty, too."""
    rollouts, _ = story(num_groups=1, per_group=4, seed=3).lay_out(0, holes=True)
    reward = torch.tensor([0.9, 0.4, 0.1, 0.6]).double()
    right = torch.tensor([True, True, False, False])
    rollouts = rollouts.replace(reward=reward, truncated=torch.zeros(4, dtype=torch.bool))
    said = rollouts.replace(correct=right)
    kept = algorithms.restem().prepare(said).rollouts.reward
    assert kept.tolist() == pytest.approx([0.9, 0.4])
    for method in (algorithms.dpo(), algorithms.dpo_positive()):
        pairs = method.prepare(said).rollouts.correct
        assert pairs is not None
        assert pairs[::2].all()
        assert not pairs[1::2].any()
    with pytest.raises(NothingToLearn, match=r"at least 1\.0"):
        algorithms.restem().prepare(rollouts)  # nothing is said, so the threshold decides
    lower = algorithms.restem(threshold=0.5).prepare(rollouts).rollouts.reward
    assert lower.tolist() == pytest.approx([0.9, 0.6])


@pytest.mark.parametrize("name", ["ppo", "vc_ppo", "single_stream_spo"])
def test_behind_a_dual_clip_verls_clamp_of_the_log_ratio_does_not_matter(name: str) -> None:
    """docs/deviations.md: what is left between ±20 and our saturation is below 2e-9 · |Â|."""
    method = ALGORITHMS[name]()
    assert isinstance(method, PolicyGradient)
    assert isinstance(method.ratio, TokenRatio)
    x = torch.tensor([-90.0, -30.0, -20.5, -3.0, 0.0, 3.0, 20.5, 30.0, 90.0]).repeat(2, 1)
    advantage = torch.tensor([[1.0], [-1.0]]).expand_as(x)
    found = []
    for ratio in (method.ratio, replace(method.ratio, limit=20.0)):
        logp = x.clone().requires_grad_()
        mask = torch.ones_like(x, dtype=torch.bool)
        loss = method.surrogate(ratio(logp, torch.zeros_like(x), tokens(mask)), advantage)
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        found.append((loss.detach(), gradient))
    (ours, our_gradient), (verls, verls_gradient) = found
    assert (ours - verls).abs().max() < 2.1e-9
    assert (our_gradient - verls_gradient).abs().max() < 2.1e-9


def test_the_recorded_ratio_is_the_methods_own() -> None:
    """RLOO's is the product over the response, SAPO's the geometric mean over a segment."""
    rollouts, _ = story(seed=3).lay_out(0, holes=True)
    generator = torch.Generator().manual_seed(3)
    logp = rollouts.logp_old + 0.1 * torch.randn(rollouts.mask.shape, generator=generator)
    moved = (logp - rollouts.logp_old).masked_fill(~rollouts.mask, 0.0)
    product, count = moved.sum(dim=1, keepdim=True), rollouts.mask.sum(dim=1, keepdim=True)
    expected = {"rloo": product, "gspo": product / count, "grpo": moved, "rloo_reinforce": moved}
    for name, x in expected.items():
        algorithm = ALGORITHMS[name]()
        ratio = algorithm.recorded_ratio(logp, algorithm.prepare(rollouts))
        assert torch.allclose(ratio[rollouts.mask], x.exp().expand_as(ratio)[rollouts.mask]), name
