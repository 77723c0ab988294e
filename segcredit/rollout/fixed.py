"""Drawing in a room of fixed size, where a step asks the host nothing and can be replayed."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from segcredit.core.logits import entropy
from segcredit.models.inputs import Inputs
from segcredit.rollout.prefill import GrowingLayer, Prefilled
from segcredit.rollout.sampling import pick
from segcredit.types import Sampling

LIMIT = 64
"""Graphs kept; the one that was not used for longest goes first."""
WARM_UP = 2
"""Steps run plainly before one is recorded: libraries make their workspaces, kernels are loaded."""
WORTH = 4
"""Steps for which recording pays."""

Step = Callable[[], None]
"""Reads and writes tensors that stay where they are, and asks the host nothing."""


class Graphs:
    """Recorded steps by their sizes. Without a GPU steps just run.

    Recording runs nothing, so warming up is part of the work: the first steps of a new size are
    the ones that run plainly. All graphs share one pool of memory for what is in between, since
    one runs after the other, and none of it is needed after a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Step]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, key: Hashable, step: Step, times: int) -> None:
        """The step so many times; of equal keys the steps do the same to the same tensors."""
        if self._stream is None:
            for _ in range(times):
                step()
            return
        if key not in self._kept:
            plain = WARM_UP if times >= WARM_UP + WORTH else times
            self._run_aside(step, plain)
            times -= plain
            if not times:
                return
            self._record(key, step)
        self._kept.move_to_end(key)
        graph, _ = self._kept[key]
        for _ in range(times):
            graph.replay()

    def _run_aside(self, step: Step, times: int) -> None:
        """On the stream that is recorded from: workspaces belong to streams."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, key: Hashable, step: Step) -> None:
        assert self._stream is not None
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        finally:
            torch.cuda.set_stream(before)  # torch forgets to, where recording fails
        self._kept[key] = (graph, step)  # the step holds the tensors that the graph reads
        while len(self._kept) > LIMIT:
            self._kept.popitem(last=False)


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
