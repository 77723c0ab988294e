"""The critic is the policy's trunk, tensor for tensor, and looks at nothing it must not see."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policies import ARCHITECTURES, VISION, drawn, encoded, fresh_policy, policy
from torch import Tensor, nn

from segcredit.models import Critic, Policy
from segcredit.models.critic import HEAD_FILE, verify_equal
from segcredit.types import Rollouts


def storages(module: nn.Module) -> set[int]:
    every = [*module.parameters(), *module.buffers()]
    return {x.untyped_storage().data_ptr() for x in every}


def opinionated(owner: Policy) -> Critic:
    """A critic whose values are not zero."""
    critic = Critic.from_policy(owner)
    nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(3))
    return critic


@torch.no_grad()
def values(critic: Critic, rollouts: Rollouts) -> Tensor:
    return critic(rollouts)


# ── The copy ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_critic_starts_as_the_policy_s_trunk(name: str) -> None:
    owner = fresh_policy(name)
    critic = Critic.from_policy(owner)
    trunk = owner.model.model
    theirs = {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}
    ours = {**dict(critic.trunk.named_parameters()), **dict(critic.trunk.named_buffers())}
    assert len(theirs) > 20
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(x, ours[key]) for key, x in theirs.items())
    assert any("inv_freq" in key for key in theirs)  # never saved, compared all the same
    if name in VISION:
        assert any(key.startswith("visual.") for key in theirs)
    assert not storages(critic) & storages(owner.model)
    assert all(x.requires_grad for x in critic.parameters())
    assert not critic.trunk.training
    assert not values(critic, drawn(name)).any()  # V = 0 before it has learnt anything


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_what_the_critic_learns_stays_with_it(name: str) -> None:
    owner, rollouts = fresh_policy(name), drawn(name)
    before = owner.score(rollouts, 1.0)[0]
    critic = Critic.from_policy(owner)
    with torch.no_grad():
        for x in critic.parameters():
            x += 1.0
    assert torch.equal(owner.score(rollouts, 1.0)[0], before)


def test_a_changed_tensor_is_refused() -> None:
    trunk = fresh_policy("qwen2_5_vl").model.model
    for key in ("language_model.norm.weight", "visual.merger.ln_q.weight"):
        copied = copy.deepcopy(trunk)
        verify_equal(trunk, copied)
        with torch.no_grad():
            copied.get_parameter(key)[-1] += 1e-6
        with pytest.raises(ValueError, match=rf"1 of \d+ tensors differ, first '{key}'"):
            verify_equal(trunk, copied)


def test_a_changed_buffer_that_is_never_saved_is_refused() -> None:
    trunk: Any = fresh_policy("qwen2").model.model
    copied: Any = copy.deepcopy(trunk)
    copied.rotary_emb.inv_freq.mul_(2)
    with pytest.raises(ValueError, match="first 'rotary_emb"):
        verify_equal(trunk, copied)


def test_a_random_trunk_is_refused() -> None:
    """What one gets where a checkpoint's names match nothing."""
    trunk = fresh_policy("qwen2_5_vl").model.model
    other = fresh_policy("qwen2_5_vl", seed=1).model.model
    with pytest.raises(ValueError, match=r"the critic's trunk is not the policy's: \d\d of"):
        verify_equal(trunk, other)


def test_a_missing_tensor_is_refused() -> None:
    trunk: Any = fresh_policy("qwen2").model.model
    copied: Any = copy.deepcopy(trunk)
    del copied.layers[1].mlp.up_proj.weight
    for pair in ((trunk, copied), (copied, trunk)):
        with pytest.raises(ValueError, match=r"only one of them has \['layers.1.mlp.up_proj"):
            verify_equal(*pair)


def test_a_shared_tensor_is_refused() -> None:
    trunk: Any = fresh_policy("qwen2").model.model
    copied: Any = copy.deepcopy(trunk)
    copied.norm.weight = trunk.norm.weight
    with pytest.raises(ValueError, match="shares memory"):
        verify_equal(trunk, copied)
    # a view that begins elsewhere in the same memory
    copied = copy.deepcopy(trunk)
    twice = torch.cat([trunk.norm.weight.data, trunk.norm.weight.data])
    trunk.norm.weight = nn.Parameter(twice[:32])
    copied.norm.weight = nn.Parameter(twice[32:])
    with pytest.raises(ValueError, match="shares memory"):
        verify_equal(trunk, copied)
    with pytest.raises(ValueError, match="shares memory"):
        verify_equal(trunk, trunk)


def test_a_model_without_a_trunk_is_refused() -> None:
    bare = Policy(fresh_policy("qwen2").model.model, policy("qwen2").codec)
    with pytest.raises(ValueError, match="Qwen2Model has no trunk below its head"):
        Critic.from_policy(bare)


# ── What a value may depend on ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_value_depends_on_what_was_written_before_and_on_nothing_else(name: str) -> None:
    critic, rollouts = opinionated(policy(name)), drawn(name)
    rollouts = rollouts.replace(mask=torch.ones_like(rollouts.mask))
    tokens = rollouts.tokens.masked_fill(rollouts.tokens == 0, 12)
    rollouts = rollouts.replace(tokens=tokens)
    value = values(critic, rollouts)
    for place in (0, 1, 4, tokens.shape[1] - 1):
        other = tokens.clone()
        other[:, place:] = 10 + (other[:, place:] + 1) % 30
        assert (other != tokens)[:, place:].all()
        got = values(critic, rollouts.replace(tokens=other))
        assert (got - value)[:, : place + 1].abs().max() < 1e-5
        if place + 1 < tokens.shape[1]:
            assert ((got - value)[:, place + 1].abs() > 1e-4).all()  # the very next one sees it
        # one token alone, and everything behind it may change but nothing before
        other = tokens.clone()
        other[:, place] = 10 + (other[:, place] + 1) % 30
        got = values(critic, rollouts.replace(tokens=other))
        assert (got - value)[:, : place + 1].abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3_vl"])
