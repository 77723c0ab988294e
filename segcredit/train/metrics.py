"""What a step measured: sums, means and times, gathered where they arise."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


class Metrics:
    """Numbers of one step. Values added under one name are averaged, times are summed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._inside: list[float] = []
        """Of each phase that goes on, the seconds of the phases inside it."""

    def highest(self, name: str, value: Tensor | float) -> None:
        """A number of which the largest counts."""
        self._highest[name] = max(float(value), self._highest.get(name, -float("inf")))

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Numbers to be averaged over the calls that name them."""
        for name, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Wall time of a phase, the device's work included, and the memory it took.

        The time of phases inside it is theirs alone. What is still on its way
        to main memory, beside the next phase's work, is not counted.
        """
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        self._inside.append(0.0)
        yield
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        took, inside = time.perf_counter() - begin, self._inside.pop()
        self._times[phase] = self._times.get(phase, 0.0) + took - inside
        if self._inside:
            self._inside[-1] += took
        used = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
        if used is not None:
            self.highest(f"memory/{phase}", used / 2**30)

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(self._times.values())

    def result(self) -> dict[str, float]:
        """Plain numbers."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        return (
            means
            | self._highest
            | {f"time/{phase}": seconds for phase, seconds in self._times.items()}
        )


def resident_bytes() -> int | None:
    """Memory this process holds now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
