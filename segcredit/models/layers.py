"""RMS norms as one kernel each: written out they are eight, and small models wait for kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from segcredit.models.lora import Lora

CLOSE = 1e-5
"""Largest difference between the two ways in float32, of numbers around 1."""


class _Fused(nn.Module):
    """Before a norm's own class in its line of classes."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            said: Tensor = super().forward(x)
            return said
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _fused(plain: Any) -> Any:
    """One class for all norms of a kind: torch.compile compiles layers of equal classes once."""
    return type(f"Fused{plain.__name__}", (_Fused, plain), {})


def fuse_norms(model: nn.Module) -> int:
    """Have torch's own kernel compute the model's norms w · x / √(mean(x²) + ε); how many it does.

    In half precision it rounds once, at the end; written out, x is rounded before it is multiplied.
    """
    norms = [x for x in model.modules() if _is_norm(x)]
    for norm in norms:
        plain: Any = type(norm)
        norm.__class__ = _fused(plain)
    return len(norms)


def _is_norm(module: Any) -> bool:
    """Whether it is such a norm: by its name and parts, and by what it says.

    Others carry the name, too: Gemma's multiplies by 1 + w.
    """
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    if not named or not isinstance(weight, Tensor) or isinstance(module, _Fused):
        return False
    with torch.no_grad():
        x = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device)
        w = torch.linspace(0.5, 1.5, weight.numel(), device=weight.device)
        kept, weight.data = weight.data, w
        try:
            said = module(x)
        finally:
            weight.data = kept
        expected = rms_norm(x, w.shape, w, module.variance_epsilon)
    return said.shape == expected.shape and float((said - expected).abs().max()) < CLOSE


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Have the model's layers compiled when first used without a cache; how many there are.

    Once for all layers of a kind, for any number of tokens. Attention stays as it is: it is one
    kernel already. With a cache, which grows by every token sampled, each length would be compiled
    anew; so that is left alone. Arguments alone decide, since a recomputed layer must do in the
    backward pass what it did in the forward pass.
    """
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    for layer in layers:
        layer._compiled_call_impl = _without_cache(layer, backend)
    return len(layers)


def _without_cache(layer: Any, backend: str) -> Any:
    plain = layer._call_impl
    compiled = torch.compile(plain, dynamic=True, backend=backend)

    def call(*args: Any, **given: Any) -> Any:
        cached = given.get("past_key_values") is not None
        return (plain if cached else compiled)(*args, **given)

    return call


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
