"""Micro-batches: as many rows at once as fit a budget of tokens; all numbers in main memory."""

import heapq

import torch
from jaxtyping import Int
from torch import Tensor

from segcredit.models.inputs import distinct
from segcredit.types import Rollouts


def by_tokens(rollouts: Rollouts, budget: int, item: int = 1) -> list[Tensor]:
    """Row numbers of each micro-batch, at most ``budget`` prompt and response tokens with padding.

    Rows of one prompt go together, so that it is read once, and prompts whose longest rows are of
    similar length, so that little is padding. One row (or ``item`` neighbours that must stay
    together) is a micro-batch even where it alone exceeds the budget.
    """
    assert rollouts.prompts is not None
    both = _lengths(rollouts).view(-1, item, 2).amax(dim=1)
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
    return [_rows(part, item) for part in parts]


def _lengths(rollouts: Rollouts) -> Int[Tensor, "B 2"]:
    """Tokens of the prompt, and of the response up to its last one."""
    assert rollouts.prompts is not None
    position = torch.arange(1, rollouts.mask.shape[1] + 1)
    written = (rollouts.mask.cpu() * position).amax(dim=1)
    asked = torch.tensor([len(x.tokens) for x in rollouts.prompts])
    return torch.stack([asked, written], dim=1)


def _rows(items: list[int], item: int) -> Tensor:
    return (torch.tensor(items)[:, None] * item + torch.arange(item)).flatten()


def _longest_first(length: Int[Tensor, " N"], prompt: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """By the longest of the same prompt, then by prompt, then by length."""
    longest = torch.zeros_like(length).scatter_reduce(0, prompt, length, "amax")[prompt]
    order = length.argsort(descending=True, stable=True)
    order = order[prompt[order].argsort(stable=True)]
    return order[longest[order].argsort(descending=True, stable=True)]


def balanced(rollouts: Rollouts, budget: int, item: int = 1) -> list[Tensor]:
    """The same for packed rows: no padding counts, and all micro-batches are about equally long.

    Longest first, each to the micro-batch that is emptiest so far.
    """
    length = _lengths(rollouts).sum(dim=1).view(-1, item).sum(dim=1)
    order = length.argsort(descending=True, stable=True).tolist()
    count = max(1, -(-int(length.sum()) // budget))
    while True:
        heap = [(0, number) for number in range(count)]
        parts: list[list[int]] = [[] for _ in heap]
        for i in order:
            filled, number = heapq.heappop(heap)
            parts[number].append(i)
            heapq.heappush(heap, (filled + int(length[i]), number))
        fits = all(filled <= budget or len(parts[number]) == 1 for filled, number in heap)
        if fits or count == len(order):
            return [_rows(part, item) for part in parts if part]
        count += 1


def numbered(parts: list[Tensor], rows: int) -> Int[Tensor, " B"]:
    """Each row's micro-batch."""
    number = torch.empty(rows, dtype=torch.long)
    for i, part in enumerate(parts):
        number[part] = i
    return number


def micro_batches(
    rollouts: Rollouts, budget: int, packed: bool = False, item: int = 1
) -> list[Tensor]:
    """As the model reads them: packed or padded."""
    return (balanced if packed else by_tokens)(rollouts, budget, item)
