"""Tiny checkpoints of many architectures, as plain Hugging Face folders; nothing is downloaded.

Each folder holds what a real one holds: weights, configuration, tokenizer, chat template, and the
settings of the stock processor.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

from segcredit.data.worlds import make_world

HIDDEN, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2
TEMPLATE = """\
{%%- for message in messages -%%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%%- for part in message['content'] -%%}
{{- %r if part['type'] == 'image' else part['text'] -}}
{%%- endfor -%%}
{{- '<|im_end|>\\n' -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}
{{- '<|im_start|>assistant\\n' -}}
{%%- endif -%%}
"""
"""A template that reads messages in parts only, as those of most vision-language models."""


def text(**more: Any) -> dict[str, Any]:
    """The language model's settings, as far as the architectures agree."""
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        **more,
    }


def vision(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "initializer_range": 0.2,
        **more,
    }


@dataclass(frozen=True)
class TinyVision:
    """How a tiny vision-language model is made."""

    model_type: str
    config: Callable[[Callable[[str], int]], dict[str, Any]]
    """Settings of the configuration, from a function that returns a token's id."""
    processor: str
    image_processor: str
    """Class of the stock image processor that needs only Pillow."""
    image_settings: dict[str, Any]
    image: str
    """What the chat template writes for an image."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Special tokens that are attributes of the tokenizer."""
    others: tuple[str, ...] = ()
    """Further special tokens."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the processor."""
    video: str | None = None
    """Class of the stock video processor, which needs torchvision."""
    tower: str = "vision_tower"


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": list(sections),
        **more,
    }


PATCH, SIDE = 8, 32
"""Pixels of a patch, and of an image after resizing."""
SQUARE = {"height": SIDE, "width": SIDE}
GRIDS = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 4 * PATCH * PATCH, "longest_edge": 256 * PATCH * PATCH},
}
IDEFICS = {
    "size": {"longest_edge": 2 * SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "do_image_splitting": True,
}
IDEFICS_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
)
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "initializer_range": 0.1,  # larger weights amplify the rounding of the chunked recurrence
}
SMALL = {"image_size": SIDE, "patch_size": PATCH}


def idefics(model_type: str, image_processor: str, **more: Any) -> TinyVision:
    return TinyVision(
        model_type,
        lambda number: {
            "text_config": text(model_type="llama"),
            "vision_config": vision(**SMALL),
            "image_token_id": number("<image>"),
            "scale_factor": 2,
        },
        image_processor=image_processor,
        image_settings=IDEFICS,
        image="<image>",
        others=IDEFICS_TOKENS,
        settings={"image_seq_len": 4},
        tower="vision_model",
        **more,
    )


