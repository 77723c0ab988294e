"""Activations that are computed again in the backward pass instead of being kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from segcredit.models.lora import Lora


def recompute_activations(model: PreTrainedModel, lora: Lora | None = None) -> None:
    """Keep one state per layer; the rest is computed again when the gradient needs it.

    With the adapter of the forward pass, whichever is at work by then.
    """
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} cannot recompute activations. "
            f"Set memory.recompute_activations=false."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if lora is not None:
        settings["context_fn"] = lora.recomputing
    # transformers 5.23 renamed both the method and its keyword; the old names warn there
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = (
        model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    )
    enable(settings)


def recomputes(model: nn.Module) -> bool:
    """Whether a forward pass with gradients recomputes activations now."""
    return torch.is_grad_enabled() and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """transformers recomputes only in training mode, and then refuses to fill a cache.

    So the layers are in that mode during such a forward pass alone, and what they contain never:
    dropout stays off.
    """
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    active = layers if recomputes(model) else []
    for layer in active:
        layer.training = True
    try:
        yield
    finally:
        for layer in active:
            layer.training = False
