"""Tensors that rest in main memory between their turns on the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

SLAB = 2**32
"""Bytes of page-locked memory taken at once: torch rounds each request up to a power of two, so
many odd ones would take up to twice their size."""


class HostCopies:
    """Sends tensors to main memory and back; they stay the same objects.

    On a GPU both ways are walked beside the computation: call ``arrived`` before what was brought
    is read on the device, and ``settled`` before what was sent is read by the host.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._home: torch.device | None = None
        self._road: torch.cuda.Stream | None = None
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """To main memory; the room there is kept for the next time."""
        for x in tensors:
            self._home = x.device
            kept = self._kept.get(id(x))
            if kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
                self._kept[id(x)] = self._room(x)
        with self._on_the_road() as road:
            for x in tensors:
                self._kept[id(x)].copy_(x.detach(), non_blocking=True)
                if road is not None:
                    x.detach().record_stream(road)  # its memory is free once it was read
        for x in tensors:
            x.data = self._kept[id(x)]

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Back to where they came from; nothing happens the first time."""
        if self._home is None:
            return
        with self._on_the_road():
            for x in tensors:
                x.data = self._kept.get(id(x), x.data).to(self._home, non_blocking=True)

    def arrived(self) -> None:
        """What the device computes from now on reads what was brought."""
        if self._road is not None:
            torch.cuda.current_stream(self._home).wait_stream(self._road)

    def settled(self) -> None:
        """What was sent is there."""
        if self._road is not None:
            self._road.synchronize()

    def kept(self, x: Tensor) -> Tensor:
        """The copy of a tensor that was sent."""
        self.settled()
        return self._kept[id(x)]

    @contextmanager
    def _on_the_road(self) -> Iterator[torch.cuda.Stream | None]:
        """Beside the computation, after what it has been asked to do so far."""
        if self._home is None or self._home.type != "cuda":
            yield None
            return
        if self._road is None:
            self._road = _road(self._home)
        self._road.wait_stream(torch.cuda.current_stream(self._home))
        with torch.cuda.stream(self._road):
            yield self._road

    def _room(self, x: Tensor) -> Tensor:
        """Page-locked where a GPU will read it; a part of a slab."""
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
def _road(device: torch.device) -> torch.cuda.Stream:
    """One for all: what one optimizer leaves on the device, the next one's state takes."""
    return torch.cuda.Stream(device)
