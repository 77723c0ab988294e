"""A value model for verl's FSDP engines: the policy's own class with a value head.

verl's loader requires flash attention and classes that vision-language models lack (verl#4060,
#804, #928). Here the policy's class loads the checkpoint, so every architecture that verl trains
works, its attention setting applies, and no trunk weight is left at random. Then a value head
replaces the language-model head.
"""

from dataclasses import replace
from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
from verl.workers.engine_workers import TrainingWorker

from segcredit.integrations.verl.value_head import with_value_head

MODEL_TYPE = "segment_value_model"
BACKENDS = ("fsdp", "fsdp2")
"""Engines that use our value model; the others keep verl's."""


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
