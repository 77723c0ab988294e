"""A model's weights as a checkpoint of it would name them, whole, one at a time."""

from collections.abc import Iterator

from torch import Tensor, nn


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight: what an engine that holds its own copy must be told.

    Weights that are tied appear once, under their first name.
    """
    for name, x in model.named_parameters():
        yield name, x.detach()
