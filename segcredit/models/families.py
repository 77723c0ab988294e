"""Model families: every fact that differs between architectures, in one object per family.

A family defines which models belong to it, where their parts are, how they process images, and how
a small model of the same architecture is made for tests. A text model needs no family of its own:
:class:`Family` describes every causal language model of transformers. To train a vision-language
model that is not listed in :data:`FAMILIES`, write a subclass of :class:`VisionFamily` and name it
in the recipe: ``model.family: my_family.py:MyFamily`` (docs/extending.md).
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3VLConfig,
)
from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import is_torchvision_available

from segcredit.registry import Registry, nearest

HIDDEN, LAYERS, HEADS = 96, 2, 4
ROPE_THETA = 100.0
"""Base of the rotary frequencies of tiny models: sequences are short, so a large base has no
benefit."""
INIT = 0.08
"""Standard deviation of the initial weights. A narrow, shallow model learns much faster with it
than with the usual 0.02."""
VISION_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")
"""Names by which transformers finds a vision tower."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Inputs with one number per token that some models read: 1 at image tokens."""
PIXELS = "pixel_values"
"""Name of the image tensor in the inputs of every vision-language model of transformers."""


@dataclass(frozen=True)
class TinySizes:
    """Sizes of a tiny model."""

    hidden: int = HIDDEN
    layers: int = LAYERS
    heads: int = HEADS
    kv_heads: int | None = None
    """Number of key-value heads; None: half as many as heads, or as many if that is odd."""
    vision_layers: int = 1

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden // self.heads

    @property
    def init_std(self) -> float:
        """Standard deviation of the initial weights, smaller for wider layers."""
        return INIT * min(1.0, (HIDDEN / self.hidden) ** 0.5)

    def text_settings(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the settings that the configurations of Llama, Qwen and their relatives share."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads // (1 if self.heads % 2 else 2),
            "max_position_embeddings": 4096,
            "initializer_range": self.init_std,
            "tie_word_embeddings": False,
            "vocab_size": len(tokenizer),
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }


