"""Measure peak GPU memory of the whole device, over all processes, from a thread."""

import threading
from types import TracebackType

import torch


class Peak:
    """Context manager that records peak memory in GiB, including vLLM's own allocations."""

    def __init__(self, every: float = 0.02) -> None:
        self.every = every
        self.gib = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Peak":
        if torch.cuda.is_available():
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self.every):
            free, total = torch.cuda.mem_get_info()
            self.gib = max(self.gib, (total - free) / 2**30)
