"""Metrics of one step: means, maxima and times."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor


class Metrics:
    """Metrics of one step. Values added under one name are averaged, times are summed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._inside: list[float] = []
        """For each phase in progress, the seconds of the phases inside it."""

    def highest(self, name: str, value: Tensor | float) -> None:
        """Add a value of which the maximum is kept."""
        self._highest[name] = max(float(value), self._highest.get(name, -float("inf")))

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add values, which are averaged over the calls that name them."""
        for name, value in values.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Measure a phase's wall time, including the device's work, and its peak memory.

        Time of nested phases counts for these alone. Copies to main memory that overlap with the
        next phase are not counted.
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
        """Time of all phases."""
        return sum(self._times.values())

    def result(self) -> dict[str, float]:
        """Return all metrics as plain numbers."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        return (
            means
            | self._highest
            | {f"time/{phase}": seconds for phase, seconds in self._times.items()}
        )


def resident_bytes() -> int | None:
    """Return this process's resident memory; None if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
