"""Buffers of fixed size and place for rows that are being drawn: what a CUDA graph can work on."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from segcredit.rollout.prefill import Prefilled


def bucket(count: int, least: int) -> int:
    """The next of least, 1.5 · least, 2 · least, 3 · least, 4 · least, …: few sizes for all.

    ``least``: a power of two above 1.
    """
    size = least
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


@dataclass(frozen=True)
class Size:
    """How much a room holds."""

    rows: int
    width: int
    """Tokens of a response."""
    columns: int
    """Keys and values of a row, its prompt's too."""

    def holds(self, other: "Size") -> bool:
        """Whether the other is nowhere larger."""
        return self == self.joined(other)

    def joined(self, other: "Size") -> "Size":
        """The larger of both, in each of the three."""
        return Size(
            max(self.rows, other.rows),
            max(self.width, other.width),
            max(self.columns, other.columns),
        )


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values that stay where they are; a step writes them at one column."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.column = column
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Written in place; columns that are still empty are the mask's business."""
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values


class Room:
    """Rows as they are drawn: their keys and values, where each of them stands, what it wrote.

    A row of the buffers is a slot; ``row`` says whose response is drawn there. Slots of nobody
    write to one row more than there are responses.
    """

    def __init__(self, like: DynamicCache, size: Size) -> None:
        """``like``: a filled cache of the model."""
        device = like.layers[0].keys.device
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        self.size = size
        self.stored = [(_room_for(x.keys, size), _room_for(x.values, size)) for x in like.layers]
        # of each slot
        self.row, self.token, self.position = (whole(size.rows) for _ in range(3))
        self.budget = whole(size.rows)
        self.alive = torch.zeros(size.rows, dtype=torch.bool, device=device)
        self.attended = torch.ones(size.rows, size.columns, dtype=torch.bool, device=device)
        # of each response
        shape = (size.rows + 1, size.width)
        self.uniform = torch.zeros(shape, device=device)
        self.tokens = whole(shape)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.logp, self.entropies = (torch.zeros(shape, device=device) for _ in range(2))
        # of all together, on the device; of one entry each, since indexing by none asks the host
        self.step, self.column = whole(1), whole(1)
        self.place = torch.arange(size.columns, device=device)

    @property
    def nobody(self) -> int:
        """The row to which slots write that draw no response."""
        return self.size.rows

    def begin(
        self,
        asked: Prefilled,
        budget: Int[Tensor, " B"],
        uniform: Tensor,
    ) -> None:
        """Rows that have read what they begin with."""
        which = asked.which
        num, read = len(which), asked.attended.shape[1]
        for (keys, values), layer in zip(self.stored, asked.cache.layers, strict=True):
            # not what an earlier batch left: 0 times NaN is NaN, whatever the mask says
            keys.zero_()
            values.zero_()
            keys[:num, :, :read] = layer.keys[which]
            values[:num, :, :read] = layer.values[which]
        for x in (self.tokens, self.mask, self.logp, self.entropies, self.uniform):
            x.zero_()
        for x in (self.token, self.position, self.budget, self.alive, self.step):
            x.zero_()
        self.row.fill_(self.nobody)
        self.row[:num] = torch.arange(num, device=self.row.device)
        self.position[:num] = asked.position[which]
        self.attended.fill_(True)
        self.attended[:num, :read] = asked.attended[which]
        self.budget[:num] = budget
        self.alive[:num] = True
        self.uniform[:num, : uniform.shape[1]] = uniform
        self.column.fill_(read)

    def cache(self, config: PreTrainedConfig, rows: int, columns: int) -> DynamicCache:
        """The first of the slots and of their columns, as a model takes them."""
        cache = DynamicCache(config=config)
        cache.layers = [
            FixedLayer(keys[:rows, :, :columns], values[:rows, :, :columns], self.column)
            for keys, values in self.stored
        ]
        return cache

    def compact(self, rows: int, columns: int) -> None:
        """Unfinished rows into the first slots, of which ``rows`` go on."""
        alive = self.alive.nonzero().flatten()
        left = len(alive)
        for stored in self.stored:
            for x in stored:
                x[:left, :, :columns] = x[:, :, :columns].index_select(0, alive)
        for x in (self.token, self.position, self.attended, self.budget, self.row, self.alive):
            x[:left] = x[alive]
        self.alive[left:] = False
        self.attended[left:] = True
        self.row[left:rows] = self.nobody
        for x in (self.token, self.position):
            x[left:rows] = 0


def _room_for(x: Tensor, size: Size) -> Tensor:
    _, heads, _, width = x.shape
    return x.new_zeros((size.rows, heads, size.columns, width))


def room_bytes(cache: DynamicCache, size: Size) -> int:
    """Memory of the keys and values of such a room."""
    one = sum(
        x.shape[1] * x.shape[3] * x.element_size()
        for layer in cache.layers
        for x in (layer.keys, layer.values)
    )
    return one * size.rows * size.columns
