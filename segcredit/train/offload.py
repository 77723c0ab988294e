"""Offload tensors to CPU memory between uses, overlapping transfers with computation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

SLAB = 2**32
"""Bytes of page-locked memory allocated at once: torch rounds each request up to a power of two, so
many small requests could take up to twice their size."""


class CpuOffload:
    """Moves tensors to CPU memory and back; they remain the same tensor objects.

    On a GPU, transfers run on their own stream. Call ``wait_on_device`` before the device reads
    loaded tensors, and ``synchronize`` before the CPU reads offloaded ones.
    """

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def offload(self, tensors: Sequence[Tensor]) -> None:
        """Move tensors to CPU memory; the memory there is reused next time."""
        for x in tensors:
            self._device = x.device
            copy = self._copies.get(id(x))
            if copy is None or copy.shape != x.shape or copy.dtype != x.dtype:
                self._copies[id(x)] = self._allocate(x)
        with self._on_stream() as stream:
            for x in tensors:
                self._copies[id(x)].copy_(x.detach(), non_blocking=True)
                if stream is not None:
                    x.detach().record_stream(stream)  # free its device memory only after the copy
        for x in tensors:
            x.data = self._copies[id(x)]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Move tensors back to their device; a no-op before the first ``offload``."""
        if self._device is None:
            return
        with self._on_stream():
            for x in tensors:
                x.data = self._copies.get(id(x), x.data).to(self._device, non_blocking=True)

    def wait_on_device(self) -> None:
        """Make later work on the device wait for the tensors being loaded."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Block until all transfers are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def cpu_copy(self, x: Tensor) -> Tensor:
        """Return the CPU copy of an offloaded tensor."""
        self.synchronize()
        return self._copies[id(x)]

    @contextmanager
    def _on_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Run transfers on their own stream, after the work queued so far."""
        if self._device is None or self._device.type != "cuda":
            yield None
            return
        if self._stream is None:
            self._stream = _transfer_stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield self._stream

    def _allocate(self, x: Tensor) -> Tensor:
        """Allocate a CPU tensor like this one; for a GPU, page-locked memory from a slab."""
        if not x.is_cuda:
            return torch.empty_like(x, requires_grad=False)
        size = -(-x.nbytes // 512) * 512
        if self._used + size > len(self._slab):
            self._slab = torch.empty(max(SLAB, size), dtype=torch.uint8, pin_memory=True)
            self._used = 0
        part = self._slab[self._used : self._used + x.nbytes]
        self._used += size
        return part.view(x.dtype).view(x.shape)


@cache
def _transfer_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all optimizers share, so that one can reuse memory another freed."""
    return torch.cuda.Stream(device)
