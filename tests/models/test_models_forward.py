"""A prompt that several responses share is read once, and nothing else changes."""

import copy

import pytest
import torch
from tiny_policies import (
    ARCHITECTURES,
    encoded,
    engine,
    fresh_policy,
    policy,
    seeded,
    some_rollouts,
)
from transformers import DynamicCache

from segcredit.models import Critic
from segcredit.models.layers import full_attention
from segcredit.rollout.sampling import SPARE_COLUMNS, GrowingLayer
from segcredit.train.distributed import split_padded
from segcredit.types import Encoded, Rollouts, Sampling

CLOSE = 1e-5


def shared_and_separate(name: str, max_tokens: int = 12) -> tuple[Rollouts, Rollouts]:
    """Two to four responses to each prompt, in mixed order; and the same with prompts copied."""
    prompts = [x for i, x in enumerate(encoded(name)) for _ in range(2 + i % 3)]
    order = torch.randperm(len(prompts), generator=seeded(3)).tolist()
    prompts = [prompts[i] for i in order]
    drawn = engine(policy(name)).sample(prompts, Sampling(max_tokens), seeded())
    return drawn, drawn.replace(prompts=[copy.copy(x) for x in prompts])


def with_a_hole(rollouts: Rollouts) -> Rollouts:
    """As if a tool had written the third token."""
    mask = rollouts.mask.clone()
    mask[:, 2] = False
    return rollouts.replace(mask=mask)


def rows_read(owner: torch.nn.Module) -> list[int]:
    """How many rows each forward pass has, filled as it happens."""
    found: list[int] = []
    owner.register_forward_pre_hook(
        lambda _, __, given: found.append(len(given["input_ids"])), with_kwargs=True
    )
    return found


def gradients(owner: torch.nn.Module) -> torch.Tensor:
    return torch.cat([x.grad.flatten() for x in owner.parameters() if x.grad is not None])


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_values_and_gradients_are_those_of_separate_prompts(name: str, holes: bool) -> None:
    results = []
    for rollouts in shared_and_separate(name):
        if holes:
            rollouts = with_a_hole(rollouts)
        owner = fresh_policy(name)
        critic = Critic.from_policy(owner)
        torch.nn.init.normal_(critic.head.weight, std=0.3, generator=seeded())
        logp, h = owner.score(rollouts, 0.8, with_entropy=True)
        value = critic(rollouts)
        assert h is not None
        weight = torch.rand(logp.shape, generator=seeded(1)) * rollouts.mask
        ((logp + 0.1 * h + value) * weight).sum().backward()
        kept = [x.detach()[rollouts.mask] for x in (logp, h, value)]
        results.append([*kept, gradients(owner.model), gradients(critic)])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).abs().max()) <= CLOSE * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_prompt_is_read_once(name: str) -> None:
    owner = fresh_policy(name)
    shared, separate = shared_and_separate(name)
    assert owner.plain_head
    passes = rows_read(owner.model.base_model)
    prompts, responses = len(encoded(name)), len(shared)
    with torch.no_grad():
        owner.score(shared, 1.0)
        assert passes == [prompts, responses]
        passes.clear()
        owner.score(separate, 1.0)
        assert passes == [responses]
    passes.clear()
    engine(owner).sample(shared.prompts, Sampling(4), seeded())
    assert passes[:2] == [prompts, responses]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_is_drawn_for_shared_prompts(name: str) -> None:
    shared, separate = shared_and_separate(name)
    again = engine(policy(name)).sample(separate.prompts, Sampling(12), seeded())
    assert torch.equal(shared.tokens, again.tokens)
    assert float((shared.logp_old - again.logp_old).abs().max()) <= CLOSE


