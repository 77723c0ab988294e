"""A model's weights as a checkpoint of it would name them, whole, one at a time."""

from collections.abc import Iterator

from torch import Tensor, nn

from segcredit.models.merged import merged


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight: what an engine that holds its own copy must be told.

    Weights that are tied appear once, under their first name. LoRA matrices of the policy are
    added to the weights beside which they stand.
    """
    yield from merged(model, ((name, x.detach()) for name, x in model.named_parameters()))
