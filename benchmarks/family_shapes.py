"""Checkpoints of other vision-language families in their real sizes, with random weights.

Each folder holds what a real one holds: configuration, weights, tokenizer, chat template and the
settings of the stock processor. Architectures, tokens and processors are those of the tiny models
of the tests (tests/tiny_families.py); this file adds the sizes of released models, written down
from their model cards. Speed and memory depend on sizes and not on trained weights.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from real_shapes import SPECIAL, tokenizer_for
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tiny_families import TEMPLATE, VISION_FAMILIES, TinyVision

SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
"""SigLIP so400m."""
SIZES: dict[str, dict[str, Any]] = {
    "internvl": {  # InternVL3-2B: Qwen2.5-1.5B and InternViT-300M
        "config": {
            "text_config": {
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_hidden_layers": 28,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "vocab_size": 151_674,
            },
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": [448, 448],
                "patch_size": [14, 14],
            },
            "image_seq_length": 256,
            "tie_word_embeddings": False,
        },
        "image": {"size": {"height": 448, "width": 448}, "max_patches": 1},
        "processor": {"image_seq_length": 256},
    },
    "gemma3": {  # Gemma-3-4B
        "config": {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "sliding_window": 1024,
                "layer_types": [
                    "full_attention" if n % 6 == 5 else "sliding_attention" for n in range(34)
                ],
                "vocab_size": 262_208,
                "tie_word_embeddings": True,
            },
            "vision_config": {**SIGLIP, "image_size": 896},
            "mm_tokens_per_image": 256,
            "tie_word_embeddings": True,
        },
        "image": {"size": {"height": 896, "width": 896}},
        "processor": {"image_seq_length": 256},
    },
    "smolvlm": {  # SmolVLM2-2.2B: SmolLM2-1.7B and SigLIP
        "config": {
            "text_config": {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "head_dim": 64,
                "vocab_size": 49_280,
            },
            "vision_config": {**SIGLIP, "image_size": 384},
            "scale_factor": 3,
        },
        "image": {
            "size": {"longest_edge": 384},
            "max_image_size": {"longest_edge": 384},
            "do_image_splitting": False,
        },
        "processor": {"image_seq_len": 81},
    },
    "qwen3_5": {  # Qwen3.5-4B: three layers of linear attention, then one of full attention
        "config": {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 9216,
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "layer_types": [
                    "full_attention" if n % 4 == 3 else "linear_attention" for n in range(32)
                ],
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "vocab_size": 248_320,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_heads": 16,
                "out_hidden_size": 2560,
                "patch_size": 16,
                "num_position_embeddings": 2304,
            },
            "tie_word_embeddings": True,
        },
        "image": {
            "patch_size": 16,
            "size": {"shortest_edge": 65_536, "longest_edge": 1_048_576},
        },
    },
}
"""By family: what differs from the tiny model in configuration, image processor and processor."""


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes; nested mappings are merged, all else is replaced."""
    found = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if nested and key != "rope_parameters" else value
    return found


def save_family(name: str, folder: Path, texts: Iterable[str], small: bool, device: str) -> Path:
    """Write a checkpoint of a family; ``small``: of its tiny model, for a test on a CPU."""
    kind, size = VISION_FAMILIES[name], {} if small else SIZES[name]
    special = dict.fromkeys([*SPECIAL, *kind.others, *kind.tokens.values()])
    changes = size.get("config", {})
    count = changes.get("text_config", {}).get("vocab_size", 10_000)
    words = tokenizer_for(texts, count - len(special), tuple(special))
    words.chat_template = TEMPLATE % kind.image
    settings = merged(kind.config(words.convert_tokens_to_ids), changes)
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    normal = {"initializer_range": 0.02}
    settings["text_config"] |= {"vocab_size": count, "max_position_embeddings": 32_768}
    settings["text_config"] |= ends | normal
    settings["vision_config"] |= normal
    config = AutoConfig.for_model(kind.model_type, **settings)
    torch.manual_seed(0)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    _save_processor(kind, folder, size)
    return folder


def _save_processor(kind: TinyVision, folder: Path, size: Mapping[str, Any]) -> None:
    """Write the settings of the stock processor."""
    if kind.tokens:  # as real checkpoints name them: attributes of the tokenizer
        file = folder / "tokenizer_config.json"
        written = json.loads(file.read_text())
        file.write_text(json.dumps(written | {"extra_special_tokens": kind.tokens}))
    images = {**kind.image_settings, **size.get("image", {})}
    get_image_processor_class_from_name(kind.image_processor)(**images).save_pretrained(folder)
    stated = {"processor_class": kind.processor, **kind.settings, **size.get("processor", {})}
    (folder / "processor_config.json").write_text(json.dumps(stated))
    if kind.video is not None:
        video = {"video_processor_type": kind.video}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
