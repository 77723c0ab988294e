"""A key-value cache that grows in place: a step writes one column instead of copying them all."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

ROOM = 64
"""Columns made ready at once."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """transformers' dynamic layer, which would copy all keys and values for every token."""

    keys: Tensor
    values: Tensor
    _room: tuple[Tensor, Tensor] | None = None
    _shown: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Behind what is there; all of it is returned as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        # rows may have been selected since: then `keys` are no longer what the room holds
        if self._room is None or self.keys is not self._shown or new > self._room[0].shape[-2]:
            self._room = (_wider(key_states, new + ROOM), _wider(value_states, new + ROOM))
            if old:
                self._room[0][:, :, :old] = self.keys
                self._room[1][:, :, :old] = self.values
        self._room[0][:, :, old:new] = key_states
        self._room[1][:, :, old:new] = value_states
        self.keys, self.values = self._room[0][:, :, :new], self._room[1][:, :, :new]
        self._shown = self.keys
        return self.keys, self.values


def _wider(x: Tensor, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-2], columns, x.shape[-1]))


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """The cache of this architecture; only its plain attention layers are replaced.

    For sampling alone: what is written in place has no gradient.
    """
    assert not torch.is_grad_enabled()
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    return cache
