"""Sizes of a model that determine memory and time, read from its configuration alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from segcredit.config import LoraSettings, Optimize, Recipe, WarmStart
from segcredit.printable import printable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from segcredit.models import Family


@dataclass(frozen=True)
class Tower:
    """Sizes of a Qwen-VL vision tower: blocks over patches, then patches merged into tokens."""

    parameters: int
    depth: int
    hidden: int
    intermediate: int
    head_width: int
    pixels: int
    """Numbers per patch."""
    merge: int
    """Patches merged into one token."""
    patch_side: int
    patch_weights: int
    """Matrix weights applied to each patch."""
    token_weights: int
    """Matrix weights applied to each merged token."""

    @property
    def token_pixels(self) -> int:
        """Image pixels per token."""
        return self.patch_side**2 * self.merge


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    kind: str
    """Name of its class."""
    parameters: int
    trunk_parameters: int
    """Without an untied language-model head: the part a critic copies."""
    layer_parameters: int
    """Parameters of all text layers."""
    layer_weights: int
    """Matrix weights of all text layers, each applied to every token."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    """Whether the head shares the embedding's weights."""
    head_norms: bool
    """Whether queries and keys are normalized (Qwen3)."""
    full_attention: bool
    """Whether every layer attends to all earlier tokens."""
    tower: Tower | None
    sizes: tuple[tuple[int, bool], ...]
    """Number of elements of each parameter, and whether it belongs to the vision tower."""
    linears: tuple[tuple[str, int, int], ...] = ()
    """Name, input and output width of each linear layer except the head."""
    family: "Family | None" = field(default=None, compare=False)
    """Model family; None: a text model."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_width

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def tower_parameters(self) -> int:
        """Parameters of the vision tower; 0 without one."""
        return self.tower.parameters if self.tower else 0

    @property
    def critic_parameters(self) -> int:
        """Parameters of the trunk and its value head."""
        return self.trunk_parameters + self.hidden + 1


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(
    config: "PreTrainedConfig", trust_remote_code: bool = False, family_name: str | None = None
) -> Shape:
    """Count a model's sizes exactly by building it on torch's meta device."""
    from segcredit.models import find_family
    from segcredit.models.lora import linear_layers

    family = find_family(config, family_name)
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in _EXPERTS):
        raise ValueError(
            f"{config.model_type} is a mixture of experts, which the plan does not support: its "
            f"prediction would be far off. Measure a short run instead: stages.0.steps=2."
        )
    model: Any = _build(config, family, trust_remote_code)
    layers = _layers(model, family, vision=False)
    head = model.get_output_embeddings()
    heads = getattr(text, "num_attention_heads", None)
    if not layers or head is None or not heads:
        raise ValueError(
            f"{type(model).__name__} has no attention layers and head where the plan looks for "
            f"them; it supports the causal language models of transformers, and Qwen-VL."
        )
    kinds = getattr(text, "layer_types", None) or ()
    return Shape(
        kind=type(model).__name__,
        parameters=_count(model.parameters()),
        trunk_parameters=_count(model.base_model.parameters()),
        layer_parameters=sum(_count(x.parameters()) for x in layers),
        layer_weights=sum(_count(x.parameters(), matrices=True) for x in layers),
        layers=len(layers),
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_width=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=head.weight.shape[0],
        tied=head.weight is model.get_input_embeddings().weight,
        head_norms=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        full_attention=all(kind == "full_attention" for kind in kinds),
        tower=_tower(config, model, family),
        sizes=tuple(
            (x.numel(), family.in_vision_tower(name)) for name, x in model.named_parameters()
        ),
        linears=tuple(
            (name, x.in_features, x.out_features) for name, x in linear_layers(model).items()
        ),
        family=family,
    )


def _build(config: "PreTrainedConfig", family: "Family", trust_remote_code: bool) -> "nn.Module":
    from segcredit.models.loading import empty_model

    try:
        return empty_model(config, family, trust_remote_code, attn_implementation="eager")
    except Exception as error:  # a model's own code may raise anything
        why = printable(" ".join(str(error).split()) or type(error).__name__, 200)
        raise ValueError(f"model: {config.model_type} cannot be built: {why}") from None


def _count(parameters: "Iterable[nn.Parameter]", matrices: bool = False) -> int:
    """Count elements; with ``matrices`` those of matrices only."""
    return sum(x.numel() for x in parameters if x.ndim >= 2 or not matrices)


def _layers(model: "nn.Module", family: "Family", vision: bool) -> "list[nn.Module]":
    """Find layers that support gradient checkpointing, in the vision tower or text model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        part
        for name, part in model.named_modules()
        if isinstance(part, GradientCheckpointingLayer) and family.in_vision_tower(name) == vision
    ]


