"""Models of the real sizes with random weights, and a tokenizer of the real size.

Speed and memory depend on shapes and not on trained weights, so nothing is downloaded. The
tokenizer is trained on the given prompts and padded with unused tokens to the real vocabulary size,
with special tokens at their real ids. So prompts have about their real lengths and the head has its
real width.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
)

from segcredit.data.worlds.tokens import CHAT_TEMPLATE
from segcredit.models import Codec, Policy

PLAIN = 151_643
SPECIAL = {
    "<|endoftext|>": 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|vision_start|>": 151_652,
    "<|vision_end|>": 151_653,
    "<|image_pad|>": 151_655,
    "<|video_pad|>": 151_656,
}
TEXT: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
VISION: dict[str, dict[str, Any]] = {
    "real": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    "small": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
}


def tokenizer_for(
    texts: Iterable[str], plain: int = PLAIN, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on these texts; by default with the vocabulary of Qwen.

    Args:
        plain: Number of plain tokens; those that are not learned never occur in text.
        special: Special tokens, whose ids follow; by default Qwen's, at their real ids.
    """
    made = Tokenizer(BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(texts, trainer)
    learned = made.get_vocab()
    filler = {f"<filler-{n}>": n for n in range(len(learned), plain)}
    merges = [tuple(pair) for pair in _merges(made)]
    full = Tokenizer(BPE({**learned, **filler}, merges))
    full.pre_tokenizer, full.decoder = made.pre_tokenizer, made.decoder
    names = {number: name for name, number in SPECIAL.items()}
    reserved = range(PLAIN, max(SPECIAL.values()) + 1)
    for name in special or [names.get(n, f"<|reserved-{n}|>") for n in reserved]:
        full.add_special_tokens([AddedToken(name, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=full,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _merges(made: Tokenizer) -> list[list[str]]:
    import json

    found = json.loads(made.to_str())["model"]["merges"]
    return [x.split(" ") if isinstance(x, str) else x for x in found]


def config_for(size: str, vision: bool) -> Qwen2Config | Qwen2_5_VLConfig:
    """Return the configuration of Qwen2.5 or Qwen2.5-VL."""
    text = {
        **TEXT[size],
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "eos_token_id": SPECIAL["<|im_end|>"],
        "pad_token_id": SPECIAL["<|endoftext|>"],
        "bos_token_id": None,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if not vision:
        return Qwen2Config(**text, rope_parameters=rope)
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    section = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    tower = {
        **VISION["small" if size == "small" else "real"],
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1] if size == "small" else [7, 15, 23, 31],
    }
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": {**rope, "mrope_section": section}},
        vision_config=tower,
        tie_word_embeddings=text["tie_word_embeddings"],
        image_token_id=SPECIAL["<|image_pad|>"],
        video_token_id=SPECIAL["<|video_pad|>"],
        vision_start_token_id=SPECIAL["<|vision_start|>"],
        vision_end_token_id=SPECIAL["<|vision_end|>"],
    )


def policy_for(
    size: str, vision: bool, tokenizer: PreTrainedTokenizerFast, device: str, dtype: torch.dtype
) -> Policy:
    """Make a policy with random weights directly on the device."""
    config = config_for(size, vision)
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = kind.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = SPECIAL["<|im_end|>"]
    model.generation_config.pad_token_id = SPECIAL["<|endoftext|>"]
    codec = Codec.for_tiny(tokenizer, config)
    if codec.image_processor is not None:  # the limits of Qwen2.5-VL
        codec.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    return Policy(model.eval(), codec)


def save_small_files(policy: Policy, folder: Path) -> None:
    """Save the files of a model that a recipe reads before it loads the weights."""
    policy.model.config.save_pretrained(folder)
    policy.codec.save(folder)
