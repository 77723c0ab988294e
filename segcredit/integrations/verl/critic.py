"""A value model for verl's FSDP engines: the policy's own class with a head of one number.

verl's loader insists on flash attention and on classes that vision-language models lack
(verl#4060, #804, #928). Here the policy's class loads the checkpoint, so every architecture that
verl trains works, its attention setting is honoured, and no trunk weight can be left at random;
then the language-model head gives way to a value head.
"""

from dataclasses import replace
from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import TrainingWorker

from segcredit.integrations.verl.value_head import with_value_head

MODEL_TYPE = "segment_value_model"
BACKENDS = ("fsdp", "fsdp2")
"""Engines whose value model is ours; the others keep verl's."""


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
