"""Where responses end, and how begun ones go on."""

import math
from dataclasses import replace

import pytest
import torch
from each import each
from tiny_policies import (
    ARCHITECTURES,
    TEXT,
    VISION,
    ask,
    changed_head,
    drawn,
    encoded,
    engine,
    fresh_policy,
    policy,
    seeded,
)
from torch import Tensor

from segcredit.models import Policy
from segcredit.rollout import HFEngine
from segcredit.types import Encoded, Rollouts, Sampling

# ── Ends ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [TEXT[1], VISION[1]])
def test_any_of_several_end_tokens_ends(name: str) -> None:
    owner = fresh_policy(name)
    assert len(owner.end_tokens) == 7  # generation_config.eos_token_id is a list
    made = engine(owner).sample(encoded(name) * 8, Sampling(30), seeded())
    ends = torch.isin(made.tokens, torch.tensor(owner.end_tokens)) & made.mask
    length = made.mask.sum(dim=1)
    assert len(set(made.tokens[ends].tolist())) > 3  # several kinds were met
    for row in range(len(made)):
        assert made.mask[row].int().tolist() == [1] * int(length[row]) + [0] * int(
            made.tokens.shape[1] - length[row]
        )
        places = ends[row].nonzero().flatten().tolist()
        if made.truncated[row]:
            assert places == []
            assert length[row] == 30
        else:
            assert places == [int(length[row]) - 1]
    assert made.truncated.any()
    assert not made.truncated.all()


def end_tokens(configured: object, name: str = "qwen2") -> tuple[int, ...]:
    owner = fresh_policy(name)
    owner.model.generation_config.eos_token_id = configured
    return owner.end_tokens


def test_end_tokens_of_every_form() -> None:
    assert end_tokens([4, 5]) == (4, 5)
    assert end_tokens(6) == (6,)
    assert end_tokens(None) == (policy("qwen2").codec.tokenizer.eos_token_id,)
    owner = fresh_policy("llama")
    owner.model.generation_config.eos_token_id = None
    owner.codec.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        _ = owner.end_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_the_budget_is_kept(max_tokens: int) -> None:
    owner = policy("qwen2")
    never = HFEngine(owner.model, (10_000,))
    made = never.sample(encoded("qwen2"), Sampling(max_tokens), seeded())
    assert made.mask.all()
    assert made.tokens.shape == (len(encoded("qwen2")), max_tokens)
    assert made.truncated.all()


def test_an_end_token_at_the_last_place_is_an_end() -> None:
    name, num = "qwen2", len(policy("qwen2").codec.tokenizer)
    change = torch.zeros(num)
    change[policy(name).end_tokens[0]] = 50.0
    made = engine(changed_head(name, change)).sample(encoded(name), Sampling(1), seeded())
    assert not made.truncated.any()
    assert made.mask.sum().item() == len(made)


def test_the_batch_is_as_wide_as_its_longest_response() -> None:
    made = drawn("qwen2", max_tokens=500)
    assert not made.truncated.any()
    assert made.tokens.shape[1] == int(made.mask.sum(dim=1).max()) < 500


def test_a_row_s_draw_is_its_own() -> None:
    """Equal numbers, equal tokens, whoever is beside; other numbers, other tokens."""
    prompts, owner = encoded("qwen2_5_vl"), policy("qwen2_5_vl")
    all_of_them = engine(owner).sample(prompts, Sampling(9), seeded())
    again = engine(owner).sample(prompts, Sampling(9), seeded())
    assert torch.equal(all_of_them.tokens, again.tokens)
    fewer = engine(owner).sample(prompts[:3], Sampling(9), seeded())
    width = fewer.tokens.shape[1]
    assert torch.equal(fewer.tokens, all_of_them.tokens[:3, :width])
    other = engine(owner).sample(prompts, Sampling(9), seeded(1))
    assert not torch.equal(other.tokens[:, :1], all_of_them.tokens[:, :1])
    twins = engine(owner).sample([prompts[1]] * 6, Sampling(9), seeded())
    assert len(set(twins.tokens[:, 0].tolist())) > 1


