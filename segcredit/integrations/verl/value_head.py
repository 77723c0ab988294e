"""Value head that replaces the head of any causal language model; importable without verl."""

from typing import Any

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """Value head: initialized to 0 and computed in float32 for any dtype of the trunk."""

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


def with_value_head(model: Any) -> Any:
    """Replace a language model's head by a value head; its embeddings are no longer tied."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(model).__name__} has no language-model head to replace by a value head. "
            f"Set critic.model.path to a causal language model or a Qwen-VL."
        )
    hidden = model.config.get_text_config().hidden_size
    model.set_output_embeddings(ValueHead(hidden, head.weight.device, head.weight.dtype))
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    return model
