"""What a model that is trained needs, beside its weights."""

import torch
from torch import nn
from transformers import PreTrainedModel

from segcredit.config import Recipe
from segcredit.models.layers import compile_layers, fuse_norms, recompute_activations
from segcredit.models.lora import VARIANTS, Lora
from segcredit.train.state import freeze


def make_ready(model: PreTrainedModel, recipe: Recipe, lora: Lora | None = None) -> None:
    """Freeze, compile, recompute: as the recipe says. On a GPU, norms are one kernel each."""
    fuse_on_gpu(model)
    if recipe.model.freeze_vision:
        freeze_vision(model)
    if recipe.model.compile:
        if lora is not None:
            torch._dynamo.config.recompile_limit = VARIANTS
        compile_layers(model)
    if recipe.memory.recompute_activations:
        recompute_activations(model, lora)


def fuse_on_gpu(model: PreTrainedModel) -> None:
    """Norms as one kernel each, where kernels are what one waits for."""
    if model.device.type == "cuda":
        fuse_norms(model)


def freeze_vision(model: nn.Module) -> None:
    """No gradients for the vision tower, wherever the architecture keeps it."""
    for name, part in model.named_modules():
        if name.split(".")[-1] == "visual":
            freeze(part)
