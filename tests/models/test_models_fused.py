"""Rotary embeddings and gated MLPs that use one kernel on a GPU; on a CPU nothing changes."""

import copy

import pytest
import torch
from tiny_policies import ARCHITECTURES, fresh_policy
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
)

from segcredit.models.layers import ROTARY, fuse_gates, fuse_rotary

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def logits_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    tokens = torch.arange(14).view(2, 7)
    logits = model(input_ids=tokens, use_cache=False).logits
    logits.square().sum().backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return [logits, *gradients]


def check_unchanged(model: nn.Module, rotary: int, gates: int) -> None:
    """Fuse the model once; on a CPU its results stay equal bit for bit."""
    before = logits_and_gradients(model)
    names = [*model.state_dict()]
    model.zero_grad()
    assert (fuse_rotary(model), fuse_gates(model)) == (rotary, gates)
    assert (fuse_rotary(model), fuse_gates(model)) == (0, 0)
    assert [*model.state_dict()] == names
    for again in (model, copy.deepcopy(model)):
        again.zero_grad()
        after = logits_and_gradients(again)
        assert len(before) == len(after) > 10
        assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_is_fused_once(name: str) -> None:
    model = fresh_policy(name).model
    layers = model.config.get_text_config().num_hidden_layers
    attention = [x for x in model.modules() if type(x).__name__.endswith("Attention")]
    towers = [x for x in attention if "Vision" in type(x).__name__]
    assert len(attention) - len(towers) == layers
    # older releases of transformers give Qwen2.5-VL a rotary embedding of another name
    called = sum(ROTARY in type(x).forward.__code__.co_names for x in attention)
    assert called in (0, layers)
    check_unchanged(model, called, sum(1 for x in model.modules() if hasattr(x, "gate_proj")))


def test_llama_is_fused() -> None:
    check_unchanged(LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), 3, 3)


def test_a_gate_that_is_no_silu_is_left_alone() -> None:
    config = Gemma3TextConfig(**SIZES, hidden_activation="gelu_pytorch_tanh")
    check_unchanged(Gemma3ForCausalLM(config).eval(), 3, 0)


class Clamped(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x).clamp(max=7.0), self.up_proj(x).clamp(-7.0, 7.0)
        return self.down_proj(self.act_fn(gate) * up)


def test_a_gate_that_clamps_is_left_alone() -> None:
    """DeepSeek V4 clamps large values; others are the same."""
    config = LlamaConfig(**SIZES)
    assert fuse_gates(nn.Sequential(Clamped(config))) == 0
    assert fuse_gates(nn.Sequential(LlamaMLP(config))) == 1


def test_gates_with_lora_are_fused() -> None:
    peft = pytest.importorskip("peft")
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    targets = ["gate_proj", "up_proj", "down_proj"]
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets), model)
    check_unchanged(model, 3, 3)


def test_other_models_keep_their_functions() -> None:
    """Only the given model changes: transformers' own classes do not."""
    forward = LlamaAttention.forward
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    fuse_rotary(model)
    assert LlamaAttention.forward is forward
    assert isinstance(model.model.layers[0].self_attn, LlamaAttention)
    assert type(LlamaForCausalLM(LlamaConfig(**SIZES)).model.layers[0].self_attn) is LlamaAttention


def test_another_rotation_of_that_name_is_left_alone() -> None:
    """Pairs of neighbors, as in GLM, are rotated by a function of the same name."""
    from transformers import GlmConfig
    from transformers.models.glm.modeling_glm import GlmForCausalLM

    model = GlmForCausalLM(GlmConfig(**SIZES, pad_token_id=0, partial_rotary_factor=0.5))
    assert fuse_rotary(model) == 0
