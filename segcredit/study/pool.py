"""Several processes that train side by side, and what they say."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from segcredit.study.process import start_worker, visible_devices

FRESH_AFTER = 900.0
"""Seconds of training after which a process is replaced: short runs share its start, long ones
leave nothing behind for the next."""
PATIENCE = 60.0
"""Seconds for a process to finish its step when it is asked to stop."""
TAIL = 2000
"""Characters of a dead process's log that are searched for its last words."""


@dataclass(frozen=True)
class Order:
    """One run, for a process to bring to its end."""

    name: str
    recipe: dict[str, Any]
    folder: Path
    keep: tuple[str, ...]
    """Parts of its last checkpoint."""


@dataclass(eq=False)
class Worker:
    """One process."""

    process: "subprocess.Popen[str]"
    log: Path
    device: str | None = None
    """GPU that the process uses; None: all visible GPUs."""
    order: Order | None = None
    busy_since: float = 0.0
    used: float = 0.0
    """Seconds of training so far."""

    def give(self, order: Order, threads: int) -> None:
        """Have it train."""
        assert self.process.stdin is not None
        self.order, self.busy_since = order, time.monotonic()
        told = {
            "recipe": order.recipe,
            "folder": str(order.folder),
            "keep": order.keep,
            "threads": threads,
        }
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def last_words(self) -> str:
        """The end of its log, for one that died without a message."""
        try:
            text = self.log.read_text(errors="replace")[-TAIL:]
        except OSError:
            return ""
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass
class Pool:
    """At most ``jobs`` processes at a time, each with its share of the cores and one GPU."""

    jobs: int
    logs: Path
    devices: tuple[str, ...] = field(default_factory=visible_devices)
    """GPUs to spread the processes over; empty: every process sees the same GPUs as this one."""
    workers: list[Worker] = field(default_factory=list)
    _events: "SimpleQueue[tuple[Worker, dict[str, Any]]]" = field(default_factory=SimpleQueue)
    _started: int = 0

    @property
    def threads(self) -> int:
        """Of each process, where the recipe does not say."""
        return max(1, (os.cpu_count() or 1) // self.jobs)

    @property
    def free(self) -> int:
        """How many more runs can begin."""
        return self.jobs - sum(worker.order is not None for worker in self.workers)

    def begin(self, order: Order) -> None:
        """Start a run on the GPU with the fewest runs, in an idle or a new process."""
        worker = self._worker(order)
        try:
            worker.give(order, self.threads)
        except OSError:  # it died while it was idle
            worker.order = None
            self._retire(worker)
            self._start(worker.device).give(order, self.threads)

    def _worker(self, order: Order) -> Worker:
        choice: tuple[str | None, ...] = self.devices
        if not choice or _names_its_gpu(order.recipe):
            choice = (None,)
        best = min(choice, key=self._load)
        idle = [worker for worker in self.workers if worker.order is None]
        usable = sorted(
            (worker for worker in idle if worker.device in choice),
            key=lambda worker: self._load(worker.device),
        )
        full = len(self.workers) >= self.jobs
        if usable and (full or self._load(usable[0].device) == self._load(best)):
            return usable[0]
        if full:
            self._retire(idle[0])
        return self._start(best)

    def _load(self, device: str | None) -> int:
        """Number of runs on a GPU."""
        return sum(x.order is not None and x.device == device for x in self.workers)

    def events(self, wait: float) -> Iterator[tuple[Order, dict[str, Any]]]:
        """What has happened since, waiting a moment for the first."""
        timeout: float | None = wait
        while True:
            try:
                worker, event = self._events.get(timeout=timeout)
            except Empty:
                return
            timeout = 0.0
            order = worker.order
            if event["event"] in ("done", "failed", "stopped", "gone"):
                worker.order = None
                worker.used += time.monotonic() - worker.busy_since
            if event["event"] == "gone" or (worker.order is None and worker.used > FRESH_AFTER):
                self._retire(worker)
            if order is not None and event["event"] != "ready":
                yield order, event

    def stop(self) -> None:
        """Let every process finish its step and save."""
        for worker in self.workers:
            if worker.order is not None:
                worker.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End all processes; what they were doing is resumed another time."""
        for worker in [*self.workers]:
            self._retire(worker)

    def _start(self, device: str | None) -> Worker:
        self._started += 1
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{os.getpid()}-{self._started}.txt"
        worker = Worker(start_worker(log, self.threads, device), log, device)
        self.workers.append(worker)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            self._events.put((worker, json.loads(line)))
        code = worker.process.wait()
        said = worker.last_words()
        message = f"its process ended with code {code}{': ' if said else ''}{said}"
        self._events.put((worker, {"event": "gone", "message": message}))

    def _retire(self, worker: Worker) -> None:
        """Its stdin ends, and so does it; only one that died by itself leaves its log."""
        if worker in self.workers:
            self.workers.remove(worker)
        died = worker.process.poll() not in (None, 0)
        assert worker.process.stdin is not None
        try:
            worker.process.stdin.close()
            worker.process.wait(timeout=PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            worker.process.kill()
            worker.process.wait()
        if not died:
            worker.log.unlink(missing_ok=True)


def _names_its_gpu(recipe: dict[str, Any]) -> bool:
    """Whether a recipe names a GPU by index, such as cuda:1, among all visible GPUs."""
    return ":" in str((recipe.get("model") or {}).get("device"))
