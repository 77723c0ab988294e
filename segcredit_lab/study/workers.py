"""Training processes of a study: a pool of workers, each on its GPU."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from segcredit.config import Recipe
from segcredit.evaluate import Evaluation
from segcredit.train.loop import Silent, StopTraining

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(
    environment: Mapping[str, str] = os.environ, count: int | None = None
) -> tuple[str, ...]:
    """List the visible GPUs as in CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG devices.

    ``count`` is the number of GPUs that CUDA sees; None: ask torch. CUDA ignores all entries after
    the first invalid one, so only the first ``count`` entries are listed. MIG devices are all
    listed, because a process sees at most one of them.
    """
    if count is None:
        from torch.cuda import device_count

        count = device_count()
    if count == 0:
        return ()
    if VISIBLE not in environment:
        return tuple(str(index) for index in range(count))
    named = [name.strip() for name in environment[VISIBLE].split(",")]
    mig = [name for name in named if name.startswith("MIG-")]
    return tuple(dict.fromkeys(mig or named[:count]))


def start_worker(log: Path, threads: int, device: str | None = None) -> "subprocess.Popen[str]":
    """Start a worker that gets runs on stdin and reports on stdout; stderr goes to its log.

    The worker sees only the GPU ``device``, or every GPU that this process sees if it is None.
    """
    shares = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "segcredit_lab.study.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={
                **{name: str(share) for name, share in shares.items()},
                **os.environ,
                **_same_package(),
                **({} if device is None else {VISIBLE: device}),
                "TOKENIZERS_PARALLELISM": "false",
            },
            start_new_session=True,  # this process forwards Ctrl-C
        )


def _same_package() -> dict[str, str]:
    """Make workers import this copy of the package even if another one is installed."""
    own = str(Path(str(files("segcredit"))).parent)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": own if before is None else os.pathsep.join([own, before])}


FRESH_AFTER = 900.0
"""Seconds of training after which a process is replaced: short runs share one process start, and
long runs leave no memory behind for the next."""
PATIENCE = 60.0
"""Seconds that a process has to finish its step when it is asked to stop."""
TAIL = 2000
"""Characters at the end of a dead process's log that are searched for an error."""


@dataclass(frozen=True)
class Order:
    """One run for a worker to train to its end."""

    name: str
    recipe: dict[str, Any]
    folder: Path
    keep: tuple[str, ...]
    """Parts of the last checkpoint to keep."""


@dataclass(eq=False)
class Worker:
    """One training process."""

    process: "subprocess.Popen[str]"
    log: Path
    device: str | None = None
    """GPU that the process uses; None: all visible GPUs."""
    order: Order | None = None
    busy_since: float = 0.0
    used: float = 0.0
    """Seconds of training so far."""

    def give(self, order: Order, threads: int) -> None:
        """Send a run to the process."""
        assert self.process.stdin is not None
        self.order, self.busy_since = order, time.monotonic()
        message = {
            "recipe": order.recipe,
            "folder": str(order.folder),
            "keep": order.keep,
            "threads": threads,
        }
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def last_line(self) -> str:
        """Return the last line of its log, for a process that died without a message."""
        try:
            text = self.log.read_text(errors="replace")[-TAIL:]
        except OSError:
            return ""
        lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass
class WorkerPool:
    """Pool of at most ``jobs`` training processes, each with one GPU and its share of the cores."""

    jobs: int
    logs: Path
    devices: tuple[str, ...] = field(default_factory=visible_devices)
    """GPUs to spread the processes over; empty: every process sees the same GPUs as this one."""
    workers: list[Worker] = field(default_factory=list)
    _events: "SimpleQueue[tuple[Worker, dict[str, Any]]]" = field(default_factory=SimpleQueue)
    _started: int = 0

    @property
    def threads(self) -> int:
        """Threads of each process, unless the recipe sets them."""
        return max(1, (os.cpu_count() or 1) // self.jobs)

    @property
    def free(self) -> int:
        """Number of runs that can start now."""
        return self.jobs - sum(worker.order is not None for worker in self.workers)

    def begin(self, order: Order) -> None:
        """Start a run on the GPU with the fewest runs, in an idle or a new process."""
        worker = self._worker(order)
        try:
            worker.give(order, self.threads)
        except OSError:  # the process died while idle
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
        """Return the number of runs on a GPU."""
        return sum(x.order is not None and x.device == device for x in self.workers)

    def events(self, wait: float) -> Iterator[tuple[Order, dict[str, Any]]]:
        """Yield new events; wait up to ``wait`` seconds for the first."""
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
        """Ask every process to finish its step and save a checkpoint."""
        for worker in self.workers:
            if worker.order is not None:
                worker.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End all processes; unfinished runs are resumed later."""
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
        last = worker.last_line()
        message = f"its process ended with code {code}{': ' if last else ''}{last}"
        self._events.put((worker, {"event": "gone", "message": message}))

    def _retire(self, worker: Worker) -> None:
        """Close stdin to end the process; keep the log only if it died by itself."""
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
    sections = (recipe.get(name) or {} for name in ("model", "rollout"))
    return any(":" in str(section.get("device")) for section in sections)


WAIT = 0.5
"""Seconds between two attempts to lock a run that another process holds."""


class Channel:
    """Writes events as JSON lines to the original stdout."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # all other output goes to the log

    def send(self, event: str, **facts: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()


def main() -> None:
    """Train runs from stdin until it ends."""
    channel = Channel()
    orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    channel.send("ready")
    while True:
        order = orders.get()
        try:
            run_order(order, channel)
        except Exception as error:
            traceback.print_exc()
            channel.send("failed", message=_message(error))
        gc.collect()
        _free_memory()


def run_order(order: dict[str, Any], channel: Channel) -> None:
    """Train one run to its end, resuming it if needed; wait while another process has it."""
    import torch

    from segcredit.runlog.files import LockedError
    from segcredit_lab.study.store import claim

    torch.set_num_threads(int(order["threads"]))
    own = Path(order["folder"])
    while True:
        try:
            lock = claim(own)
            break
        except LockedError:  # the other process finishes it or leaves it
            channel.send("elsewhere")
            time.sleep(WAIT)
    try:
        _train_and_finish(order, channel)
    finally:
        lock.release()


def _train_and_finish(order: dict[str, Any], channel: Channel) -> None:
    from segcredit.config import parse_recipe
    from segcredit.train.trainer import Trainer
    from segcredit_lab.study.store import existing_folder, finish, is_finished, record_of

    folder = existing_folder(Path(order["folder"]))
    if record_of(folder) is None:
        trainer = Trainer.from_recipe(parse_recipe(order["recipe"], folder.name))
        resume = (folder / "config.yaml").is_file()
        try:
            trainer.train(folder, resume=resume, watch=ProgressReporter(channel.send))
        except StopTraining:
            channel.send("stopped")
            return
    if not is_finished(folder):
        finish(folder, order["keep"])
    channel.send("done")


def _listen(orders: "SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)


def _message(error: Exception) -> str:
    """Write the error message; with the exception type unless the message is written for users."""
    text = str(error).strip()
    plain = isinstance(error, ValueError | OSError) or type(error).__name__ == "NotFinite"
    return text if plain and text else f"{type(error).__name__}: {text}"


def _free_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class ProgressReporter(Silent):
    """Reports the progress of a run as events."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._total = 0

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        self._total = recipe.total_steps
        self._send("step", step=step, total=self._total)

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        self._send("step", step=step, total=self._total)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._send("evaluated", step=step, accuracy=evaluation.sampled, reward=evaluation.reward)

    def note(self, text: str) -> None: ...


if __name__ == "__main__":
    main()
