"""Rotary positions of images (M-RoPE): ours are those of the model's own path, always."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_policies import VISION, ask, drawn, encoded, engine, fresh_policy, picture, policy, seeded
from torch import Tensor

from segcredit.models import Policy
from segcredit.models.inputs import Inputs, full_inputs, prompt_inputs
from segcredit.types import Sampling

WITH_PICTURES = [1, 2, 3, 4, 5, 6]
"""Among the prompts, those with images."""


@contextmanager
def positions_read(model: Any) -> Iterator[list[Tensor]]:
    """What the language model below gets as positions, call by call."""
    read: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["position_ids"]), with_kwargs=True
    )
    yield read
    hook.remove()


def own_arguments(owner: Policy, inputs: Inputs) -> dict[str, Tensor]:
    """As transformers' processor would call the model: token types, and no positions."""
    given = inputs.arguments()
    del given["position_ids"]
    given["mm_token_type_ids"] = (inputs.tokens == owner.model.config.image_token_id).long()
    return given


@torch.no_grad()
def both_paths(owner: Policy, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions and logits: the model's own, then ours."""
    with positions_read(owner.model) as read:
        own = owner.model(**own_arguments(owner, inputs)).logits
        ours = owner.model(**inputs.arguments()).logits
    return read[0], own, read[1], ours


@pytest.mark.parametrize("row", WITH_PICTURES)
@pytest.mark.parametrize("name", VISION)
def test_a_prompt_has_the_model_s_own_positions(name: str, row: int) -> None:
    owner, prompt = fresh_policy(name), encoded(name)[row]
    own_positions, own, our_positions, ours = both_paths(owner, prompt_inputs([prompt]))
    assert torch.equal(prompt.positions[:, None], own_positions[-3:])
    assert torch.equal(our_positions[-3:], own_positions[-3:])
    assert (ours - own).abs().max() < 1e-5
    # and this matters: plain positions are other ones, and the model says something else
    line = torch.arange(len(prompt.tokens)).expand(3, -1)
    assert not torch.equal(prompt.positions, line)
    with torch.no_grad():
        plain = owner.model(**prompt_inputs([replace(prompt, positions=line)]).arguments()).logits
    assert (plain - own).abs().max() > 0.05


@pytest.mark.parametrize("name", VISION)
def test_a_batch_has_the_model_s_own_positions(name: str) -> None:
    """Left padding, responses behind, prompts without images among the others."""
    owner, rollouts = fresh_policy(name), drawn(name)
    inputs = full_inputs(encoded(name), rollouts.tokens, rollouts.mask)
    own_positions, own, our_positions, ours = both_paths(owner, inputs)
    there = inputs.attended
    assert not there.all()
    assert torch.equal(our_positions[-3:, there], own_positions[-3:, there])
    assert (ours - own)[there].abs().max() < 1e-5


@pytest.mark.parametrize("name", VISION)
def test_a_prompt_without_images_counts_plainly(name: str) -> None:
    owner, prompt = fresh_policy(name), encoded(name)[0]
    assert prompt.vision == {}
    assert torch.equal(prompt.positions, torch.arange(len(prompt.tokens)).expand(3, -1))
    with torch.no_grad():
        own = owner.model(input_ids=prompt.tokens[None]).logits
        ours = owner.model(**prompt_inputs([prompt]).arguments()).logits
    assert (ours - own).abs().max() < 1e-5


@pytest.mark.parametrize("name", VISION)
def test_hand_numbers(name: str) -> None:
    """Two rows of three merged patches: a plane of positions, then text from its far corner on."""
    side = 28 if name == "qwen2_5_vl" else 32
    owner = policy(name)
    made = owner.encode(ask("<image>", picture(3 * side, 2 * side)))
    image = made.tokens == owner.model.config.image_token_id
    start = int(image.nonzero()[0])
    assert int(image.sum()) == 6
    assert (made.positions[:, image] - start).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2, 0, 1, 2],
    ]
    assert (made.positions[:, start + 6] - start).tolist() == [3, 3, 3]
    assert int(made.positions.max()) == len(made.tokens) - 1 - 3  # six tokens, three positions


@pytest.mark.parametrize("name", VISION)
def test_what_an_earlier_generation_left_behind_changes_nothing(name: str) -> None:
    owner, prompts = fresh_policy(name), encoded(name)
    settings = Sampling(max_tokens=6)
    before = engine(owner).sample(prompts, settings, seeded())
    scores = owner.score(before, 1.0)[0]
    inputs = own_arguments(owner, prompt_inputs(prompts[2:4]))
    owner.model.generate(**inputs, max_new_tokens=3, do_sample=False)
    trunk: Any = owner.model.model
    for stale in (trunk.rope_deltas, torch.full((len(prompts), 1), 999)):
        assert stale.any()
        trunk.rope_deltas = stale
        after = engine(owner).sample(prompts, settings, seeded())
        assert torch.equal(after.tokens, before.tokens)
        assert torch.equal(after.logp_old, before.logp_old)
        assert torch.equal(owner.score(before, 1.0)[0], scores)
        owner._position_cache.clear()
        assert torch.equal(owner.encode(prompts[1].prompt).positions, prompts[1].positions)


@pytest.mark.parametrize("name", VISION)
def test_positions_are_remembered_by_shape(name: str) -> None:
    """Other words, the same positions; an image of as many patches but another form: others."""
    side = 28 if name == "qwen2_5_vl" else 32
    tall, wide = picture(side, 3 * side), picture(3 * side, side)
    asked = [ask("red <image>?", tall), ask("blue <image>?", tall), ask("red <image>?", wide)]
    fresh = [fresh_policy(name).encode(x).positions for x in asked]
    owner = fresh_policy(name)
    for x, expected in zip([*asked, *asked], [*fresh, *fresh], strict=True):
        assert torch.equal(owner.encode(x).positions, expected)
    assert torch.equal(fresh[0], fresh[1])
    assert fresh[0].shape == fresh[2].shape
    assert not torch.equal(fresh[0], fresh[2])
    assert len(owner._position_cache) == 2
