"""Weights as they would be without adapters: LoRA's products added to what they stand beside."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from segcredit.models.lora import INSIDE, POLICY, is_adapter, plain_name


def merged(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """These weights as they would be without adapters: W + (alpha / rank) B A, by their old names.

    One at a time, and the model stays as it is. Weights of a model without adapters pass through.
    """
    layers: dict[str, Any] = {
        name: part for name, part in model.named_modules() if hasattr(part, "lora_A")
    }
    for name, x in weights:
        if is_adapter(name):
            continue
        path, _, rest = name.partition(INSIDE)
        yield plain_name(name), _plus(x, layers[path]) if rest == "weight" else x


@torch.no_grad()
def _plus(weight: Tensor, layer: Any) -> Tensor:
    """W + (alpha / rank) B A, added in float32 and rounded as the weight is."""
    a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
    product = b.float() @ a.float()
    return (weight.float() + layer.scaling[POLICY] * product).to(weight.dtype)
