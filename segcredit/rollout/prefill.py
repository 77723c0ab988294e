"""What is read before the first token is drawn: each prompt once, then begun responses on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from segcredit.models.inputs import Inputs, distinct, prompt_inputs
from segcredit.types import Encoded

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


@dataclass
class Prefilled:
    """What rows begin with, each distinct beginning once, and what the model says after it."""

    cache: Any
    logits: Float[Tensor, "F V"]
    attended: Bool[Tensor, "F L"]
    """Columns of the cache that hold a token; padding does not."""
    position: Int[Tensor, " F"]
    """Rotary position of the next token."""
    planes: int
    """Rows of rotary positions: one, or three of a vision model."""
    which: Int[Tensor, " B"]
    """Of the beginnings, each row's."""

    def spread(self) -> "Prefilled":
        """One beginning for each row; the cache is changed in place."""
        return self.select(self.which, torch.arange(len(self.which), device=self.which.device))

    def select(self, some: Int[Tensor, " N"], which: Int[Tensor, " B"]) -> "Prefilled":
        """These of the beginnings, perhaps several times; the cache is changed in place."""
        self.cache.batch_select_indices(some)
        return Prefilled(
            self.cache,
            self.logits[some],
            self.attended[some],
            self.position[some],
            self.planes,
            which,
        )


def prefill(
    model: nn.Module,
    prompts: Sequence[Encoded],
    prefixes: Sequence[Int[Tensor, "_"]],
    device: torch.device,
) -> Prefilled:
    """One row for each prompt and begun response behind it, which may be empty.

    Each distinct prompt is read once (siblings hold one and the same object), whatever follows it;
    then each distinct beginning, on its prompt's keys and values.
    """
    cache: Any = growing_cache(model.config)
    # other layers than plain attention (windows, recurrent states) must see text without gaps
    plain = all(type(x) is GrowingLayer for x in cache.layers)
    if not plain:
        made: dict[tuple[int, int], Encoded] = {}
        keys = [(id(x), id(y)) for x, y in zip(prompts, prefixes, strict=True)]
        for key, x, y in zip(keys, prompts, prefixes, strict=True):
            made[key] = made.get(key) or (x.extended(y.to(x.tokens.device)) if len(y) else x)
        prompts = [made[key] for key in keys]
    few, which = distinct(prompts)
    asked = prompt_inputs(few, device)
    logits = next_logits(model, cache, asked.arguments())
    read = Prefilled(
        cache, logits, asked.attended, asked.next_position, len(asked.positions), which.to(device)
    )
    if not plain or not any(len(x) for x in prefixes):
        return read
    return _behind(model, read, prefixes)


def _behind(model: nn.Module, read: Prefilled, prefixes: Sequence[Tensor]) -> Prefilled:
    """Begun responses, each distinct one once, on the keys and values of their prompts.

    They end together at the right edge, so that all go on in the same column.
    """
    which = read.which
    number: dict[tuple[int, int], int] = {}
    pairs = zip(which.tolist(), prefixes, strict=True)
    row_of = [number.setdefault((prompt, id(x)), len(number)) for prompt, x in pairs]
    first = {n: row for row, n in reversed(list(enumerate(row_of)))}
    begun = [prefixes[first[n]] for n in range(len(number))]
    rows = torch.tensor([first[n] for n in range(len(number))], device=which.device)
    device = which.device
    read = read.select(which[rows], torch.tensor(row_of, device=device))
    tokens = pad_sequence(begun, batch_first=True, padding_side="left").to(device)
    length = torch.tensor([len(x) for x in begun], device=device)
    place = torch.arange(tokens.shape[1], device=device) - (tokens.shape[1] - length)[:, None]
    positions = (read.position[:, None] + place).clamp(min=0).expand(read.planes, -1, -1)
    attended = torch.cat([read.attended, place >= 0], dim=1)
    said = next_logits(model, read.cache, Inputs(tokens, attended, positions, {}).arguments())
    # an empty beginning has only padding there: what was said after its prompt holds
    logits = torch.where((length > 0)[:, None], said, read.logits)
    position = read.position + length
    return Prefilled(read.cache, logits, attended, position, read.planes, read.which)


def next_logits(model: nn.Module, cache: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Logits after the last token; the cache grows by what was read."""
    outputs = model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = outputs.logits[:, -1]
    return logits