def test_the_first_value_is_the_prompt_s(name: str) -> None:
    critic, rollouts = opinionated(policy(name)), drawn(name)
    value = values(critic, rollouts)
    prompts = encoded(name)
    turned = values(critic, rollouts.replace(prompts=prompts[1:] + prompts[:1]))
    assert ((turned - value)[:, 0].abs() > 1e-4).all()
    assert value[:, 0].unique().numel() == len(prompts)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_with_holes_and_neighbors(name: str) -> None:
    """A tool's output is read: values behind it know it; those before it do not."""
    critic, rollouts = opinionated(policy(name)), drawn(name)
    row = int(rollouts.mask.sum(dim=1).argmax())
    length = int(rollouts.mask[row].sum())
    assert length > 8
    value = values(critic, rollouts)
    one = rollouts.select(torch.tensor([row]))
    assert (values(critic, one) - value[row]).abs()[one.mask].max() < 1e-5
    mask = one.mask.clone()
    mask[0, 3:5] = False
    holed = one.replace(mask=mask)
    assert (values(critic, holed) - value[row])[mask].abs().max() < 1e-5
    tokens = one.tokens.clone()
    tokens[0, 3] = 10 + (tokens[0, 3] + 1) % 30
    change = (values(critic, holed.replace(tokens=tokens)) - value[row])[0].abs()
    assert change[:3].max() < 1e-5
    assert change[5:length].max() > 1e-4


def test_columns_of_padding_get_no_value() -> None:
    critic, rollouts = opinionated(policy("qwen2")), drawn("qwen2")
    short = rollouts.mask.clone()
    short[:, 3:] = False
    value = values(critic, rollouts.replace(mask=short))
    assert value.shape == short.shape
    assert not value[~short].any()
    assert value[short].all()


def test_values_are_in_float32_whatever_the_trunk_is_in() -> None:
    owner = fresh_policy("qwen2")
    owner.model.bfloat16()
    critic = Critic.from_policy(owner)
    assert critic.trunk.dtype == torch.bfloat16
    assert critic.head.weight.dtype == torch.float32
    assert values(critic, drawn("qwen2")).dtype == torch.float32


@pytest.mark.parametrize("name", VISION)
def test_gradients_reach_the_vision_tower(name: str) -> None:
    owner, rollouts = fresh_policy(name), drawn(name)
    critic = opinionated(owner)
    critic(rollouts)[rollouts.mask].square().mean().backward()
    logp, _ = owner.score(rollouts, 1.0)
    logp[rollouts.mask].mean().backward()
    for model in (critic.trunk, owner.model):
        assert any("visual" in key for key, _ in model.named_parameters())
        for key, x in model.named_parameters():
            assert x.grad is not None, key
            assert x.grad.abs().max() > 0, key
    assert critic.head.weight.grad is not None


def test_scoring_needs_the_prompts() -> None:
    rollouts = drawn("qwen2").replace(prompts=None)
    with pytest.raises(ValueError, match="needs the rollouts' 'prompts'"):
        Critic.from_policy(policy("qwen2"))(rollouts)
    with pytest.raises(ValueError, match="needs the rollouts' 'prompts'"):
        policy("qwen2").score(rollouts, 1.0)


# ── Saving ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_and_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    critic = opinionated(fresh_policy(name))
    with torch.no_grad():
        critic.head.bias += 0.25
    critic.save(tmp_path)
    loaded = Critic.from_saved(tmp_path)
    state = critic.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    assert all(torch.equal(x, loaded.state_dict()[key]) for key, x in state.items())
    verify_equal(critic.trunk, loaded.trunk)
    assert torch.equal(values(loaded, drawn(name)), values(critic, drawn(name)))
    assert not loaded.trunk.training


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl", "qwen3_vl"])
def test_a_folder_without_some_trunk_tensors_is_refused(name: str, tmp_path: Path) -> None:
    Critic.from_policy(fresh_policy(name)).save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for key in (next(k for k in tensors if "o_proj" in k), sorted(tensors)[-1]):
        rest = {k: x for k, x in tensors.items() if k != key}
        save_file(rest, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="is not a saved critic: missing keys"):
            Critic.from_saved(tmp_path)
    save_file({**tensors, "odd.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is not a saved critic: unexpected keys"):
        Critic.from_saved(tmp_path)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_a_policy_s_folder_is_no_critic_s(name: str, tmp_path: Path) -> None:
    fresh_policy(name).save(tmp_path)
    with pytest.raises(ValueError, match="is not a saved critic"):
        Critic.from_saved(tmp_path)


def test_a_critic_without_its_head_is_refused(tmp_path: Path) -> None:
    Critic.from_policy(fresh_policy("qwen2")).save(tmp_path)
    (tmp_path / HEAD_FILE).unlink()
    with pytest.raises(ValueError, match="it has no value_head"):
        Critic.from_saved(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises((OSError, ValueError)):
        Critic.from_saved(tmp_path)