def test_a_head_that_does_more_is_noticed() -> None:
    rollouts, _ = shared_and_separate("llama")
    plain, odd = fresh_policy("llama"), fresh_policy("llama")
    odd.model.get_output_embeddings().register_forward_hook(lambda _, __, out: 3.0 * out.tanh())
    assert plain.plain_head
    assert not odd.plain_head
    with torch.no_grad():
        logits = odd.model(input_ids=rollouts.tokens[:1, :3]).logits
    assert float(logits.abs().max()) <= 3.0, "the hook acts"
    logp, h = odd.score(rollouts, 0.7, with_entropy=True)
    assert h is not None
    assert float((logp - plain.score(rollouts, 0.7)[0]).detach().abs().max()) > 0.1
    logp.sum().backward()
    assert float(gradients(odd.model).abs().max()) > 0.0


def test_one_token_responses() -> None:
    shared, separate = shared_and_separate("qwen2_5_vl", max_tokens=1)
    owner = policy("qwen2_5_vl")
    with torch.no_grad():
        ours, theirs = (owner.score(x, 1.0)[0] for x in (shared, separate))
    assert ours.shape == (len(shared), 1)
    assert float((ours - theirs).abs().max()) <= CLOSE


def test_equal_beginnings_are_read_once_too() -> None:
    owner = fresh_policy("llama")
    passes = rows_read(owner.model)
    prompt, begun = encoded("llama")[1], torch.tensor([5, 6, 7])
    found = engine(owner).continue_from([prompt] * 6, [begun] * 6, Sampling(9), seeded())
    assert passes[:3] == [1, 1, 6], "the prompt, the beginning on it, then six continuations"
    assert found.tokens.unique(dim=0).shape[0] > 1, "six continuations, not one six times"


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_a_prompt_is_read_once_for_all_its_beginnings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing too is a beginning; layers that cannot do so read prompt and beginning together."""
    owner = fresh_policy(name)
    passes = rows_read(owner.model)
    one, other = encoded(name)[1:3]
    nothing, short, long = torch.zeros(0).long(), torch.tensor([15]), torch.tensor([15, 30, 41])
    prompts = [one, one, other, one, other, other]
    prefixes = [long, nothing, long, short, short, long]
    found = engine(owner).continue_from(prompts, prefixes, Sampling(12), seeded())
    assert passes[:3] == [2, 5, 6]
    plain = "segcredit.rollout.sampling.growing_cache"
    monkeypatch.setattr(plain, lambda config: DynamicCache(config=config))
    del passes[:]
    again = engine(owner).continue_from(prompts, prefixes, Sampling(12), seeded())
    assert passes[:2] == [5, 6]
    assert torch.equal(found.tokens, again.tokens)
    assert float((found.logp_old - again.logp_old).abs().max()) <= CLOSE


def test_layers_that_forget_do_not_share() -> None:
    config = copy.deepcopy(policy("qwen2").model.config)
    assert full_attention(config)
    config.layer_types = ["full_attention", "sliding_attention"]
    assert not full_attention(config)


def test_the_cache_grows_in_place_and_over_its_room() -> None:
    layer, keys = GrowingLayer(), torch.randn(3, 2, 5 + SPARE_COLUMNS + 40, 4, generator=seeded())
    layer.update(keys[:, :, :5], -keys[:, :, :5])
    place, rows = layer.keys.data_ptr(), torch.arange(3)
    moves = 0
    for step in range(5, keys.shape[2]):
        if step == 30:  # finished rows leave
            rows = torch.tensor([2, 0])
            layer.batch_select_indices(rows)
        new = keys[rows][:, :, step : step + 1]
        found, values = layer.update(new, -new)
        moves += layer.keys.data_ptr() != place
        place = layer.keys.data_ptr()
        assert torch.equal(found, keys[rows][:, :, : step + 1])
        assert torch.equal(values, -found)
    assert moves == 2  # the rows that left, and one time out of room


def test_siblings_meet_in_one_micro_batch() -> None:
    a, b, c = (
        Encoded(x.prompt, x.tokens[:3], x.positions[:, :3], {}) for x in encoded("llama")[1:4]
    )
    rollouts = some_rollouts([9, 1, 5, 6, 2, 5], [a, b, c, c, a, b])
    parts = [sorted(x.tolist()) for x in split_padded(rollouts, budget=24)]
    assert parts == [[0, 4], [2, 3], [1, 5]]
