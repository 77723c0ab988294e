"""Offload tensors to CPU memory between uses, overlapping transfers with computation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SLAB = 2**32
"""Bytes of page-locked memory allocated at once: torch rounds each request up to a power of two, so
many small requests could take up to twice their size."""
ALIGNED = 512
"""Parts begin at multiples of this number of bytes."""


def available_memory() -> int | None:
    """Return the bytes of CPU memory that can be allocated without swapping; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (found,) = (x.split()[1] for x in lines if x.startswith("MemAvailable:"))
        return int(found) * 1024
    except (OSError, ValueError):  # not Linux
        return None


def page_locked(size: int) -> Tensor:
    """Allocate page-locked memory; raise an error if it does not fit, since the kernel would kill.

    Raises:
        ValueError: Less CPU memory is available.
    """
    left = available_memory()
    if left is not None and size > left:
        raise ValueError(
            f"memory.offload_optimizer needs {size / 2**30:.1f} GiB more of CPU memory; "
            f"{left / 2**30:.1f} GiB are available. It needs up to 12 bytes for each weight that "
            "is trained, of policy and critic. Use a machine with more memory, "
            "memory.offload_optimizer=false, model.lora.rank=32, or several GPUs with "
            "memory.shard=true."
        )
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Slabs:
    """Large pieces of memory, divided into parts that are never freed.

    Args:
        make: Allocates a piece of this number of bytes.
    """

    def __init__(self, make: Callable[[int], Tensor] = page_locked) -> None:
        self._make = make
        self._slabs: list[tuple[Tensor, int]] = []
        """Each with the number of bytes in use."""

    def take(self, size: int) -> Tensor:
        """Return a part, from the first slab that has room for it."""
        room = (n for n, (slab, used) in enumerate(self._slabs) if used + size <= len(slab))
        number = next(room, len(self._slabs))
        if number == len(self._slabs):
            self._slabs.append((self._make(max(SLAB, size)), 0))
        slab, used = self._slabs[number]
        self._slabs[number] = slab, used + -(-size // ALIGNED) * ALIGNED
        return slab[used : used + size]


class CpuOffload:
    """Moves tensors to CPU memory and back; they remain the same tensor objects.

    On a GPU, transfers run on their own stream. Call ``wait_on_device`` before the device reads
    loaded tensors, and ``synchronize`` before the CPU reads offloaded ones.
    """

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        self._slabs = Slabs()

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
        return self._slabs.take(x.nbytes).view(x.dtype).view(x.shape)


@cache
def _transfer_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all optimizers share, so that one can reuse memory another freed."""
    return torch.cuda.Stream(device)