class Family:
    """A causal language model of transformers, of any architecture; base class of all families."""

    name: str = "text"
    """Name in recipes, as in ``model.tiny``."""
    model_types: tuple[str, ...] = ()
    """Values of ``model_type`` in config.json; empty: any."""
    auto_class: Any = AutoModelForCausalLM
    """Class by which transformers loads the model."""
    vision_tower: str | None = None
    """Name of the vision tower's module, wherever it is in the model; None: reads text only."""
    position_planes: int = 1
    """Rows of rotary positions: 1, or 3 (time, height, width) for M-RoPE."""
    packing: bool = True
    """Whether the model can read several sequences packed into one row."""

    @property
    def reads_images(self) -> bool:
        """Whether the model has a vision tower."""
        return self.vision_tower is not None

    def planes(self, config: PreTrainedConfig) -> int:
        """Return the number of rows of rotary positions: 1, or more with M-RoPE."""
        return self.position_planes

    def trunk(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return everything below the language-model head, which a critic copies."""
        return model.base_model

    def head(self, model: PreTrainedModel) -> Any:
        """Return the language-model head, a linear layer."""
        return model.get_output_embeddings()

    def in_vision_tower(self, name: str) -> bool:
        """Whether the module or parameter of that name belongs to the vision tower."""
        return self.vision_tower is not None and self.vision_tower in name.split(".")

    def vision_towers(self, model: nn.Module) -> list[nn.Module]:
        """Return the vision tower in a list, which is empty for a text model."""
        return [x for name, x in model.named_modules() if name.split(".")[-1] == self.vision_tower]

    def positions(
        self, model: PreTrainedModel, tokens: Tensor, images: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the rotary positions of a prompt, (position_planes, tokens)."""
        return torch.arange(len(tokens)).expand(self.position_planes, -1)

    def blank_image_sum(self, model: nn.Module) -> Tensor:
        """Sum of the vision tower's outputs for a blank image; 0 for a text model.

        Sharded models need it: every rank must run the vision tower, even without images.
        """
        return torch.zeros(())

    def tiny_config(self, tokenizer: PreTrainedTokenizerBase, sizes: TinySizes) -> PreTrainedConfig:
        """Make the configuration of a tiny model of the same architecture, for tests and demos."""
        raise ValueError(f"the family {self.name!r} has no tiny model. Set model.path instead.")


class Llama(Family):
    """Llama, Llama 2 and 3, and models with their architecture."""

    name = "llama"
    model_types = ("llama",)
    config_class: type[PreTrainedConfig] = LlamaConfig

    def tiny_config(self, tokenizer: PreTrainedTokenizerBase, sizes: TinySizes) -> PreTrainedConfig:
        """Make the configuration of a tiny model."""
        rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
        return self.config_class(**sizes.text_settings(tokenizer), rope_parameters=rope)


class Qwen2(Llama):
    """Qwen2 and Qwen2.5."""

    name = "qwen2"
    model_types = ("qwen2",)
    config_class = Qwen2Config


class VisionFamily(Family):
    """A vision-language model that transformers loads by AutoModelForImageTextToText.

    The defaults describe a model with plain text positions that reads ``pixel_values`` alone. A
    subclass must at least set the names and implement :meth:`count_image_tokens`.
    """

    auto_class = AutoModelForImageTextToText
    vision_tower = "vision_tower"
    packing = False
    image_token: str = "<image>"
    """Placeholder in the rendered prompt, repeated once per image token. If the tokenizer names an
    ``image_token``, that one is used."""
    prompt_only_tokens: tuple[str, ...] = ()
    """Additional tokens that may occur only in prompts. The policy never samples them or
    ``image_token``:
    a response with one could not be scored."""
    image_inputs: tuple[str, ...] = (PIXELS,)
    """Outputs of the image processor that the model reads."""
    layout_inputs: tuple[str, ...] | None = ()
    """The ``image_inputs`` that determine rotary positions, with the places of image tokens; None:
    unknown, so positions are computed for every prompt."""
    image_processor_class: str = ""
    """Image processor that needs only Pillow, for machines without torchvision."""

    def load_image_processor(self, source: str | Path, trust_remote_code: bool = False) -> Any:
        """Load the stock image processor or, without torchvision, its Pillow version."""
        if is_torchvision_available() or not self.image_processor_class:
            return AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        return get_image_processor_class_from_name(self.image_processor_class).from_pretrained(
            source
        )

    def tiny_image_processor(self, config: PreTrainedConfig) -> Any:
        """Make the image processor of a tiny model."""
        raise ValueError(
            f"the family {self.name!r} has no image processor for tiny models. Set model.path."
        )

    def image_token_id(self, config: PreTrainedConfig) -> int:
        """Return the id of the image token."""
        number = getattr(config, "image_token_id", None)
        return int(config.image_token_index if number is None else number)

    def count_image_tokens(self, processor: Any, images: Mapping[str, Tensor]) -> list[int]:
        """Count each image's tokens from the image processor's outputs."""
        raise NotImplementedError(f"{type(self).__name__} must implement count_image_tokens.")

    def image_tokens_for_size(self, processor: Any, width: int, height: int) -> int | None:
        """Count the tokens of an image of this size; None if only processing the image can tell."""
        return None

    def rows_per_image(self, images: Mapping[str, Tensor]) -> Tensor | None:
        """Return how many rows of ``pixel_values`` each image has; None if each has one."""
        return None

    def blank_image_sum(self, model: nn.Module) -> Tensor:
        """Sum of the vision tower's outputs for a blank image."""
        if not self.vision_towers(model):
            return torch.zeros(())
        raise ValueError(
            f"memory.shard: the family {self.name!r} does not implement blank_image_sum, which "
            f"sharded models need. Set memory.shard=false."
        )


class GeneralVision(VisionFamily):
    """Any other model of AutoModelForImageTextToText, read by its stock processor.

    Batches are padded and positions come from the model's own function. ProcessorCodec encodes
    prompts (models/general.py). Subclasses are models that tests cover.
    """

    name = "general"
    layout_inputs = None

    def planes(self, config: PreTrainedConfig) -> int:
        """Return 1, or the sections of M-RoPE."""
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        return len(rope.get("mrope_section") or (1,))

    def in_vision_tower(self, name: str) -> bool:
        """Whether the module or parameter of that name belongs to the vision tower."""
        return not set(VISION_TOWERS).isdisjoint(name.split("."))

    def vision_towers(self, model: nn.Module) -> list[nn.Module]:
        """Return the vision tower, by the names that transformers uses."""
        return [
            part
            for name, part in model.named_modules()
            if name.split(".")[-1] in VISION_TOWERS
            and not self.in_vision_tower(name.rpartition(".")[0])
        ]

    def positions(
        self, model: PreTrainedModel, tokens: Tensor, images: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute the positions of a prompt with the model's own function, if it has one."""
        planes = self.planes(model.config)
        own = [x for x in model.modules() if hasattr(x, "get_rope_index")]
        if not own:
            if planes > 1:
                raise ValueError(
                    f"{type(model).__name__} has {planes} rows of rotary positions, but no "
                    f"get_rope_index that computes them. Write a model family for it "
                    f"(docs/models.md)."
                )
            return torch.arange(len(tokens))[None]
        function: Any = own[-1].get_rope_index
        is_image = (tokens == self.image_token_id(model.config)).long()
        given = {"input_ids": tokens[None], "mm_token_type_ids": is_image[None], **images}
        accepted = inspect.signature(function).parameters
        found: Tensor = function(**{name: x for name, x in given.items() if name in accepted})[0]
        if found.shape != (planes, 1, len(tokens)):
            raise ValueError(
                f"{type(model).__name__}: get_rope_index returned positions of shape "
                f"{tuple(found.shape)}; expected ({planes}, 1, {len(tokens)}). Write a model "
                f"family for it (docs/models.md)."
            )
        return found[:, 0]


class InternVL(GeneralVision):
    """InternVL 2.5, 3 and 3.5, in transformers' own format."""

    name = "internvl"
    model_types = ("internvl",)
    packing = True


class Idefics3(GeneralVision):
    """Idefics3, SmolVLM and SmolVLM2."""

    name = "idefics3"
    model_types = ("idefics3", "smolvlm")
    packing = True


class LlavaOneVision(GeneralVision):
    """LLaVA-OneVision."""

    name = "llava_onevision"
    model_types = ("llava_onevision",)
    packing = True


class Glm4V(GeneralVision):
    """GLM-4.1V, dense."""

    name = "glm4v"
    model_types = ("glm4v",)
    packing = True


class Gemma3(GeneralVision):
    """Gemma 3 and 4: sliding windows, and attention in both directions within an image."""

    name = "gemma3"
    model_types = ("gemma3", "gemma4")


class Qwen3_5(GeneralVision):  # noqa: N801
    """Qwen3.5 with images, dense: layers of linear attention between those of full attention."""

    name = "qwen3_5"
    model_types = ("qwen3_5",)


class QwenVL(VisionFamily):
    """Qwen2-VL and its successors: images of any size, M-RoPE, patches merged two by two."""

    name = "qwen2_vl"
    model_types: tuple[str, ...] = ("qwen2_vl",)
    vision_tower = "visual"
    position_planes = 3
    packing = True
    image_token = "<|image_pad|>"
    prompt_only_tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    image_inputs = (PIXELS, "image_grid_thw")
    layout_inputs = ("image_grid_thw",)
    image_processor_class = "Qwen2VLImageProcessorPil"

    def tiny_image_processor(self, config: PreTrainedConfig) -> Any:
        """Make an image processor that keeps images whose sides are multiples of a token's side."""
        vision = config.vision_config
        side = vision.patch_size * vision.spatial_merge_size
        return get_image_processor_class_from_name(self.image_processor_class)(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            size={"shortest_edge": side * side, "longest_edge": 1280 * side * side},
        )

    def count_image_tokens(self, processor: Any, images: Mapping[str, Tensor]) -> list[int]:
        """Count each image's merged patches."""
        grids = images["image_grid_thw"]
        counts: list[int] = (grids.prod(dim=1) // processor.merge_size**2).tolist()
        return counts

    def image_tokens_for_size(self, processor: Any, width: int, height: int) -> int | None:
        """Count an image's tokens by the processor's rule.

        None if the processor has no such rule or does not resize images.
        """
        rule = getattr(processor, "get_number_of_image_patches", None)
        if rule is None or not getattr(processor, "do_resize", True):
            return None
        patches = int(rule(height, width, {}))
        # the processor mistakes fewer than 4 rows for color channels, so it must see the image
        return None if min(width, height) < 4 else patches // processor.merge_size**2

    def rows_per_image(self, images: Mapping[str, Tensor]) -> Tensor | None:
        """Return the number of patches of each image."""
        return images["image_grid_thw"].prod(-1)

    def positions(
        self, model: PreTrainedModel, tokens: Tensor, images: Mapping[str, Tensor]
    ) -> Tensor:
        """Compute M-RoPE positions with the model's own function: 2-D for images, 1-D for text."""
        is_image = tokens == self.image_token_id(model.config)
        trunk: Any = model.model
        # all by name: the order of the parameters differs between releases of transformers
        positions, _ = trunk.get_rope_index(
            input_ids=tokens[None],
            mm_token_type_ids=is_image[None].long(),
            image_grid_thw=images["image_grid_thw"],
        )
        found: Tensor = positions[:, 0]
        return found

    def blank_image_sum(self, model: nn.Module) -> Tensor:
        """Sum of the vision tower's outputs for the smallest possible image."""
        towers: list[Any] = self.vision_towers(model)
        if not towers:
            return torch.zeros(())
        tower = towers[0]
        side = tower.spatial_merge_size
        patch = tower.patch_embed.proj.weight
        pixels = patch.new_zeros(side * side, patch[0].numel())
        grid = torch.tensor([[1, side, side]], device=patch.device)
        outputs = tree_leaves(dict(tower(pixels, grid_thw=grid, return_dict=True)))
        return torch.stack([x.sum() for x in outputs if isinstance(x, Tensor)]).sum()

    def tiny_vl_config(
        self,
        config_class: type[PreTrainedConfig],
        tokenizer: PreTrainedTokenizerBase,
        sizes: TinySizes,
        rope: Mapping[str, Any],
        vision: Mapping[str, Any],
    ) -> PreTrainedConfig:
        """Make a tiny model's configuration, with the settings specific to its architecture."""
        text = sizes.text_settings(tokenizer)
        tied = text.pop("tie_word_embeddings")
        # half of a head's rotations, in Qwen2.5-VL's proportion of time, height and width (2:3:3)
        half = sizes.head_dim // 2
        side = 3 * half // 8
        text |= {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "mrope_section": [half - 2 * side, side, side],
                **rope,
            },
            "head_dim": sizes.head_dim,
        }
        names = {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }
        return config_class(
            text_config=text,
            vision_config={
                "depth": sizes.vision_layers,
                "hidden_size": sizes.hidden,
                "intermediate_size": 2 * sizes.hidden,
                "num_heads": sizes.heads,
                "out_hidden_size": sizes.hidden,
                "initializer_range": sizes.init_std,
                **vision,
            },
            tie_word_embeddings=tied,
            **{key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()},
        )


class Qwen2_5VL(QwenVL):  # noqa: N801
    """Qwen2.5-VL: 14-pixel patches, so one token per 28 × 28 pixels."""

    name = "qwen2_5_vl"
    model_types = ("qwen2_5_vl",)

    def tiny_config(self, tokenizer: PreTrainedTokenizerBase, sizes: TinySizes) -> PreTrainedConfig:
        """Make a tiny model's configuration; without attention windows, as its images are small."""
        vision = {"fullatt_block_indexes": list(range(sizes.vision_layers))}
        return self.tiny_vl_config(Qwen2_5_VLConfig, tokenizer, sizes, {}, vision)


class Qwen3VL(QwenVL):
    """Qwen3-VL, dense and mixture of experts: 16-pixel patches, one token per 32 × 32 pixels."""

    name = "qwen3_vl"
    model_types = ("qwen3_vl", "qwen3_vl_moe")

    def tiny_config(self, tokenizer: PreTrainedTokenizerBase, sizes: TinySizes) -> PreTrainedConfig:
        """Make the configuration of a tiny dense model."""
        # as in real checkpoints; transformers knows it from the architecture, vLLM reads it
        rope = {"mrope_interleaved": True}
        vision = {"num_position_embeddings": 16 * 16, "deepstack_visual_indexes": [0]}
        return self.tiny_vl_config(Qwen3VLConfig, tokenizer, sizes, rope, vision)


FAMILIES: Registry[type[Family]] = Registry(
    "model family",
    {
        x.name: x
        for x in (
            *(Qwen2, Llama, Qwen2_5VL, Qwen3VL, QwenVL),
            *(Qwen3_5, InternVL, Gemma3, Idefics3, LlavaOneVision, Glm4V, GeneralVision, Family),
        )
    },
    plural="model families",
)
"""The families by name; ``FAMILIES["file.py:Name"]`` loads one of your own."""
TINY = ("qwen2", "llama", "qwen2_5_vl", "qwen3_vl")
"""Families with a tiny configuration."""


def find_family(config: PreTrainedConfig, name: str | None = None) -> Family:
    """Return the family of that name; without a name, the one that lists the ``model_type``.

    A model that no family lists is a text model, or is read by its stock processor if it takes
    images.
    """
    if name is not None:
        return named_family(name)
    for kind in FAMILIES.values():
        if config.model_type in kind.model_types:
            return kind()
    return GeneralVision() if takes_images(config) else Family()


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether a configuration is that of a vision-language model."""
    if getattr(config, "vision_config", None) is not None:
        return True
    kind = config.model_type
    texts, images = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return kind in images and kind not in texts


def named_family(name: str) -> Family:
    """Return the family with a registry name, or from ``file.py:Name``."""
    kind: Any = FAMILIES[name]
    if not (isinstance(kind, type) and issubclass(kind, Family)):
        raise ValueError(
            f"expected a subclass of segcredit.models.Family or VisionFamily; got {name} = {kind!r}"
        )
    return kind()


def tiny_config(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    hidden: int = HIDDEN,
    layers: int = LAYERS,
    heads: int = HEADS,
    kv_heads: int | None = None,
    vision_layers: int = 1,
    family: str | None = None,
) -> PreTrainedConfig:
    """Make the configuration of a family's tiny model; ``family`` names one of your own."""
    own = None if family is None else named_family(family)
    known = TINY if own is None else (own.name,)
    if name not in known:
        hint = nearest(name.replace(".", "_"), known)
        raise ValueError(f"no tiny model {name!r}.{hint} There are: {', '.join(known)}.")
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
    sizes = TinySizes(hidden, layers, heads, kv_heads, vision_layers)
    return (own or named_family(name)).tiny_config(tokenizer, sizes)
