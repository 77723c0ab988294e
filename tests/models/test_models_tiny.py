"""Tiny models: real classes, made the same from the same seed."""

import pytest
import torch
from tiny_policies import ARCHITECTURES, world

from segcredit.models import Policy, tiny_config

CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_class_is_that_of_the_large_one(name: str) -> None:
    tokenizer = world(name).tokenizer()
    state = torch.get_rng_state()
    one = Policy.tiny(name, tokenizer, seed=1, hidden=32, heads=4)
    again = Policy.tiny(name, tokenizer, seed=1, hidden=32, heads=4)
    other = Policy.tiny(name, tokenizer, seed=2, hidden=32, heads=4)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's randomness is left alone
    assert type(one.model).__name__ == CLASSES[name]
    weights = [x.model.state_dict() for x in (one, again, other)]
    assert all(torch.equal(x, weights[1][key]) for key, x in weights[0].items())
    assert any(not torch.equal(x, weights[2][key]) for key, x in weights[0].items())
    assert one.end_tokens == (tokenizer.eos_token_id,)
    assert one.model.dtype == torch.float32
    assert not one.model.training


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes(name: str) -> None:
    tokenizer = world(name).tokenizer()
    for hidden, heads, layers in [(32, 4, 1), (96, 4, 2), (48, 2, 3), (24, 3, 1), (16, 1, 1)]:
        text = tiny_config(name, tokenizer, hidden, layers, heads).get_text_config()
        assert (text.hidden_size, text.num_hidden_layers) == (hidden, layers)
        assert text.vocab_size == len(tokenizer)
        assert heads % text.num_key_value_heads == 0
        section = text.rope_parameters.get("mrope_section")
        assert section is None or (sum(section) == hidden // heads // 2 and min(section) > 0)


def test_heads_of_keys_and_depth_of_vision() -> None:
    tokenizer = world("qwen2_5_vl").tokenizer()
    made = Policy.tiny(
        "qwen2_5_vl", tokenizer, hidden=64, heads=4, layers=1, kv_heads=1, vision_layers=3
    )
    assert made.model.config.get_text_config().num_key_value_heads == 1
    assert len(made.model.model.visual.blocks) == 3
    assert tiny_config("llama", tokenizer, 64, 1, 4).num_key_value_heads == 2
    with pytest.raises(ValueError, match=r"kv_heads must divide heads \(4\).*got 3"):
        tiny_config("qwen2", tokenizer, 64, 1, 4, kv_heads=3)


def test_a_wider_model_starts_from_smaller_weights() -> None:
    tokenizer = world("llama").tokenizer()
    spreads = [tiny_config("llama", tokenizer, x, 1, 4).initializer_range for x in (32, 96, 384)]
    assert spreads == [0.08, 0.08, 0.04]


def test_names_that_do_not_exist_and_sizes_that_do_not_fit() -> None:
    tokenizer = world("qwen2").tokenizer()
    with pytest.raises(ValueError, match=r"no tiny model 'Qwen2.5-VL'. Did you mean 'qwen2_5_vl'"):
        tiny_config("Qwen2.5-VL", tokenizer)
    with pytest.raises(ValueError, match="There are: qwen2, llama, qwen2_5_vl, qwen3_vl"):
        tiny_config("mamba", tokenizer)
    for hidden, heads in [(30, 4), (24, 6), (100, 4)]:
        with pytest.raises(ValueError, match=rf"hidden={hidden}, heads={heads}"):
            tiny_config("qwen2", tokenizer, hidden=hidden, heads=heads)
