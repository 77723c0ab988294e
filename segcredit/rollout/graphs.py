"""Sampling in buffers of fixed size, with decoding steps recorded as CUDA graphs.

A step reads and writes tensors that stay at their addresses and never synchronizes with the host,
so it can be recorded once and replayed. That saves launching kernels, which takes longer than
running them for small models.
"""

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

from segcredit.core.checks import has_layer_kernels
from segcredit.models.inputs import Inputs
from segcredit.rollout.sampling import Prefill, draw
from segcredit.rollout.stop import StopStrings
from segcredit.types import Sampling

LIMIT = 64
"""Maximum number of graphs; the least recently used one is dropped."""
WARM_UP = 2
"""Steps that run before one is recorded: libraries allocate workspaces, kernels are loaded."""
MIN_REPLAYS = 4
"""Minimum number of replays for which recording is worth its time."""

Step = Callable[[], None]
"""A decoding step on tensors with fixed addresses, without host synchronization."""


class CudaGraphs:
    """Recorded steps by their sizes. Without a GPU, steps run directly.

    Recording does not execute a step, so the warm-up uses real steps: the first steps of a new size
    run directly. All graphs share one memory pool for intermediate results, since they run one
    after the other and need none of it after a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Step]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, key: Hashable, step: Step, times: int) -> None:
        """Run the step several times; equal keys mean equal operations on the same tensors."""
        if self._stream is None:
            for _ in range(times):
                step()
            return
        with torch.cuda.device(self._stream.device):  # its current stream has the earlier work
            self._run(key, step, times)

    def _run(self, key: Hashable, step: Step, times: int) -> None:
        if key not in self._kept:
            plain = WARM_UP if times >= WARM_UP + MIN_REPLAYS else times
            self._warm_up(step, plain)
            times -= plain
            if not times:
                return
            self._record(key, step)
        self._kept.move_to_end(key)
        graph, _ = self._kept[key]
        for _ in range(times):
            graph.replay()

    def _warm_up(self, step: Step, times: int) -> None:
        """Run steps on the stream used for recording, since workspaces belong to streams."""
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
            torch.cuda.set_stream(before)  # torch does not if recording fails
        self._kept[key] = (graph, step)  # the step keeps alive the tensors that the graph reads
        while len(self._kept) > LIMIT:
            self._kept.popitem(last=False)


def bucket(count: int, least: int) -> int:
    """Round up to least, 1.5 · least, 2 · least, 3 · least, 4 · least, …, so that few sizes occur.

    ``least``: a power of two above 1.
    """
    size = least
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


@dataclass(frozen=True)
class BufferSize:
    """Sizes of the sampler's buffers."""

    rows: int
    width: int
    """Maximum number of response tokens."""
    columns: int
    """Maximum number of prompt and response tokens in the KV cache."""

    def holds(self, other: "BufferSize") -> bool:
        """Whether the other size is no larger in any dimension."""
        return self == self.joined(other)

    def joined(self, other: "BufferSize") -> "BufferSize":
        """Return the maximum of both sizes in each dimension."""
        return BufferSize(
            max(self.rows, other.rows),
            max(self.width, other.width),
            max(self.columns, other.columns),
        )


class FixedLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache layer with fixed addresses; a step writes one column."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.column = column
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write keys and values in place; the mask excludes columns that are still empty."""
        if key_states.shape[2] == 1 and has_layer_kernels(key_states):
            from segcredit.core.layer_kernels import store_column, store_fits

            if store_fits(key_states, value_states):
                store_column(self.keys, self.values, key_states, value_states, self.column)
                return self.keys, self.values
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values


class DecodingState:
    """Buffers of the responses being sampled: KV cache, positions, sampled tokens.

    A row of the KV cache is a slot; ``row`` is the response that is sampled in it. Unused slots
    write to one extra row behind the responses.
    """

    def __init__(self, like: DynamicCache, size: BufferSize) -> None:
        """Allocate buffers whose cache has the layers of ``like``, a filled cache of the model."""
        device = like.layers[0].keys.device
        whole = partial(torch.zeros, dtype=torch.long, device=device)
        self.size = size
        self.stored = [(_buffer(x.keys, size), _buffer(x.values, size)) for x in like.layers]
        # per slot
        self.row, self.token, self.position = (whole(size.rows) for _ in range(3))
        self.budget = whole(size.rows)
        self.alive = torch.zeros(size.rows, dtype=torch.bool, device=device)
        self.attended = torch.ones(size.rows, size.columns, dtype=torch.bool, device=device)
        # per response
        shape = (size.rows + 1, size.width)
        self.uniform = torch.zeros(shape, device=device)
        self.tokens = whole(shape)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.logp, self.entropies = (torch.zeros(shape, device=device) for _ in range(2))
        # shared, on the device; one entry each, since a 0-d index would synchronize with the host
        self.step, self.column = whole(1), whole(1)
        self.place = torch.arange(size.columns, device=device)

    @property
    def unused_row(self) -> int:
        """Row that unused slots write to."""
        return self.size.rows

    def begin(
        self,
        asked: Prefill,
        budget: Int[Tensor, " B"],
        uniform: Tensor,
    ) -> None:
        """Start sampling rows whose prompts and prefixes the model has read."""
        which = asked.which
        num, read = len(which), asked.attended.shape[1]
        for (keys, values), layer in zip(self.stored, asked.cache.layers, strict=True):
            # clear earlier batches: 0 times NaN is NaN, whatever the mask is
            keys.zero_()
            values.zero_()
            keys[:num, :, :read] = layer.keys[which]
            values[:num, :, :read] = layer.values[which]
        for x in (self.tokens, self.mask, self.logp, self.entropies, self.uniform):
            x.zero_()
        for x in (self.token, self.position, self.budget, self.alive, self.step):
            x.zero_()
        self.row.fill_(self.unused_row)
        self.row[:num] = torch.arange(num, device=self.row.device)
        self.position[:num] = asked.position[which]
        self.attended.fill_(True)
        self.attended[:num, :read] = asked.attended[which]
        self.budget[:num] = budget
        self.alive[:num] = True
        self.uniform[:num, : uniform.shape[1]] = uniform
        self.column.fill_(read)

    def cache(self, config: PreTrainedConfig, rows: int, columns: int) -> DynamicCache:
        """Return a view of the first slots and columns as a transformers cache."""
        cache = DynamicCache(config=config)
        cache.layers = [
            FixedLayer(keys[:rows, :, :columns], values[:rows, :, :columns], self.column)
            for keys, values in self.stored
        ]
        return cache

    def compact(self, rows: int, columns: int) -> None:
        """Move unfinished rows into the first slots; the first ``rows`` slots continue."""
        alive = self.alive.nonzero().flatten()
        left = len(alive)
        for stored in self.stored:
            for x in stored:
                x[:left, :, :columns] = x[:, :, :columns].index_select(0, alive)
        for x in (self.token, self.position, self.attended, self.budget, self.row, self.alive):
            x[:left] = x[alive]
        self.alive[left:] = False
        self.attended[left:] = True
        self.row[left:rows] = self.unused_row
        for x in (self.token, self.position):
            x[left:rows] = 0


def _buffer(x: Tensor, size: BufferSize) -> Tensor:
    _, heads, _, width = x.shape
    return x.new_zeros((size.rows, heads, size.columns, width))


def cache_bytes(cache: DynamicCache, size: BufferSize) -> int:
    """Compute the memory of a KV cache of this size."""
    one = sum(
        x.shape[1] * x.shape[3] * x.element_size()
        for layer in cache.layers
        for x in (layer.keys, layer.values)
    )
    return one * size.rows * size.columns


CHECK_EVERY = 16
"""Steps between two checks whether all rows have ended, which synchronize with the host."""
LEAST_ROWS, LEAST_COLUMNS = 8, 64
"""Smallest sizes for which steps are recorded."""
SMALL_MODEL = 1_000_000_000
"""Number of parameters below which launching a step's kernels takes longer than running them."""
MEMORY_SHARE = 1 / 8
"""Share of the GPU's memory that the KV cache may take with ``graphs="auto"``: it stays allocated
between calls."""
CLOSE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Maximum mean difference of logits, in standard deviations, between a step in fixed buffers and a
plain one; 0.1 in half precision."""


@dataclass(frozen=True)
class DecodingStep:
    """A decoding step of one model with fixed sampling settings."""

    model: Any
    state: DecodingState
    sampling: Sampling
    banned: Bool[Tensor, " V"] | None
    ends: Int[Tensor, " E"]
    planes: int

    def run(self, rows: int, columns: int, cache: DynamicCache) -> None:
        """Sample one more token in each of the first ``rows`` slots."""
        state = self.state
        logits = self.logits(rows, columns, cache)
        state.column.add_(1)
        state.position.add_(1)
        self.record(logits, rows)

    def logits(self, rows: int, columns: int, cache: DynamicCache) -> Float[Tensor, "R V"]:
        """Read the last sampled tokens and return the logits of the next ones."""
        state = self.state
        seen = state.attended[:rows, :columns] & (state.place[:columns] <= state.column)
        # four dimensions, so that transformers uses it unchanged
        bias = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
        bias = bias.masked_fill(~seen, -torch.inf)[:, None, None]
        positions = state.position[:rows, None]
        logits: Tensor = self.model(
            input_ids=state.token[:rows, None],
            attention_mask=bias,
            position_ids=positions if self.planes == 1 else positions.expand(self.planes, -1, -1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def record(self, logits: Float[Tensor, "R V"], rows: int) -> None:
        """Sample from the logits, record tokens, log π and H, and find the rows that have ended."""
        state = self.state
        here = (state.row[:rows], state.step)
        alive = state.alive[:rows]
        picked, chosen, h = draw(logits, state.uniform[here], self.sampling, self.banned)
        state.tokens.index_put_(here, picked)
        state.mask.index_put_(here, alive)
        state.logp.index_put_(here, chosen.to(state.logp.dtype))
        state.entropies.index_put_(here, h.to(state.entropies.dtype))
        ended = (picked[:, None] == self.ends).any(dim=-1)
        alive.logical_and_(~ended & (state.step + 1 < state.budget[:rows]))
        state.token[:rows].copy_(picked)
        state.step.add_(1)


class FixedSampler:
    """Samples batches of rows; buffers and graphs are kept for the next batch.

    Weights may change in place. If they move to other addresses, steps are recorded again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graphs = CudaGraphs(device)
        self.state: DecodingState | None = None
        self._addresses: Hashable = None
        self._checked: type[torch.nn.Module] | None = None
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def draw(
        self,
        model: Any,
        asked: Prefill,
        budget: Int[Tensor, " B"],
        uniform: Float[Tensor, "B T"],
        sampling: Sampling,
        end_tokens: tuple[int, ...],
        banned: Bool[Tensor, " V"] | None,
        stops: StopStrings | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, mask, log π and H; finished rows may have more tokens, off the mask.

        A recorded step cannot decode text, so stop strings are searched between the replays. Rows
        may have more tokens after a stop string, which the caller cuts.
        """
        num, width = uniform.shape
        read = asked.attended.shape[1]
        state = self._state_for(model, asked, width)
        state.begin(asked, budget, uniform)
        planes = asked.planes
        ends = self._ends.setdefault(end_tokens, torch.tensor(end_tokens, device=self.device))
        step = DecodingStep(model, state, sampling, banned, ends, planes)
        step.record(asked.logits[asked.which], num)
        if type(model) is not self._checked and width > 1:
            self._check(step, asked)

        settings = (sampling.temperature, sampling.top_p, sampling.top_k, end_tokens, planes)
        forbidden = None if banned is None else banned.data_ptr()
        rows, done = bucket(num, LEAST_ROWS), 1
        while done < width and (left := int(state.alive.sum())):
            if bucket(left, LEAST_ROWS) <= rows // 2:
                rows = bucket(left, LEAST_ROWS)
                state.compact(rows, read + done)
            columns = bucket(read + done, LEAST_COLUMNS)
            times = min(CHECK_EVERY, width - done, columns - (read + done) + 1)
            cache = state.cache(model.config, rows, columns)
            one = partial(step.run, rows, columns, cache)
            self.graphs.run((rows, columns, settings, forbidden), one, times)
            done += times
            if stops is not None:
                stopped = stops.check(state.tokens[:num], state.mask[:num], done)
                state.alive &= ~torch.nn.functional.pad(
                    stopped, (0, len(state.tokens) - num), value=True
                )[state.row]
        if stops is not None:  # responses of one token
            stops.check(state.tokens[:num], state.mask[:num], done)
        return (
            state.tokens[:num, :width].clone(),
            state.mask[:num, :width].clone(),
            state.logp[:num, :width].clone(),
            state.entropies[:num, :width].clone(),
        )

    def _state_for(self, model: Any, asked: Prefill, width: int) -> DecodingState:
        """Reuse the buffers if they are large enough, and the graphs if no weight has moved."""
        addresses = _addresses(model)
        needed = size_of(asked, width)
        if self.state is not None and not self.state.size.holds(needed):
            joined, self.state = needed.joined(self.state.size), None
            needed = joined if fits_device(asked.cache, joined, self.device) else needed
        if self.state is None or addresses != self._addresses:
            self.graphs = CudaGraphs(self.device)
            self._addresses = addresses
        if self.state is None:
            self.state = DecodingState(asked.cache, needed)
        return self.state

    def _check(self, step: DecodingStep, asked: Prefill) -> None:
        """Raise RuntimeError if the model's logits differ from those of a plain decoding step.

        They differ for a model that makes its own mask or takes positions from the cache's length.
        """
        state, plainly = step.state, asked.spread()
        num = len(asked.which)
        plain = Inputs(
            state.token[:num, None],
            torch.nn.functional.pad(plainly.attended, (0, 1), value=True),
            state.position[:num, None].expand(step.planes, -1, -1),
            {},
        )
        expected = step.model(
            **plain.arguments(), past_key_values=plainly.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        columns = bucket(asked.attended.shape[1] + 1, LEAST_COLUMNS)
        rows = bucket(num, LEAST_ROWS)
        cache = state.cache(step.model.config, rows, columns)
        found = step.logits(rows, columns, cache)[:num]
        off = float((found - expected).float().abs().mean())
        if off > CLOSE.get(expected.dtype, 0.1) * float(expected.float().std()):
            raise RuntimeError(
                f"with a KV cache of fixed size its logits would be wrong by {off:.2g}"
            )
        self._checked = type(step.model)


def size_of(asked: Prefill, width: int) -> BufferSize:
    """Return the buffer size for these rows, rounded up, so that similar batches share buffers."""
    read = asked.attended.shape[1]
    return BufferSize(
        rows=bucket(len(asked.which), LEAST_ROWS),
        width=bucket(width, LEAST_COLUMNS),
        columns=bucket(read + width, LEAST_COLUMNS),
    )


def fits_device(cache: DynamicCache, size: BufferSize, device: torch.device) -> bool:
    """Whether a KV cache of this size takes at most its share of the device's memory."""
    if device.type != "cuda":
        return True
    memory = torch.cuda.get_device_properties(device).total_memory
    return cache_bytes(cache, size) <= MEMORY_SHARE * memory


def _addresses(model: torch.nn.Module) -> Hashable:
    """Return the weights' addresses and active adapters: a recorded graph depends on both."""
    pointers = tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers()))
    return pointers, tuple(str(getattr(x, "_active_adapter", "")) for x in model.modules())
