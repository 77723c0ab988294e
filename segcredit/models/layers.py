"""Faster and smaller layers: fused RMS norms, compilation, recomputed activations."""

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
"""Maximum difference between fused and original norm in float32, for values around 1."""


class _FusedNorm(nn.Module):
    """Mixin that precedes a norm's own class in the method resolution order."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            output: Tensor = super().forward(x)
            return output
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _fused_class(plain: Any) -> Any:
    """Make one class per kind of norm: torch.compile compiles layers of equal classes once."""
    return type(f"Fused{plain.__name__}", (_FusedNorm, plain), {})


def fuse_norms(model: nn.Module) -> int:
    """Fuse the model's RMS norms w · x / √(mean(x²) + ε) into one kernel each; return how many.

    transformers' version launches eight kernels, which dominates the time of small models. In half
    precision the fused kernel rounds once, at the end; transformers also rounds x before it.
    """
    norms = [x for x in model.modules() if _is_norm(x)]
    for norm in norms:
        plain: Any = type(norm)
        norm.__class__ = _fused_class(plain)
    return len(norms)


def _is_norm(module: Any) -> bool:
    """Whether a module is such a norm, by its name and by its output.

    The name is not enough: Gemma's norm multiplies by 1 + w.
    """
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    if not named or not isinstance(weight, Tensor) or isinstance(module, _FusedNorm):
        return False
    with torch.no_grad():
        x = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device)
        w = torch.linspace(0.5, 1.5, weight.numel(), device=weight.device)
        kept, weight.data = weight.data, w
        try:
            output = module(x)
        finally:
            weight.data = kept
        expected = rms_norm(x, w.shape, w, module.variance_epsilon)
    return output.shape == expected.shape and float((output - expected).abs().max()) < CLOSE


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the model's layers on first use without a KV cache; return their number.

    Layers of a kind are compiled once, for any number of tokens. Attention is not compiled: it is
    one kernel already. Calls with a KV cache are not compiled either, since the cache grows with
    every token and each length would be compiled again. The choice depends on the arguments alone,
    because a recomputed layer must repeat in the backward pass what it did in the forward pass.
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
    """Turn on gradient checkpointing: keep one state per layer and recompute the rest.

    The recomputation uses the adapter of the forward pass, whichever is active by then.
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
    """Return a context in which layers recompute activations.

    transformers recomputes only in training mode, where it refuses to fill a KV cache. So the
    layers are in that mode only during such a forward pass, and their submodules never: dropout
    stays off.
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
