"""Micro-batches: as many rows at once as fit a budget of tokens."""

import torch
from jaxtyping import Int
from torch import Tensor

from segcredit.inputs import distinct
from segcredit.types import Batch, Rollouts


def by_tokens(rollouts: Rollouts, budget: int, item: int = 1) -> list[Tensor]:
    """Row numbers of each micro-batch, at most ``budget`` prompt and response tokens with padding.

    Rows of one prompt go together, so that it is read once, and prompts whose longest rows are of
    similar length, so that little is padding. One row (or ``item`` neighbours that must stay
    together) is a micro-batch even where it alone exceeds the budget.
    """
    assert rollouts.prompts is not None
    position = torch.arange(1, rollouts.mask.shape[1] + 1)
    written = (rollouts.mask.cpu() * position).amax(dim=1)
    asked = torch.tensor([len(x.tokens) for x in rollouts.prompts])
    both = torch.stack([asked, written], dim=1).view(-1, item, 2).amax(dim=1)
    prompt = distinct(rollouts.prompts)[1][::item]
    order = _longest_first(both.sum(dim=1), prompt).tolist()
    parts: list[list[int]] = []
    longest = (0, 0)
    for i in order:
        ask, write = both[i].tolist()
        grown = (max(longest[0], ask), max(longest[1], write))
        if parts and (len(parts[-1]) + 1) * item * sum(grown) <= budget:
            parts[-1].append(i)
            longest = grown
        else:
            parts.append([i])
            longest = (ask, write)
    within = torch.arange(item)
    device = rollouts.mask.device
    return [(torch.tensor(part)[:, None] * item + within).flatten().to(device) for part in parts]


def _longest_first(length: Int[Tensor, " N"], prompt: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """By the longest of the same prompt, then by prompt, then by length."""
    longest = torch.zeros_like(length).scatter_reduce(0, prompt, length, "amax")[prompt]
    order = length.argsort(descending=True, stable=True)
    order = order[prompt[order].argsort(stable=True)]
    return order[longest[order].argsort(descending=True, stable=True)]


def numbered(parts: list[Tensor], rows: int) -> Int[Tensor, " B"]:
    """Each row's micro-batch."""
    number = torch.empty(rows, dtype=torch.long, device=parts[0].device)
    for i, part in enumerate(parts):
        number[part] = i
    return number


def rows_of(batch: Batch, budget: int) -> list[Tensor]:
    """Micro-batches of a mini-batch."""
    return by_tokens(batch.rollouts, budget, batch.rows_per_item)
