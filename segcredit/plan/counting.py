"""A model's sizes from its configuration: built without memory for weights, and counted."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from segcredit.plan.shape import Shape, Tower
from segcredit.printable import printable

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def shape_of(config: "PreTrainedConfig", trust_remote_code: bool = False) -> Shape:
    """Exact: the classes of transformers are made on torch's meta device."""
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in _EXPERTS):
        raise ValueError(
            f"{config.model_type} is a mixture of experts; the plan knows dense models, and would "
            f"be wrong by a multiple. Measure a short run instead: stages.0.steps=2."
        )
    from segcredit.models.targets import linear_layers

    model: Any = _built(config, trust_remote_code)
    layers = _layers(model, vision=False)
    head = model.get_output_embeddings()
    heads = getattr(text, "num_attention_heads", None)
    if not layers or head is None or not heads:
        raise ValueError(
            f"{type(model).__name__} has no attention layers and head where the plan looks for "
            f"them; it knows the causal language models of transformers, and Qwen-VL."
        )
    kinds = getattr(text, "layer_types", None) or ()
    return Shape(
        kind=type(model).__name__,
        parameters=_count(model.parameters()),
        trunk_parameters=_count(model.base_model.parameters()),
        layer_parameters=sum(_count(x.parameters()) for x in layers),
        layer_weights=sum(_count(x.parameters(), factors=True) for x in layers),
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
        tower=_tower(config, model),
        sizes=tuple((x.numel(), _in_tower(name)) for name, x in model.named_parameters()),
        linears=tuple(
            (name, x.in_features, x.out_features) for name, x in linear_layers(model).items()
        ),
    )


def _built(config: "PreTrainedConfig", trust_remote_code: bool) -> "nn.Module":
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    vision = getattr(config, "vision_config", None) is not None
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return kind.from_config(
                config, trust_remote_code=trust_remote_code, attn_implementation="eager"
            )
    except Exception as error:  # a model's own code may raise anything
        why = printable(" ".join(str(error).split()) or type(error).__name__, 200)
        raise ValueError(f"model: {config.model_type} cannot be built: {why}") from None


def _count(parameters: "Iterable[nn.Parameter]", factors: bool = False) -> int:
    """How many numbers; ``factors``: only those of matrices, which multiply."""
    return sum(x.numel() for x in parameters if x.ndim >= 2 or not factors)


def _in_tower(name: str) -> bool:
    return "visual" in name.split(".")


def _layers(model: "nn.Module", vision: bool) -> "list[nn.Module]":
    """The layers whose activations can be computed again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        part
        for name, part in model.named_modules()
        if isinstance(part, GradientCheckpointingLayer) and _in_tower(name) == vision
    ]


def _tower(config: Any, model: "nn.Module") -> Tower | None:
    """The vision tower of a Qwen-VL."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    named = [(name, x) for name, x in model.named_parameters() if _in_tower(name)]
    blocks: list[Any] = _layers(model, vision=True)
    if not named or not blocks:
        raise ValueError(
            f"{type(model).__name__} has a vision tower that the plan does not know; it knows "
            f"those of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."
        )
    hidden = blocks[0].norm1.weight.numel()
    merge = vision.spatial_merge_size**2
    first = [x for name, x in named if ".patch_embed." in name]
    mergers = [x for name, x in named if "merger" in name]
    wide = max(x.shape[0] for x in blocks[0].mlp.parameters() if x.ndim == 2)
    return Tower(
        parameters=_count(x for _, x in named),
        depth=len(blocks),
        hidden=hidden,
        intermediate=wide,
        head_width=hidden // vision.num_heads,
        pixels=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        merge=merge,
        patch_side=vision.patch_size,
        patch_weights=_count(first, factors=True)
        + sum(_count(x.parameters(), factors=True) for x in blocks),
        token_weights=_count(mergers, factors=True),
    )
