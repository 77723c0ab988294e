"""CUDA graphs: a step is recorded once, then repeated without Python and without its launches."""

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

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
