"""Tiny configurations of real architectures, made in code: the classes of the large ones."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3VLConfig,
)

HIDDEN, LAYERS, HEADS = 96, 2, 4
ROPE_THETA = 100.0
"""Sequences are short, so the slow rotations of a large base would never turn."""
INIT = 0.08
"""A larger spread than the usual 0.02: a narrow, shallow model learns from it much sooner."""


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _text(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "max_position_embeddings": 4096,
        "initializer_range": INIT,
        "tie_word_embeddings": False,
    }


def _vision_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}


def _mrope(width: int) -> dict[str, Any]:
    """Half of a head's rotations, in Qwen2.5-VL's proportion of time, height and width (2:3:3)."""
    half = width // 2
    side = 3 * half // 8
    return {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "mrope_section": [half - 2 * side, side, side],
    }


def qwen2(
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> PreTrainedConfig:
    """A small Qwen2 (text)."""
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return Qwen2Config(**_text(hidden, layers, heads), **_ids(tokenizer), rope_parameters=rope)


def llama(
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> PreTrainedConfig:
    """A small Llama (text)."""
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return LlamaConfig(**_text(hidden, layers, heads), **_ids(tokenizer), rope_parameters=rope)


def qwen2_5_vl(
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> PreTrainedConfig:
    """A small Qwen2.5-VL: 14-pixel patches, merged two by two, so 28 pixels per image token."""
    text = _text(hidden, layers, heads)
    tied = text.pop("tie_word_embeddings")
    text |= _ids(tokenizer) | {"rope_parameters": _mrope(hidden // heads)}
    vision = {
        "depth": 1,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": heads,
        "out_hidden_size": hidden,
        "fullatt_block_indexes": [0],
        "initializer_range": INIT,
    }
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, **_vision_ids(tokenizer)
    )


def qwen3_vl(
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> PreTrainedConfig:
    """A small Qwen3-VL: 16-pixel patches, merged two by two, so 32 pixels per image token."""
    text = _text(hidden, layers, heads)
    tied = text.pop("tie_word_embeddings")
    text |= _ids(tokenizer) | {"rope_parameters": _mrope(hidden // heads)}
    text["head_dim"] = hidden // heads
    vision = {
        "depth": 1,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": heads,
        "out_hidden_size": hidden,
        "num_position_embeddings": 16 * 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": INIT,
    }
    return Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, **_vision_ids(tokenizer)
    )


TINY: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": qwen2,
    "llama": llama,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
}


def tiny_config(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
) -> PreTrainedConfig:
    """The configuration of that name."""
    if name not in TINY:
        near = get_close_matches(name.lower().replace("-", "_").replace(".", "_"), TINY, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no tiny model {name!r}.{hint} There are: {', '.join(TINY)}.")
    if hidden % heads or (hidden // heads) % 8:
        raise ValueError(
            f"hidden must be heads × a multiple of 8 (rotary positions halve each head and share "
            f"it among time, height and width); got hidden={hidden}, heads={heads}. "
            f"Try hidden={32 * heads}."
        )
    return TINY[name](tokenizer, hidden, layers, heads)
