"""A model's weights as a checkpoint of it would name them, whole, one at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from segcredit.models.merged import merged
from segcredit.models.sharded import filled, is_sharded, whole_weights, without_data


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight: what an engine that holds its own copy must be told.

    Weights that are tied appear once, under their first name. Those of a sharded model are gathered
    as they are asked for, so every process must ask. LoRA matrices of the policy are added to the
    weights beside which they stand.
    """
    named = ((name, x.detach()) for name, x in model.named_parameters())
    yield from merged(model, whole_weights(model) if is_sharded(model) else named)


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that have gradients, by name."""
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


@torch.no_grad()
def copy_weights(model: nn.Module, into: nn.Module) -> None:
    """Bring an undivided copy of a model up to date."""
    target = dict(into.named_parameters())
    for name, x in full_weights(model):
        target[name].copy_(x)


def undivided(model: nn.Module, device: torch.device, keep: bool = True) -> nn.Module | None:
    """A sharded model as it would be on one process; None where only the others keep it."""
    found = {name: x.to(device) for name, x in full_weights(model) if keep}
    return filled(without_data(model), found).to(device) if keep else None
