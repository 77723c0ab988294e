"""The device's memory in use, by whomever, watched from a thread."""

import threading
from types import TracebackType

import torch


class Peak:
    """The most that was in use at once, in GiB: vLLM's own allocations are in it, too."""

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
