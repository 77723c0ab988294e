"""A value model for verl's FSDP engines: the policy's own class with a value head.

verl's loader requires flash attention and classes that vision-language models lack (verl#4060,
#804, #928). Here the policy's class loads the checkpoint, so every architecture that verl trains
works, its attention setting applies, and no trunk weight is left at random. Then a value head
replaces the language-model head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import TrainingWorker

MODEL_TYPE = "segment_value_model"
BACKENDS = ("fsdp", "fsdp2")
"""Engines that use our value model; the others keep verl's."""


class ValueHead(nn.Module):
    """Value head: initialized to 0 and computed in float32, whatever the trunk's dtype."""

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


class SegmentValueEngine(FSDPEngineWithValueHead):  # type: ignore[misc]
    """verl's value engine with our value model."""

    def _build_module(self) -> Any:
        self.model_config.model_type = "language_model"
        try:
            module = super()._build_module()
        finally:
            self.model_config.model_type = MODEL_TYPE
        return with_value_head(module)


if MODEL_TYPE not in EngineRegistry._engines:
    EngineRegistry.register(MODEL_TYPE, list(BACKENDS), device=["cuda", "npu", "cpu"])(
        SegmentValueEngine
    )


class SegmentCriticWorker(TrainingWorker):  # type: ignore[misc]
    """verl's critic worker, with our value model on FSDP."""

    def __init__(self, config: Any) -> None:
        if config.engine_config.strategy in BACKENDS:
            config = replace(config, model_type=MODEL_TYPE)
        super().__init__(config)
