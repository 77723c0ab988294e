"""Norms and feed-forward parts through torch.compile: a layer has many small operations."""

from torch import nn

PARTS = ("RMSNorm", "MLP")
"""How the classes' names end; attention stays as it is."""


def compile_parts(model: nn.Module) -> int:
    """Fuse what these parts do element by element; how many there are.

    They are compiled when first used, once for all layers, for any number of tokens.
    """
    found = [x for x in model.modules() if type(x).__name__.endswith(PARTS)]
    for part in found:
        part.compile(dynamic=True)
    return len(found)