def test_new_weights_are_drawn_from() -> None:
    first, second = fresh_policy("qwen2", seed=0), fresh_policy("qwen2", seed=1)
    drawer = engine(first)
    drawer.load_weights(second.model)
    made = drawer.sample(encoded("qwen2"), Sampling(5), seeded())
    direct = engine(second).sample(encoded("qwen2"), Sampling(5), seeded())
    assert torch.equal(made.tokens, direct.tokens)
    assert torch.equal(made.logp_old, direct.logp_old)


def test_what_the_rollouts_say() -> None:
    made = drawn("qwen2", max_tokens=4)
    assert made.prompts == encoded("qwen2")
    assert made.group.tolist() == list(range(len(made)))
    assert not made.reward.any()
    assert not made.logp_old.requires_grad


@each(
    ("settings", "says"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"temperature": -0.1}, "temperature must be ≥ 0"),
        ({"temperature": math.nan}, "temperature must be ≥ 0"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 95.0}, "For 95 % pass 0.95"),
        ({"top_p": math.nan}, "top_p must be in"),
        ({"top_k": -1}, "top_k must be ≥ 0"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine(policy("qwen2")).sample(encoded("qwen2"), replace(Sampling(5), **settings), seeded())


def test_no_prompts() -> None:
    with pytest.raises(ValueError, match="got no prompts"):
        engine(policy("qwen2")).sample([], Sampling(5), seeded())
    with pytest.raises(ValueError, match="got no prompts"):
        engine(policy("qwen2")).continue_from([], [], Sampling(5), seeded())


def test_a_nucleus_cuts_what_is_drawn_but_not_what_is_recorded() -> None:
    """The log-probabilities stay those of π: a ratio to a cut distribution would mislead."""
    owner, prompts = policy("qwen2"), encoded("qwen2")
    greedy = engine(owner).sample(prompts, Sampling(6, temperature=0.0), seeded())
    first = engine(owner).sample(prompts, Sampling(6, top_k=1), seeded())
    assert torch.equal(first.tokens, greedy.tokens)
    assert torch.equal(first.logp_old, greedy.logp_old)
    assert (first.logp_old[first.mask] < -0.1).all()
    few = engine(owner).sample(prompts[:1] * 300, Sampling(1, top_p=0.1), seeded())
    assert 1 < len(few.tokens.unique()) < 10


# ── Continuing ───────────────────────────────────────────────────────────────────────────────────


def prefixes_of(rollouts: Rollouts, lengths: list[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(rollouts.tokens, lengths, strict=True)]


def lengths_of(num: int) -> list[int]:
    return [(3 * n) % 8 for n in range(num)]  # very different, nothing too


def begun(prompts: list[Encoded], prefixes: list[Tensor]) -> list[Encoded]:
    return [prompt.extended(x) for prompt, x in zip(prompts, prefixes, strict=True)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_continuations_are_scored_as_drawn(name: str) -> None:
    owner, prompts = policy(name), encoded(name)
    lengths = lengths_of(len(prompts))
    prefixes = prefixes_of(
        HFEngine(owner.model, (10_000,), owner.banned).sample(prompts, Sampling(8), seeded()),
        lengths,
    )
    made = engine(owner).continue_from(prompts, prefixes, Sampling(15, 0.7), seeded(1))
    assert made.prompts == prompts
    length = made.mask.sum(dim=1)
    budget = torch.tensor([15 - x for x in lengths])
    assert (length <= budget).all()
    assert torch.equal(
        made.truncated,
        ~torch.isin(
            made.tokens[torch.arange(len(made)), length - 1], torch.tensor(owner.end_tokens)
        ),
    )
    assert torch.equal(length[made.truncated], budget[made.truncated])
    with torch.no_grad():
        split, _ = owner.score(made.replace(prompts=begun(prompts, prefixes)), 0.7)
        assert (split - made.logp_old)[made.mask].abs().max() < 1e-5
        # and as parts of whole responses, the prefix in its place
        for row, prefix in enumerate(prefixes):
            tokens = torch.cat([prefix, made.tokens[row, : length[row]]])[None]
            whole = made.select(torch.tensor([row])).replace(
                tokens=tokens,
                mask=torch.ones_like(tokens, dtype=torch.bool),
                logp_old=torch.zeros(tokens.shape),
                entropy=torch.zeros(tokens.shape),
            )
            logp = owner.score(whole, 0.7)[0][0, lengths[row] :]
            assert (logp - made.logp_old[row, : length[row]]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_continuing_from_nothing_is_sampling(name: str) -> None:
    owner, prompts = policy(name), encoded(name)
    nothing = [torch.zeros(0, dtype=torch.long)] * len(prompts)
    made = engine(owner).continue_from(prompts, nothing, Sampling(10), seeded())
    direct = engine(owner).sample(prompts, Sampling(10), seeded())
    for column in ("tokens", "mask", "logp_old", "entropy", "truncated"):
        assert torch.equal(getattr(made, column), getattr(direct, column)), column


@pytest.mark.parametrize("name", ["llama", "qwen3_vl"])
def test_a_response_cut_anywhere_goes_on_as_it_did(name: str) -> None:
    """Greedily, so that there is only one way on."""
    owner, prompts = policy(name), encoded(name)
    sampling = Sampling(12, temperature=0.0)
    whole = engine(owner).sample(prompts, sampling, seeded())
    long = [n for n in range(len(prompts)) if whole.mask[n].sum() > 3]
    assert len(long) > 2
    lengths = [1 + n % 3 for n in long]
    some = [prompts[n] for n in long]
    prefixes = [whole.tokens[n, :length] for n, length in zip(long, lengths, strict=True)]
    made = engine(owner).continue_from(some, prefixes, sampling, seeded())
    for row, (n, length) in enumerate(zip(long, lengths, strict=True)):
        rest = whole.tokens[n][whole.mask[n]][length:]
        assert torch.equal(made.tokens[row][made.mask[row]], rest)
        assert made.truncated[row] == whole.truncated[n]


def test_continuations_follow_the_conditional_distribution() -> None:
    """3,000 first tokens behind one prefix, against exact probabilities of each."""
    name, num = "qwen2_5_vl", 3000
    owner, prompt = policy(name), encoded(name)[2]
    prefix = torch.tensor([15, 30, 41])
    sampling = Sampling(len(prefix) + 1, temperature=0.7)
    made = engine(owner, rows=1000).continue_from(
        [prompt] * num, [prefix] * num, sampling, seeded(5)
    )
    assert made.tokens.shape == (num, 1)
    exact = first_token_probabilities(owner, prompt.extended(prefix), 0.7)
    counts = made.tokens.flatten().bincount(minlength=len(exact)).double()
    often = exact * num >= 5
    assert int(often.sum()) > 20
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = num * torch.cat([exact[often], exact[~often].sum()[None]])
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    assert chi_square < freedom + 3.1 * math.sqrt(2 * freedom) + 4  # about 0.1 %
    # the prefix matters: without it, the same draws would not pass
    other = first_token_probabilities(owner, prompt, 0.7)
    wrong = num * torch.cat([other[often], other[~often].sum()[None]])
    assert float(((observed - wrong) ** 2 / wrong).sum()) > 10 * freedom


@torch.no_grad()
def first_token_probabilities(owner: Policy, prompt: Encoded, temperature: float) -> Tensor:
    """By scoring every token of the vocabulary, one response each, but those never written."""
    assert owner.banned is not None
    tokens = (~owner.banned).nonzero()
    num = len(tokens)
    every = Rollouts(
        tokens=tokens,
        mask=torch.ones(num, 1, dtype=torch.bool),
        logp_old=torch.zeros(num, 1),
        reward=torch.zeros(num),
        group=torch.arange(num),
        truncated=torch.zeros(num, dtype=torch.bool),
        prompts=[prompt] * num,
    )
    p = torch.zeros(len(owner.banned), dtype=torch.float64)
    p[tokens.flatten()] = owner.score(every, temperature)[0].flatten().double().exp()
    assert p.sum().item() == pytest.approx(1.0, abs=1e-5)
    return p


def test_no_budget_left() -> None:
    prompts = encoded("qwen2")[:2]
    prefixes = [torch.tensor([1]), torch.tensor([1, 2, 3])]
    with pytest.raises(ValueError, match=r"prefix 1 has 3 tokens.*max_tokens=3"):
        engine(policy("qwen2")).continue_from(prompts, prefixes, Sampling(3), seeded())


def test_prompts_and_prefixes_must_pair() -> None:
    prompts = [policy("qwen2").encode(ask("a ?"))] * 2
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        engine(policy("qwen2")).continue_from(prompts, [torch.tensor([1])], Sampling(3), seeded())
