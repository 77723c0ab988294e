"""A value model for verl's FSDP engines: the policy's own class with a head of one number.

verl's loader insists on flash attention and on classes that vision-language models lack
(verl#4060, #804, #928). Here the policy's class loads the checkpoint, so every architecture that
verl trains works, its attention setting is honoured, and no trunk weight can be left at random;
then the language-model head gives way to a value head.
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
"""Engines whose value model is ours; the others keep verl's."""


class ValueHead(nn.Module):
    """One number per position: 0 at the start, and summed in float32 whatever the trunk is in."""

    def __init__(self, hidden: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


def with_value_head(model: Any) -> Any:
    """The language model with V in the place of its logits."""
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
    """verl's value engine around our model."""

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