def _tower(config: Any, model: "nn.Module", family: "Family") -> Tower | None:
    from segcredit.models import QwenVL

    if not family.reads_images:
        return None
    vision = config.vision_config
    named = [(name, x) for name, x in model.named_parameters() if family.in_vision_tower(name)]
    blocks: list[Any] = _layers(model, family, vision=True)
    if not named or not blocks or not isinstance(family, QwenVL):
        raise ValueError(
            f"{type(model).__name__} has a vision tower that the plan does not support; it "
            f"supports those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Measure a short run instead: "
            f"stages.0.steps=2."
        )
    hidden = blocks[0].norm1.weight.numel()
    embedding = [x for name, x in named if ".patch_embed." in name]
    mergers = [x for name, x in named if "merger" in name]
    return Tower(
        parameters=_count(x for _, x in named),
        depth=len(blocks),
        hidden=hidden,
        intermediate=max(x.shape[0] for x in blocks[0].mlp.parameters() if x.ndim == 2),
        head_width=hidden // vision.num_heads,
        pixels=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        merge=vision.spatial_merge_size**2,
        patch_side=vision.patch_size,
        patch_weights=_count(embedding, matrices=True)
        + sum(_count(x.parameters(), matrices=True) for x in blocks),
        token_weights=_count(mergers, matrices=True),
    )


@dataclass(frozen=True)
class Adapter:
    """Sizes of one LoRA adapter; policy and critic have one each."""

    sizes: tuple[int, ...]
    """Elements of each matrix."""
    text: int
    """Elements of the matrices in text layers."""
    inner: int
    """Numbers per token between A and B, over all text layers."""
    outputs: int
    """Output widths of the adapted text layers, summed."""
    vision: bool
    """Whether the vision tower is adapted."""
    reference: bool = False
    """Whether π_ref is a third adapter (after a warm start); else it is the model without one."""

    @property
    def numbers(self) -> int:
        return sum(self.sizes)


def adapter_of(recipe: Recipe, shape: Shape) -> Adapter | None:
    """Compute the sizes of the recipe's LoRA adapter on this model; None without LoRA."""
    settings = recipe.model.lora
    if settings is None:
        return None
    kinds = [type(stage) for stage in recipe.stages]
    before = kinds[: kinds.index(Optimize)] if Optimize in kinds else kinds
    return adapter_on(shape, settings, not recipe.model.freeze_vision, WarmStart in before)


def adapter_on(
    shape: Shape, settings: LoraSettings, vision: bool = True, reference: bool = False
) -> Adapter:
    """Compute the sizes of an adapter with these settings on this model."""
    from segcredit.models import Family
    from segcredit.models.lora import choose_layers

    family = shape.family or Family()
    widths = {name: (wide, out) for name, wide, out in shape.linears}
    chosen = choose_layers(widths, settings.targets, family, vision)
    text = [name for name in chosen if not family.in_vision_tower(name)]
    return Adapter(
        sizes=tuple(settings.rank * width for name in chosen for width in widths[name]),
        text=sum(settings.rank * sum(widths[name]) for name in text),
        inner=settings.rank * len(text),
        outputs=sum(widths[name][1] for name in text),
        vision=len(text) < len(chosen),
        reference=reference,
    )


def config_of(recipe: Recipe) -> "PreTrainedConfig":
    """Load the configuration of the recipe's model."""
    settings = recipe.model
    if settings.path is None:
        from segcredit.data.worlds import make_world
        from segcredit.models import tiny_config

        assert settings.tiny is not None
        assert recipe.data.world is not None
        tokenizer = make_world(recipe.data.world, **recipe.data.settings).tokenizer()
        return tiny_config(settings.tiny, tokenizer, **settings.sizes, family=settings.family)
    from segcredit.models import ModelError
    from segcredit.models.loading import load_config

    try:
        return load_config(settings.path, settings.trust_remote_code, settings.family)[1]
    except ModelError as error:
        raise ValueError(
            f"model.path: {error} A plan reads only the model's config.json, a few kB: put it in "
            f"a folder of its own and set model.path=FOLDER."
        ) from None
