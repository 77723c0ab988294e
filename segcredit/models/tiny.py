"""Tiny configurations of real architectures, made in code: the classes of the large ones."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
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


@dataclass(frozen=True)
class Sizes:
    """How large a tiny model is."""

    hidden: int = HIDDEN
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int | None = None
    """Heads of keys and values; None: half as many."""
    vision_layers: int = 1

    @property
    def width(self) -> int:
        """Of a head."""
        return self.hidden // self.heads

    @property
    def spread(self) -> float:
        """Of the initial weights: sums over a wider layer are no larger."""
        return INIT * min(1.0, (HIDDEN / self.hidden) ** 0.5)


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _text(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": 3 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads or sizes.heads // (1 if sizes.heads % 2 else 2),
        "max_position_embeddings": 4096,
        "initializer_range": sizes.spread,
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


def _mrope(width: int, kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Half of a head's rotations, in Qwen2.5-VL's proportion of time, height and width (2:3:3)."""
    half = width // 2
    side = 3 * half // 8
    return {
        "rope_type": "default",
        "rope_theta": ROPE_THETA,
        "mrope_section": [half - 2 * side, side, side],
        # as real checkpoints say; transformers knows it of the architecture, vLLM reads it
        **({"mrope_interleaved": True} if kind is Qwen3VLConfig else {}),
    }


def _text_model(
    kind: type[PreTrainedConfig],
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sizes,
) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return kind(**_text(sizes), **_ids(tokenizer), rope_parameters=rope)


def _vision_model(
    kind: type[PreTrainedConfig],
    own: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    sizes: Sizes,
) -> PreTrainedConfig:
    """``own``: what only this architecture's vision tower has."""
    text = _text(sizes)
    tied = text.pop("tie_word_embeddings")
    text |= _ids(tokenizer) | {
        "rope_parameters": _mrope(sizes.width, kind),
        "head_dim": sizes.width,
    }
    vision: dict[str, Any] = {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_heads": sizes.heads,
        "out_hidden_size": sizes.hidden,
        "initializer_range": sizes.spread,
    }
    if kind is Qwen2_5_VLConfig:  # no windows: pictures are small
        vision["fullatt_block_indexes"] = list(range(sizes.vision_layers))
    return kind(
        text_config=text,
        vision_config=vision | own,
        tie_word_embeddings=tied,
        **_vision_ids(tokenizer),
    )


TINY: dict[str, Callable[..., PreTrainedConfig]] = {
    "qwen2": partial(_text_model, Qwen2Config),
    "llama": partial(_text_model, LlamaConfig),
    # 14-pixel patches, merged two by two: 28 pixels per image token
    "qwen2_5_vl": partial(_vision_model, Qwen2_5_VLConfig, {}),
    # 16-pixel patches, merged two by two: 32 pixels per image token
    "qwen3_vl": partial(
        _vision_model,
        Qwen3VLConfig,
        {"num_position_embeddings": 16 * 16, "deepstack_visual_indexes": [0]},
    ),
}


def tiny_config(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
    kv_heads: int | None = None,
    vision_layers: int = 1,
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
            f"Try hidden={8 * heads * max(1, round(hidden / (8 * heads)))}."
        )
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(
            f"kv_heads must divide heads ({heads}): each is shared by equally many; got {kv_heads}."
        )
    return TINY[name](tokenizer, Sizes(hidden, layers, heads, kv_heads, vision_layers))
