"""Policies on disk: saved, loaded, and as the public checkpoints name things."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policies import ARCHITECTURES, VISION, drawn, encoded, engine, fresh_policy, seeded
from torch import nn

from segcredit.models import Critic, Policy
from segcredit.models.critic import verify_equal
from segcredit.types import Sampling

LEGACY = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Today's names of Qwen2.5-VL's tensors, and those of its public checkpoints."""


def same(one: Policy, other: Policy, rollouts_of: str) -> None:
    """Every tensor, and what they say."""
    theirs, ours = one.model.state_dict(), other.model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(x, ours[key]) for key, x in theirs.items())
    verify_equal(one.model, other.model)
    rollouts = drawn(rollouts_of)
    assert torch.equal(one.score(rollouts, 1.0)[0], other.score(rollouts, 1.0)[0])


@pytest.mark.parametrize("is_end", [False, True])
def test_a_padding_token_is_trained_only_if_it_is_an_end_token(tmp_path: Path, is_end: bool):
    """So that a run that is resumed from its checkpoint trains what it trained before."""
    owner = fresh_policy("qwen2")
    padding = owner.model.get_input_embeddings().padding_idx
    assert padding is not None
    owner.model.config.eos_token_id = padding if is_end else owner.end_tokens[0]
    owner.save(tmp_path / "policy")
    Critic.from_policy(owner).save(tmp_path / "critic")
    loaded = Policy.from_pretrained(tmp_path / "policy").model
    trunk = Critic.from_saved(tmp_path / "critic").trunk
    for model in (loaded, trunk):
        assert model.get_input_embeddings().padding_idx == (None if is_end else padding)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    owner = fresh_policy(name)
    owner.save(tmp_path)
    loaded = Policy.from_pretrained(tmp_path)
    same(owner, loaded, name)
    assert not loaded.model.training
    assert loaded.end_tokens == owner.end_tokens
    assert loaded.codec.banned == owner.codec.banned
    made = engine(loaded).sample(encoded(name), Sampling(6), seeded())
    assert torch.equal(
        made.tokens, engine(owner).sample(encoded(name), Sampling(6), seeded()).tokens
    )


def test_precision_is_as_asked_for(tmp_path: Path) -> None:
    owner = fresh_policy("qwen2")
    owner.save(tmp_path)
    assert Policy.from_pretrained(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    owner.model.bfloat16().save_pretrained(tmp_path)
    assert Policy.from_pretrained(tmp_path).model.dtype == torch.float32


def write_as_published(owner: Policy, folder: Path, names: dict[str, str]) -> set[str]:
    """The weights under the given names; returns them."""
    owner.save(folder)
    tensors = {}
    for key, x in owner.model.state_dict().items():
        old = next((start for start in names if key.startswith(start)), "")
        tensors[names.get(old, "") + key.removeprefix(old)] = x.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return set(tensors)


def flatten_config(folder: Path) -> None:
    """Settings as Qwen2.5-VL's were first published: the language model's on top of config.json."""
    file = folder / "preprocessor_config.json"
    images: dict[str, Any] = json.loads(file.read_text())
    size = images.pop("size")
    images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    images |= {"processor_class": "Qwen2_5_VLProcessor"}
    file.write_text(json.dumps(images))
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text())
    text: dict[str, Any] = config.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "layer_types", "dtype"):
        text.pop(name, None)
    config |= text
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["torch_dtype"] = config.pop("dtype", "float32")
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("names", [LEGACY, {}])
def test_qwen2_5_vl_under_old_and_new_names(
    names: dict[str, str], flat: bool, tmp_path: Path
) -> None:
    """Loaded by a class that does not know the old names, the language model would be random."""
    owner = fresh_policy("qwen2_5_vl")
    written = write_as_published(owner, tmp_path, names)
    if flat:
        flatten_config(tmp_path)
    beginnings = {".".join(key.split(".")[:2]) for key in written}
    assert ("model.layers" in beginnings and "visual.blocks" in beginnings) == bool(names)
    assert "lm_head.weight" in written
    loaded = Policy.from_pretrained(tmp_path)
    same(owner, loaded, "qwen2_5_vl")
    for made in encoded("qwen2_5_vl"):
        again = loaded.encode(made.prompt)
        assert torch.equal(again.tokens, made.tokens)
        assert torch.equal(again.positions, made.positions)
    critic = Critic.from_policy(loaded)
    verify_equal(owner.model.model, critic.trunk)  # with the original, not with what was loaded
    critic.save(tmp_path / "critic")
    again = Critic.from_saved(tmp_path / "critic")
    verify_equal(owner.model.model, again.trunk)


def test_qwen3_vl_under_its_published_names(tmp_path: Path) -> None:
    owner = fresh_policy("qwen3_vl")
    written = write_as_published(owner, tmp_path, {})
    assert {key.split(".")[1] for key in written} == {"language_model", "visual", "weight"}
    loaded = Policy.from_pretrained(tmp_path)
    same(owner, loaded, "qwen3_vl")
    verify_equal(owner.model.model, Critic.from_policy(loaded).trunk)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl"])
def test_a_head_tied_to_the_embedding(name: str, tmp_path: Path) -> None:
    """Saved once, loaded twice; the critic has no head but a trunk all of its own."""
    owner = fresh_policy(name)
    owner.model.config.tie_word_embeddings = True
    embedding = owner.model.get_input_embeddings()
    owner.model.set_output_embeddings(nn.Linear(32, embedding.weight.shape[0], bias=False))
    owner.model.tie_weights()
    owner.save(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = Policy.from_pretrained(tmp_path)
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    same(owner, loaded, name)
    verify_equal(owner.model.model, Critic.from_policy(loaded).trunk)


@pytest.mark.parametrize("name", VISION)
def test_the_size_of_the_hidden_state_is_the_language_model_s(name: str) -> None:
    """A vision-language configuration has it below, under text_config."""
    owner = fresh_policy(name)
    assert owner.model.config.get_text_config().hidden_size == 32
    assert Critic.from_policy(owner).head.in_features == 32
