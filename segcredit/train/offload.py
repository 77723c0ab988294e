"""Tensors that rest in main memory between their turns on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

SLAB = 2**32
"""Bytes of page-locked memory taken at once: torch rounds each request up to a power of two, so
many odd ones would take up to twice their size."""


class HostCopies:
    """Sends tensors to main memory and back; they stay the same objects."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._home: torch.device | None = None
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        """To main memory; the room there is kept for the next time."""
        for x in tensors:
            self._home = x.device
            kept = self._kept.get(id(x))
            if kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
                kept = self._kept[id(x)] = self._room(x)
            kept.copy_(x.detach(), non_blocking=True)
        if self._home is not None and self._home.type == "cuda":
            torch.cuda.synchronize(self._home)
        for x in tensors:
            x.data = self._kept[id(x)]

    def kept(self, x: Tensor) -> Tensor:
        """The copy of a tensor that was sent."""
        return self._kept[id(x)]

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Back to where they came from; nothing happens the first time."""
        if self._home is None:
            return
        for x in tensors:
            x.data = self._kept.get(id(x), x.data).to(self._home, non_blocking=True)

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
