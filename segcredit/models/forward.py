"""One forward pass over prompts with their responses; a prompt that several share is read once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from segcredit.inputs import answer_inputs, distinct, full_inputs, prompt_inputs
from segcredit.models.recompute import recomputes, recomputing
from segcredit.types import Encoded, Rollouts


def response_outputs(model: nn.Module, rollouts: Rollouts, head: bool) -> Tensor:
    """What the model says before each response token, (B, T', ·), T' the longest response here.

    Logits with ``head``, else the trunk's last hidden states.
    """
    prompts = rollouts.prompts
    if prompts is None:
        raise ValueError("scoring needs the rollouts' 'prompts'; got none. Pass Encoded prompts.")
    width = int(rollouts.mask.any(dim=0).nonzero().max()) + 1
    tokens, mask = rollouts.tokens[:, :width], rollouts.mask[:, :width]
    few, which = distinct(prompts)
    if len(few) < len(prompts) and can_share(model.config) and not recomputes(model):
        return _prompts_once(model, few, which.to(tokens.device), tokens, mask, head)
    inputs = full_inputs(prompts, tokens, mask)
    # the state before response token t is one place to its left: of the last T'+1, all but one
    extra = {"logits_to_keep": width + 1} if head else {}
    with recomputing(model):
        outputs = model(**inputs.arguments(), use_cache=False, **extra)
    found = outputs.logits if head else outputs.last_hidden_state[:, -(width + 1) :]
    return found[:, :-1]


def can_share(config: PreTrainedConfig) -> bool:
    """Whether all that a response knows of its prompt is the prompt's keys and values."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return all(kind == "full_attention" for kind in kinds)


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


def widened(x: Tensor, rollouts: Rollouts) -> Tensor:
    """Zeros behind T', up to the rollouts' own width."""
    return nn.functional.pad(x, (0, rollouts.tokens.shape[1] - x.shape[1]))
