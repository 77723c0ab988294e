"""Load models of a run, and make them ready to train."""

from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from segcredit.algorithms.requirements import Requirements
from segcredit.columns import ENTROPY, LOGP_OLD
from segcredit.config import Recipe, RecipeError
from segcredit.core.checks import has_layer_kernels
from segcredit.models import Family, ModelError, Policy, find_family
from segcredit.models.layers import (
    compile_layers,
    fuse_gates,
    fuse_norms,
    fuse_rotary,
    recompute_activations,
)
from segcredit.models.lora import VARIANTS, Lora
from segcredit.rollout import make_engine
from segcredit.types import RolloutEngine


def make_ready(model: PreTrainedModel, recipe: Recipe, lora: Lora | None = None) -> None:
    """Freeze, compile and checkpoint activations as the recipe says; on a GPU, fuse kernels."""
    fuse_on_gpu(model, recipe.model.compile)
    if recipe.model.freeze_vision:
        freeze_vision(model, find_family(model.config, recipe.model.family))
    if recipe.model.compile:
        if lora is not None:
            torch._dynamo.config.recompile_limit = VARIANTS
        compile_layers(model)
    if recipe.memory.recompute_activations:
        recompute_activations(model, lora)


def rollout_engine(recipe: Recipe, needed: Requirements, policy: Policy) -> RolloutEngine:
    """Make the recipe's engine, which samples from this policy."""
    recomputed = recipe.recomputes and not {LOGP_OLD, ENTROPY}.isdisjoint(needed.columns)
    settings = recipe.rollout.engine_settings(
        recipe.data.max_prompt_tokens,
        repeats_prompts=any(x.continues for x in needed.columns),
        # whether the engine's log π of responses is used, or recorded
        needs_logp=not recomputed or recipe.rollout.mismatch_cap is not None,
    )
    return make_engine(recipe.rollout.engine, policy, settings)


def device_of(name: str) -> torch.device:
    """Return the device that a setting names; auto: the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    # of several processes, each has chosen its own
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def fuse_on_gpu(model: PreTrainedModel, compiled: bool = False) -> None:
    """On a GPU, compute norms, rotary embeddings and gated MLPs by one kernel each.

    ``compiled``: torch.compile fuses the latter two itself.
    """
    if model.device.type != "cuda":
        return
    fuse_norms(model)
    if not compiled and has_layer_kernels(next(model.parameters())):
        fuse_rotary(model)
        fuse_gates(model)


def freeze_vision(model: nn.Module, family: Family) -> None:
    """Exclude the vision tower from gradients."""
    for tower in family.vision_towers(model):
        freeze(tower)


def freeze(model: nn.Module) -> None:
    """Exclude all parameters from gradients."""
    for x in model.parameters():
        x.requires_grad_(False)


def load_policy(recipe: Recipe, source: str | Path) -> Policy:
    """Load a policy from a directory or hub id with the recipe's settings."""
    settings = recipe.model
    dtype = getattr(torch, settings.dtype)
    try:
        policy = Policy.from_pretrained(
            source, dtype, settings.trust_remote_code, recipe.data.template, settings.family
        )
    except ModelError as error:
        raise RecipeError(f"model.path: {error}") from error
    detach_from_file(policy.model)
    return policy


def detach_from_file(model: nn.Module) -> None:
    """Copy loaded weights out of their memory-mapped file into newly allocated memory.

    The file may be deleted or replaced. Its tensors may also be aligned differently, which can
    change the rounding of matrix products; a resumed run must round like an uninterrupted one.
    """
    for x in [*model.parameters(), *model.buffers()]:
        x.data = x.data.clone()


def load_saved_policy(recipe: Recipe, place: Path) -> Policy:
    """Load a policy that a run has saved, with its generation config.

    If generation_config.json cannot be read, transformers silently uses other end tokens.
    """
    policy = load_policy(recipe, place)
    if (place / GENERATION_CONFIG_NAME).exists():
        policy.model.generation_config = GenerationConfig.from_pretrained(place)
    return policy
