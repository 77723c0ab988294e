"""Tensors that rest in main memory between their turns on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopies:
    """Sends tensors to main memory and back; they stay the same objects."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        self._home: torch.device | None = None

    def send(self, tensors: Sequence[Tensor]) -> None:
        """To main memory; the room there is kept for the next time, page-locked for speed."""
        for x in tensors:
            self._home = x.device
            kept = self._kept.get(id(x))
            if kept is None or kept.shape != x.shape or kept.dtype != x.dtype:
                kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
                self._kept[id(x)] = kept
            kept.copy_(x.detach(), non_blocking=True)
        if self._home is not None and self._home.type == "cuda":
            torch.cuda.synchronize(self._home)
        for x in tensors:
            x.data = self._kept[id(x)]

    def bring(self, tensors: Sequence[Tensor]) -> None:
        """Back to where they came from; nothing happens the first time."""
        if self._home is None:
            return
        for x in tensors:
            x.data = x.data.to(self._home, non_blocking=True)
