"""Sequences end to end in one row give what padded rows give, and know nothing of each other."""

import pytest
import torch
from tiny_policies import (
    ARCHITECTURES,
    VISION,
    drawn,
    encoded,
    engine,
    fresh_policy,
    seeded,
    some_rollouts,
)
from transformers import PreTrainedModel

from segcredit.models import Critic, Policy
from segcredit.models.inputs import packed_inputs
from segcredit.models.layers import PACKED, packs, recompute_activations, recomputes, set_attention
from segcredit.train.distributed import split_packed
from segcredit.types import Encoded, Rollouts, Sampling

CLOSE = 1e-5


def packing(name: str) -> Policy:
    made = fresh_policy(name)
    set_attention(made.model, "packed")
    return made


def with_holes(rollouts: Rollouts) -> Rollouts:
    mask = rollouts.mask.clone()
    mask[::2, 1] = False
    return rollouts.replace(mask=mask)


def everything(owner: Policy, rollouts: Rollouts) -> list[torch.Tensor]:
    """Scores, entropies, values, and the gradients of policy and critic."""
    critic = Critic.from_policy(owner)
    torch.nn.init.normal_(critic.head.weight, std=0.3, generator=seeded())
    logp, h = owner.score(rollouts, 0.8, with_entropy=True)
    value = critic(rollouts)
    assert h is not None
    weight = torch.rand(logp.shape, generator=seeded(1))
    ((logp + 0.1 * h + value) * weight).sum().backward()
    grads = [
        torch.cat([x.grad.flatten() for x in part.parameters() if x.grad is not None])
        for part in (owner.model, critic)
    ]
    return [logp.detach(), h.detach(), value.detach(), *grads]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_equals_padded(name: str, holes: bool, recomputed: bool) -> None:
    rollouts = drawn(name)
    if holes:
        rollouts = with_holes(rollouts)
    owner = packing(name)
    assert packs(owner.model)
    if recomputed:
        recompute_activations(owner.model)
    for ours, theirs in zip(
        everything(owner, rollouts), everything(fresh_policy(name), rollouts), strict=True
    ):
        assert float((ours - theirs).abs().max()) <= CLOSE * max(1.0, float(theirs.abs().max()))


