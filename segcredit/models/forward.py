"""The model's states before each response token: packed, or padded with prompts read once."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from segcredit.inputs import answer_inputs, distinct, full_inputs, packed_inputs, prompt_inputs
from segcredit.models.packed import packs, sees_all
from segcredit.models.recompute import recomputes, recomputing
from segcredit.models.sharded import is_sharded
from segcredit.types import Encoded, Rollouts


def response_outputs(model: nn.Module, rollouts: Rollouts, head: bool) -> Float[Tensor, "N _"]:
    """What the model says before each of the N tokens on the mask, row by row.

    Logits with ``head``, else the trunk's last hidden states.
    """
    prompts = rollouts.prompts
    if prompts is None:
        raise ValueError("scoring needs the rollouts' 'prompts'; got none. Pass Encoded prompts.")
    if not is_sharded(model):
        return _outputs(model, rollouts, prompts, head, share_prompts=True)
    # the passes of all processes must meet layer by layer, whatever each of them reads: so every
    # one is a single pass, and goes through the vision tower
    with recomputing(model):
        nothing = 0.0 if any(x.vision for x in prompts) else blank_picture(model) * 0.0
    return _outputs(model, rollouts, prompts, head, share_prompts=False) + nothing


def _outputs(
    model: nn.Module,
    rollouts: Rollouts,
    prompts: Sequence[Encoded],
    head: bool,
    share_prompts: bool,
) -> Tensor:
    place = torch.arange(1, rollouts.mask.shape[1] + 1, device=rollouts.mask.device)
    width = int((rollouts.mask * place).max())  # one number: the host waits once
    tokens, mask = rollouts.tokens[:, :width], rollouts.mask[:, :width]
    if packs(model):
        packed = packed_inputs(prompts, tokens, mask)
        with recomputing(model):
            outputs = model(**packed.arguments(), use_cache=False)
        return (outputs.logits if head else outputs.last_hidden_state)[0, packed.before]
    few, which = distinct(prompts)
    # then all that a response knows of its prompt is the prompt's keys and values
    shared = share_prompts and len(few) < len(prompts)
    if shared and sees_all(model.config) and not recomputes(model):
        return _prompts_once(model, few, which.to(tokens.device), tokens, mask, head)[mask]
    inputs = full_inputs(prompts, tokens, mask)
    # the state before response token t is one place to its left: of the last T'+1, all but one
    extra = {"logits_to_keep": width + 1} if head else {}
    with recomputing(model):
        outputs = model(**inputs.arguments(), use_cache=False, **extra)
    found = outputs.logits if head else outputs.last_hidden_state[:, -(width + 1) :]
    return found[:, :-1][mask]


def blank_picture(model: nn.Module) -> Tensor:
    """The sum of what the vision tower says of a smallest, empty picture; 0 without a tower."""
    tower: Any = next((x for name, x in model.named_modules() if name.endswith("visual")), None)
    if tower is None:
        return torch.zeros(())
    side = tower.spatial_merge_size
    patch = tower.patch_embed.proj.weight
    pixels = patch.new_zeros(side * side, patch[0].numel())
    grid = torch.tensor([[1, side, side]], device=patch.device)
    said = tree_leaves(dict(tower(pixels, grid_thw=grid, return_dict=True)))
    return torch.stack([x.sum() for x in said if isinstance(x, Tensor)]).sum()


def spread(x: Float[Tensor, " N"], rollouts: Rollouts) -> Float[Tensor, "B T"]:
    """Numbers of the tokens on the mask, put where the tokens are; zeros elsewhere."""
    empty = torch.zeros(rollouts.mask.shape, dtype=x.dtype, device=x.device)
    return empty.masked_scatter(rollouts.mask, x)


def _prompts_once(
    model: nn.Module,
    few: Sequence[Encoded],
    which: Tensor,
    tokens: Tensor,
    mask: Tensor,
    head: bool,
) -> Tensor:
    """The distinct prompts first; then the responses, each on its prompt's keys and values.

    Gradients flow back through those, so this is the same function of the weights.
    """
    asked = prompt_inputs(few, tokens.device)
    cache = DynamicCache(config=model.config)
    extra = {"logits_to_keep": 1} if head else {}
    outputs = model(**asked.arguments(), past_key_values=cache, use_cache=True, **extra)
    before_first = (outputs.logits if head else outputs.last_hidden_state[:, -1:])[which]
    cache.batch_select_indices(which)
    answered = answer_inputs(asked.select(which), tokens, mask)
    outputs = model(**answered.arguments(), past_key_values=cache, use_cache=True)
    rest = outputs.logits if head else outputs.last_hidden_state
    return torch.cat([before_first, rest[:, :-1]], dim=1)
