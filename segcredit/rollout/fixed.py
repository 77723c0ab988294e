"""Drawing in a room of fixed size, where a step asks the host nothing and can be replayed."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from segcredit.core.logits import entropy
from segcredit.inputs import Inputs
from segcredit.rollout.cache import GrowingLayer
from segcredit.rollout.choose import pick
from segcredit.rollout.graphs import Graphs
from segcredit.rollout.prefill import Prefilled
from segcredit.rollout.room import Room, Size, bucket, room_bytes
from segcredit.types import Sampling

LOOK = 16
"""Steps after which the host looks whether all rows have ended."""
LEAST_ROWS, LEAST_COLUMNS = 8, 64
"""Of the sizes for which steps are recorded."""
SMALL_MODEL = 1_000_000_000
"""Parameters below which launching a step's kernels takes longer than running them."""
SHARE = 1 / 8
"""Of the GPU's memory that a room may take unasked: it stays between the calls."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Mean difference to the plain step's logits, by their spread; 0.1 in half precision."""


@dataclass(frozen=True)
class Steps:
    """What a step does to a room, of one model and one way of drawing."""

    model: Any
    room: Room
    sampling: Sampling
    banned: Bool[Tensor, " V"] | None
    ends: Int[Tensor, " E"]
    planes: int

    def run(self, rows: int, columns: int, cache: DynamicCache) -> None:
        """One more token of each of the first rows."""
        room = self.room
        logits = self.logits(rows, columns, cache)
        room.column.add_(1)
        room.position.add_(1)
        self.record(logits, rows)

    def logits(self, rows: int, columns: int, cache: DynamicCache) -> Float[Tensor, "R V"]:
        """After the last token drawn, whose keys and values are written."""
        room = self.room
        seen = room.attended[:rows, :columns] & (room.place[:columns] <= room.column)
        # of four dimensions, so that transformers takes it as it is
        bias = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
        bias = bias.masked_fill(~seen, -torch.inf)[:, None, None]
        positions = room.position[:rows, None]
        logits: Tensor = self.model(
            input_ids=room.token[:rows, None],
            attention_mask=bias,
            position_ids=positions if self.planes == 1 else positions.expand(self.planes, -1, -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def record(self, logits: Float[Tensor, "R V"], rows: int) -> None:
        """Draw from the logits, write down what was drawn, and see who has ended."""
        room = self.room
        here = (room.row[:rows], room.step)
        alive = room.alive[:rows]
        log_pi, picked = pick(logits, room.uniform[here], self.sampling, self.banned)
        chosen = log_pi.gather(-1, picked[:, None]).squeeze(-1)
        room.tokens.index_put_(here, picked)
        room.mask.index_put_(here, alive)
        room.logp.index_put_(here, chosen.to(room.logp.dtype))
        room.entropies.index_put_(here, entropy(log_pi).to(room.entropies.dtype))
        ended = (picked[:, None] == self.ends).any(dim=-1)
        alive.logical_and_(~ended & (room.step + 1 < room.budget[:rows]))
        room.token[:rows].copy_(picked)
        room.step.add_(1)


class FixedSampler:
    """Draws batches of rows; its room and its graphs stay for the next batch.

    Weights may change in place. When they move, everything is recorded again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs = Graphs(device)
        self.room: Room | None = None
        self._addresses: Hashable = None
        self._checked: type[torch.nn.Module] | None = None
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def draw(
        self,
        model: Any,
        asked: Prefilled,
        budget: Int[Tensor, " B"],
        uniform: Float[Tensor, "B T"],
        sampling: Sampling,
        end_tokens: tuple[int, ...],
        banned: Bool[Tensor, " V"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, mask, log π and H; rows that had finished may have gone on, off the mask."""
        num, width = uniform.shape
        read = asked.attended.shape[1]
        room = self._room_for(model, asked, width)
        room.begin(asked, budget, uniform)
        planes = asked.planes
        ends = self._ends.setdefault(end_tokens, torch.tensor(end_tokens, device=self.device))
        steps = Steps(model, room, sampling, banned, ends, planes)
        steps.record(asked.logits[asked.which], num)
        if type(model) is not self._checked and width > 1:
            self._check(steps, asked)

        way = (sampling.temperature, sampling.top_p, sampling.top_k, end_tokens, planes)
        forbidden = None if banned is None else banned.data_ptr()
        rows, done = bucket(num, LEAST_ROWS), 1
        while done < width and (left := int(room.alive.sum())):
            if bucket(left, LEAST_ROWS) <= rows // 2:
                rows = bucket(left, LEAST_ROWS)
                room.compact(rows, read + done)
            columns = bucket(read + done, LEAST_COLUMNS)
            times = min(LOOK, width - done, columns - (read + done) + 1)
            cache = room.cache(model.config, rows, columns)
            one = partial(steps.run, rows, columns, cache)
            self.graphs.run((rows, columns, way, forbidden), one, times)
            done += times
        return (
            room.tokens[:num, :width].clone(),
            room.mask[:num, :width].clone(),
            room.logp[:num, :width].clone(),
            room.entropies[:num, :width].clone(),
        )

    def _room_for(self, model: Any, asked: Prefilled, width: int) -> Room:
        """The one there is, if it is large enough and the weights are where they were."""
        addresses = _addresses(model)
        needed = size_of(asked, width)
        if self.room is not None and not self.room.size.holds(needed):
            joined, self.room = needed.joined(self.room.size), None
            needed = joined if _affordable(asked.cache, joined, self.device) else needed
        if self.room is None or addresses != self._addresses:
            self.graphs = Graphs(self.device)
            self._addresses = addresses
        if self.room is None:
            self.room = Room(asked.cache, needed)
        return self.room

    def _check(self, steps: Steps, asked: Prefilled) -> None:
        """Whether a model of this kind says in the room what it says without.

        It may not: one that makes its own mask, or takes positions from the cache's length.
        """
        room, plainly = steps.room, asked.spread()
        num = len(asked.which)
        plain = Inputs(
            room.token[:num, None],
            torch.nn.functional.pad(plainly.attended, (0, 1), value=True),
            room.position[:num, None].expand(steps.planes, -1, -1),
            {},
        )
        expected = steps.model(
            **plain.arguments(), past_key_values=plainly.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        columns = bucket(asked.attended.shape[1] + 1, LEAST_COLUMNS)
        rows = bucket(num, LEAST_ROWS)
        cache = room.cache(steps.model.config, rows, columns)
        found = steps.logits(rows, columns, cache)[:num]
        off = float((found - expected).float().abs().mean())
        if off > CLOSE.get(expected.dtype, 0.1) * float(expected.float().std()):
            raise RuntimeError(f"its logits would be wrong by {off:.2g}")
        self._checked = type(steps.model)


def size_of(asked: Prefilled, width: int) -> Size:
    """What the rows need, rounded up, so that similar batches find the same room."""
    read = asked.attended.shape[1]
    return Size(
        rows=bucket(len(asked.which), LEAST_ROWS),
        width=bucket(width, LEAST_COLUMNS),
        columns=bucket(read + width, LEAST_COLUMNS),
    )


def suits(model: Any, asked: Prefilled, width: int, wanted: bool | str) -> bool:
    """Whether these rows are drawn in a room: as the settings say, and where it is possible."""
    plain = all(type(x) is GrowingLayer for x in asked.cache.layers)
    attention = model.config.get_text_config()._attn_implementation or ""
    masked = attention in ("sdpa", "eager") or attention.startswith("segcredit")
    if not plain or not masked or model.training or not wanted:
        return False
    if wanted is True:
        return True
    device = asked.logits.device
    if device.type != "cuda" or sum(x.numel() for x in model.parameters()) >= SMALL_MODEL:
        return False
    return _affordable(asked.cache, size_of(asked, width), device)


def _affordable(cache: DynamicCache, size: Size, device: torch.device) -> bool:
    """Whether such a room takes at most its share of the device's memory."""
    if device.type != "cuda":
        return True
    memory = torch.cuda.get_device_properties(device).total_memory
    return room_bytes(cache, size) <= SHARE * memory


def _addresses(model: torch.nn.Module) -> Hashable:
    """Where the weights lie, and which adapters are at work: a graph is true of these alone."""
    lie = tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))
    return lie, tuple(str(getattr(x, "_active_adapter", "")) for x in model.modules())
