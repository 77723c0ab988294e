"""Layers through torch.compile when responses are scored: a layer has many small operations."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


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
