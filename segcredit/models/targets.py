"""Which linear layers get LoRA matrices: by the recipe's word, told from names alone."""

from collections.abc import Iterable, Sequence

from torch import nn
from transformers import PreTrainedModel

TOWER = "visual"
"""What the vision tower is called, wherever an architecture keeps it."""
LANGUAGE, ALL = "language", "all-linear"

Targets = str | Sequence[str]
"""``language``, ``all-linear``, or names such as ``q_proj`` or ``layers.0.mlp.up_proj``."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """All that could have them. The head could not: it is read as a plain matrix."""
    head = model.get_output_embeddings()
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and part is not head
    }


def choose_layers(names: Iterable[str], targets: Targets, vision: bool = True) -> list[str]:
    """The layers that are meant; ``vision=False`` leaves the vision tower out in any case."""
    open_ones = [name for name in names if vision or not in_tower(name)]
    if targets == ALL:
        return open_ones
    if targets == LANGUAGE:
        return [name for name in open_ones if not in_tower(name)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    unknown = [one for one in wanted if not any(_is_meant(name, one) for name in open_ones)]
    if unknown or not wanted:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in open_ones)
        what = f"no linear layer is called {', '.join(map(repr, unknown))}" if unknown else "none"
        raise ValueError(
            f"model.lora.targets: expected {LANGUAGE}, {ALL}, or names of linear layers below the "
            f"head; {what}. This model has {', '.join(list(ends)[:12])}."
        )
    return [name for name in open_ones if any(_is_meant(name, one) for one in wanted)]


def in_tower(name: str) -> bool:
    """Whether a layer belongs to the vision tower."""
    return TOWER in name.split(".")


def _is_meant(name: str, wanted: str) -> bool:
    """By the end of its path, whole words."""
    return f".{name}".endswith(f".{wanted}")