VISION_FAMILIES: dict[str, TinyVision] = {
    "internvl": TinyVision(
        "internvl",
        lambda number: {
            "text_config": text(model_type="qwen2"),
            "vision_config": vision(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH]),
            "image_token_id": number("<IMG_CONTEXT>"),
            "image_seq_length": 4,
        },
        "InternVLProcessor",
        "GotOcr2ImageProcessorPil",
        {"size": SQUARE, "crop_to_patches": True, "max_patches": 4},
        "<IMG_CONTEXT>\n",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        settings={"image_seq_length": 4},
        video="InternVLVideoProcessor",
    ),
    "gemma3": TinyVision(
        "gemma3",
        lambda number: {
            "text_config": text(
                sliding_window=8, layer_types=["sliding_attention", "full_attention"]
            ),
            "vision_config": vision(model_type="siglip_vision_model", **SMALL),
            "image_token_index": number("<image_soft_token>"),
            "boi_token_index": number("<start_of_image>"),
            "eoi_token_index": number("<end_of_image>"),
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
        },
        "Gemma3Processor",
        "Gemma3ImageProcessorPil",
        {"size": SQUARE},
        "<start_of_image>",
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        settings={"image_seq_length": 4},
    ),
    "gemma4": TinyVision(
        "gemma4",
        lambda number: {
            "text_config": text(
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
                hidden_size_per_layer_input=0,
                global_head_dim=HIDDEN // HEADS,
                use_bidirectional_attention="vision",
            ),
            "vision_config": vision(
                num_key_value_heads=HEADS,
                head_dim=HIDDEN // HEADS,
                patch_size=PATCH,
                position_embedding_size=64,
            ),
            "audio_config": None,
            "image_token_id": number("<|image|>"),
            "boi_token_id": number("<|image>"),
            "eoi_token_id": number("<image|>"),
            "video_token_id": number("<|video|>"),
            "audio_token_id": number("<|audio|>"),
            "boa_token_id": number("<|audio>"),
            "eoa_token_index": number("<audio|>"),
            "tie_word_embeddings": False,
        },
        "Gemma4Processor",
        "Gemma4ImageProcessorPil",
        {"patch_size": PATCH, "max_soft_tokens": 70},
        "<|image|>",
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        ("<|video|>",),
        settings={
            "image_seq_length": 70,
            "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
        },
        video="Gemma4VideoProcessor",
    ),
    "idefics3": idefics("idefics3", "Idefics3ImageProcessorPil", processor="Idefics3Processor"),
    "smolvlm": idefics(
        "smolvlm",
        "SmolVLMImageProcessorPil",
        processor="SmolVLMProcessor",
        tokens={
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
        video="SmolVLMVideoProcessor",
    ),
    "llava_onevision": TinyVision(
        "llava_onevision",
        lambda number: {
            "text_config": text(model_type="qwen2"),
            "vision_config": vision(
                model_type="siglip_vision_model", vision_use_head=False, **SMALL
            ),
            "image_token_index": number("<image>"),
            "video_token_index": number("<video>"),
            "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
            "vision_aspect_ratio": "anyres_max_9",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": False,
        },
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessorPil",
        {
            "size": SQUARE,
            "image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]],
        },
        "<image>\n",
        others=("<image>", "<video>"),
        settings={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        video="LlavaOnevisionVideoProcessor",
    ),
    "glm4v": TinyVision(
        "glm4v",
        lambda number: {
            "text_config": text(rope_parameters=mrope(1, 1, 2, partial_rotary_factor=1.0)),
            "vision_config": {
                "depth": 1,
                "hidden_size": HIDDEN,
                "intermediate_size": HIDDEN,
                "num_heads": HEADS,
                "out_hidden_size": HIDDEN,
                "initializer_range": 0.2,
                **SMALL,
            },
            "image_token_id": number("<|image|>"),
            "video_token_id": number("<|video|>"),
            "image_start_token_id": number("<|begin_of_image|>"),
            "image_end_token_id": number("<|end_of_image|>"),
            "video_start_token_id": number("<|begin_of_video|>"),
            "video_end_token_id": number("<|end_of_video|>"),
        },
        "Glm4vProcessor",
        "Glm4vImageProcessorPil",
        GRIDS | {"size": {"shortest_edge": 2 * 4 * 64, "longest_edge": 2 * 256 * 64}},
        "<|begin_of_image|><|image|><|end_of_image|>",
        {"image_token": "<|image|>", "video_token": "<|video|>"},
        ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        video="Glm4vVideoProcessor",
        tower="visual",
    ),
    "qwen3_5": TinyVision(
        "qwen3_5",
        lambda number: {
            "text_config": text(
                **LINEAR,
                rope_parameters=mrope(1, 1, 2, partial_rotary_factor=1.0, mrope_interleaved=True),
            ),
            "vision_config": {
                "depth": 1,
                "hidden_size": HIDDEN,
                "intermediate_size": HIDDEN,
                "num_heads": HEADS,
                "out_hidden_size": HIDDEN,
                "initializer_range": 0.2,
                "patch_size": PATCH,
                "num_position_embeddings": 16,
            },
            "image_token_id": number("<|image_pad|>"),
            "video_token_id": number("<|video_pad|>"),
            "vision_start_token_id": number("<|vision_start|>"),
            "vision_end_token_id": number("<|vision_end|>"),
        },
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessorPil",
        GRIDS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        video="Qwen3VLVideoProcessor",
        tower="visual",
    ),
    "fast_vlm": TinyVision(
        "fast_vlm",
        lambda number: {
            "text_config": text(model_type="llama"),
            "vision_config": {
                "model_type": "resnet",
                "embedding_size": 16,
                "hidden_sizes": [16, HIDDEN],
                "depths": [1, 1],
                "hidden_size": HIDDEN,
            },
            "image_token_index": number("<file_sep>"),
            "image_seq_length": 16,
        },
        "LlavaProcessor",
        "CLIPImageProcessorPil",
        {"size": SQUARE, "do_center_crop": False},
        "<file_sep>",
        {"image_token": "<file_sep>"},
        settings={"patch_size": PATCH, "vision_feature_select_strategy": "full"},
    ),
}


def tokenizer(kind: TinyVision | None, image: str = "") -> Any:
    """The words of shape_grid, and the special tokens of the family."""
    made = make_world("shape_grid").tokenizer()
    if kind is not None:
        made.add_special_tokens(
            {"additional_special_tokens": [*kind.others, *kind.tokens.values()]}
        )
        made.chat_template = TEMPLATE % kind.image
    return made


def save_vision(name: str, folder: Path, seed: int = 0) -> Path:
    """Make a tiny checkpoint of a vision-language family."""
    kind = VISION_FAMILIES[name]
    words = tokenizer(kind)
    settings = kind.config(words.convert_tokens_to_ids)
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    settings["text_config"] |= {"vocab_size": len(words), **ends}
    config = AutoConfig.for_model(kind.model_type, **settings)
    save_model(AutoModelForImageTextToText, config, folder, seed, words)
    words.save_pretrained(folder)
    if kind.tokens:  # as real checkpoints name them: attributes of the tokenizer
        file = folder / "tokenizer_config.json"
        written = json.loads(file.read_text())
        file.write_text(json.dumps(written | {"extra_special_tokens": kind.tokens}))
    get_image_processor_class_from_name(kind.image_processor)(
        **kind.image_settings
    ).save_pretrained(folder)
    stated = {"processor_class": kind.processor, **kind.settings}
    (folder / "processor_config.json").write_text(json.dumps(stated))
    if kind.video is not None:
        video = {"video_processor_type": kind.video}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    return folder


def save_model(auto: Any, config: Any, folder: Path, seed: int, words: Any) -> None:
    """Save random weights, with attention far from uniform: mistakes in positions show."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, x in model.named_parameters():
                if "q_proj" in key or "k_proj" in key:
                    x *= 2.0
                elif key.endswith("bias"):
                    x += 0.1 * torch.randn(x.shape)
    # several end tokens, so that many responses end
    model.generation_config.eos_token_id = [words.eos_token_id, *range(20, 26)]
    model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)


TEXT_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": text(),
    "qwen2": text(),
    "qwen3": text(),
    "gemma3_text": text(
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
    ),
    "qwen3_moe": text(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "mixtral": text(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_next": text(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **LINEAR,
    ),
    "qwen3_5_text": text(
        **LINEAR,
    ),
    "falcon_h1": text(
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
}


def save_text(name: str, folder: Path, seed: int = 0) -> Path:
    """Make a tiny checkpoint of a causal language model."""
    words = tokenizer(None)
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = AutoConfig.for_model(name, **TEXT_FAMILIES[name], vocab_size=len(words), **ends)
    save_model(AutoModelForCausalLM, config, folder, seed, words)
    words.save_pretrained(folder)
    return folder


def require(name: str) -> None:
    """Skip the test if the installed packages do not have what the family needs."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {name}")
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="transformers' processor of SmolVLM needs it")
    if name in VISION_FAMILIES:
        try:
            get_image_processor_class_from_name(VISION_FAMILIES[name].image_processor)()
        except ImportError as error:
            pytest.skip(f"{name}: {' '.join(str(error).split())[:80]}")