def test_activations_are_recomputed_under_the_names_of_transformers_5_23(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = getattr(PreTrainedModel, "activation_checkpointing_enable", None)

    def old_name(*_: object, **__: object) -> None:
        raise FutureWarning("deprecated and will be removed in v6")

    if new is None:  # before 5.23
        before = PreTrainedModel.gradient_checkpointing_enable
        monkeypatch.setattr(
            PreTrainedModel, "activation_checkpointing_enable", before, raising=False
        )
        monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", old_name)
        monkeypatch.setattr(PreTrainedModel, "is_gradient_checkpointing", property(old_name))
    owner = packing("qwen2")
    assert not recomputes(owner.model)
    recompute_activations(owner.model)
    assert recomputes(owner.model)
    for ours, theirs in zip(
        everything(owner, drawn("qwen2")),
        everything(fresh_policy("qwen2"), drawn("qwen2")),
        strict=True,
    ):
        assert float((ours - theirs).abs().max()) <= CLOSE * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_row_without_padding(name: str) -> None:
    owner = packing(name)
    rollouts = drawn(name)
    shapes: list[tuple[int, ...]] = []
    assert owner.plain_head  # which asks the model once
    owner.model.base_model.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    with torch.no_grad():
        owner.score(rollouts, 1.0)
    asked = sum(len(x.tokens) for x in encoded(name))
    assert shapes == [(1, asked + int(rollouts.mask.sum()) - len(rollouts))]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_leaks_between_sequences(name: str) -> None:
    owner, rollouts = packing(name), drawn(name)
    changed = rollouts.tokens.clone()
    changed[0] = 30 + (changed[0] + 7) % 10
    with torch.no_grad():
        before, _ = owner.score(rollouts, 1.0)
        after, _ = owner.score(rollouts.replace(tokens=changed), 1.0)
    assert torch.equal(before[1:], after[1:])
    assert not torch.allclose(before[0], after[0])


@pytest.mark.parametrize("name", VISION)
def test_the_vision_tower_takes_all_windows_at_once(name: str) -> None:
    """Each attention of the tower is called once, however many windows and images there are."""
    from transformers import AttentionInterface

    rollouts = drawn(name)  # loads a model, which registers the attention anew: before the counter
    owner, calls = packing(name), []
    assert owner.plain_head
    original = AttentionInterface._global_mapping[PACKED]

    def counted(module, *given, **others):
        calls.append("cu_seq_lens_q" in others)
        return original(module, *given, **others)

    AttentionInterface.register(PACKED, counted)
    try:
        with torch.no_grad():
            owner.score(rollouts, 1.0)
    finally:
        AttentionInterface.register(PACKED, original)
    config = owner.model.config
    assert calls.count(True) == config.vision_config.depth
    assert calls.count(False) == config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampling_goes_on_as_before(name: str) -> None:
    plain, owner = fresh_policy(name), packing(name)
    ours, theirs = (engine(x).sample(encoded(name), Sampling(12), seeded()) for x in (owner, plain))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert float((ours.logp_old - theirs.logp_old).abs().max()) <= CLOSE
    alone = engine(owner).sample(encoded(name)[:1], Sampling(12), seeded())
    assert torch.equal(alone.tokens[0][alone.mask[0]], theirs.tokens[0][theirs.mask[0]])


def test_places_before_each_token() -> None:
    prompts = encoded("llama")[:2]
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    mask = torch.tensor([[True, False, True, False], [True, True, False, False]])
    packed = packed_inputs(prompts, tokens, mask)
    first, second = (len(x.tokens) for x in prompts)
    assert packed.tokens.shape == (1, first + 2 + second + 1)
    assert packed.before.tolist() == [first - 1, first + 1, first + second + 1, first + second + 2]
    assert (packed.positions[0, 0] == 0).nonzero().flatten().tolist() == [0, first + 2]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_row_by_row(name: str) -> None:
    """Against one row after another, with holes in the mask and a response of one token."""
    prompts = encoded(name)
    chance = torch.Generator().manual_seed(3)
    tokens = torch.randint(20, 40, (len(prompts), 7), generator=chance)
    mask = torch.rand(tokens.shape, generator=chance) < 0.6
    mask[:, 0] = True
    mask[0, 1:] = False
    ids, planes, before, first = [], [], [], 0
    for prompt, row, own in zip(prompts, tokens, mask, strict=True):
        written = int(own.nonzero().max()) + 1
        count = len(prompt.tokens)
        later = int(prompt.positions.max()) + 1 + torch.arange(written - 1)
        known = torch.cat([prompt.positions, later.expand(len(prompt.positions), -1)], dim=1)
        plain = torch.arange(count + written - 1)[None]
        planes.append(torch.cat([plain, known]) if len(known) > 1 else known)
        ids += [prompt.tokens, row[: written - 1]]
        before += [first + count - 1 + t for t in range(written) if own[t]]
        first += count + written - 1
    packed = packed_inputs(prompts, tokens, mask)
    assert packed.tokens[0].tolist() == torch.cat(ids).tolist()
    assert torch.equal(packed.positions[:, 0], torch.cat(planes, dim=1))
    assert packed.before.tolist() == before


def lengths_of(parts: list[torch.Tensor], length: list[int]) -> list[int]:
    return sorted(sum(length[i] for i in part.tolist()) for part in parts)


def rollouts_of(lengths: list[int]) -> Rollouts:
    asked = encoded("llama")[1]
    one = Encoded(asked.prompt, asked.tokens[:1], asked.positions[:, :1], {})
    return some_rollouts(lengths, [one] * len(lengths))


def test_micro_batches_are_balanced() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 1, 1]
    rollouts = rollouts_of(lengths)
    whole = [x + 1 for x in lengths]
    parts = split_packed(rollouts, budget=30)
    assert sorted(int(i) for part in parts for i in part) == list(range(10))
    sums = lengths_of(parts, whole)
    assert len(parts) == 2
    assert max(sums) <= 30
    assert max(sums) - min(sums) <= 2


def test_a_row_longer_than_the_budget_stands_alone() -> None:
    parts = split_packed(rollouts_of([50, 1, 1]), budget=10)
    assert [0] in [x.tolist() for x in parts]
    assert sorted(int(i) for part in parts for i in part) == [0, 1, 2]


def test_pairs_stay_together() -> None:
    parts = split_packed(rollouts_of([5, 1, 4, 2, 3, 3]), budget=8, item=2)
    for part in parts:
        assert all(int(x) // 2 == int(y) // 2 for x, y in part.view(-1, 2).tolist())


def test_layers_of_several_kinds_are_not_packed() -> None:
    owner = packing("qwen2")
    owner.model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not packs(owner.model)
