"""Pool of worker processes that can be killed; each handles one JSON request at a time.

Unlike multiprocessing, this needs neither pickle nor a ``__main__`` guard. Workers start with the
first request. A worker that misses its deadline is killed (SIGKILL, with its children) and
replaced. POSIX only.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Literal

from segcredit.rewards import worker as worker_module
from segcredit.rewards.checks import RewardError

_Order = tuple[list[str], dict[str, str], "Future[subprocess.Popen[bytes]]"]


class _Spawner:
    """Thread that starts workers; a forked child needs its own, as threads are not inherited."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.orders: SimpleQueue[_Order] = SimpleQueue()
        threading.Thread(target=self._serve, name="segcredit spawner", daemon=True).start()

    def _serve(self) -> None:
        while True:
            command, environment, made = self.orders.get()
            try:
                made.set_result(_popen(command, environment))
            except BaseException as error:  # raised again by spawn()
                made.set_exception(error)


_spawner: _Spawner | None = None
_lock = threading.Lock()


def _popen(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C does not reach it, and its children can be killed with it
        bufsize=0,
    )


def spawn(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process with pipes to its stdin and stdout.

    A permanent thread starts it, because Linux kills it (PR_SET_PDEATHSIG) when that thread ends.
    """
    global _spawner
    with _lock:
        if _spawner is None or _spawner.owner != os.getpid():
            _spawner = _Spawner()
    made: Future[subprocess.Popen[bytes]] = Future()
    _spawner.orders.put((command, environment, made))
    return made.result()


START_DEADLINE = 60.0
"""Time limit for a worker to start, in seconds; a cold disk is slow."""
MOST_FAILED_STARTS = 3
"""Number of consecutive failed starts after which the pool gives up."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Failure:
    """Reason why a request has no answer."""

    kind: Literal["late", "died", "spent"]
    reason: str
    """Completes the sentence "the worker …"."""


@dataclass
class _Worker:
    """A worker process and its current request."""

    process: subprocess.Popen[bytes]
    due: float
    """Time by which it must be ready or answer."""
    ready: bool = False
    task: int | None = None
    """Number of the current request."""
    answered: int = 0
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def waiting(self) -> bool:
        """Whether the worker is starting or processing a request."""
        return not self.ready or self.task is not None

    def write(self) -> None:
        try:
            self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outgoing = b""  # it died, which reading detects

    def read(self) -> bytes | None:
        """Read a line; b"" if it is incomplete, None if the process has ended."""
        chunk = os.read(self.stdout.fileno(), _CHUNK)
        if not chunk:
            return None
        self.incoming += chunk
        line, newline, rest = self.incoming.partition(b"\n")
        if not newline:
            return b""
        self.incoming = rest
        return bytes(line)

    def stop(self) -> None:
        """Kill the process and its children, and wait for its end."""
        if self.process.returncode is None:  # not reaped yet, so the process id is still valid
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                self.process.wait(timeout=5)
        self.close_pipes()

    def close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):
                pipe.close()

    def ending(self) -> str:
        """Describe how the process ended, as the end of a sentence that begins "the worker …"."""
        code = self.process.returncode
        if code == worker_module.OUT_OF_MEMORY:
            return "ran out of memory"
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit status {code}"


class Pool:
    """Sends requests to a few worker processes; answers are in the order of the requests.

    Args:
        arguments: Arguments of the worker program.
        role: Name of the workers in messages.
        workers: Maximum number of processes.
        deadline: Time limit for each answer in seconds.
        environment: Environment variables of the workers.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        role: str,
        workers: int = 1,
        deadline: float = 5.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.arguments = list(arguments)
        self.role = role
        self.num_workers = workers
        self.deadline = deadline
        self.environment = environment or {}
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._owner = [os.getpid()]
        self._failed_starts = 0
        # at garbage collection, and at the end of the interpreter
        self._finalizer = weakref.finalize(self, _stop_all, self._workers, self._owner)

    def ask(
        self,
        requests: Sequence[Any],
        deadline: float | None = None,
        budget: float | None = None,
    ) -> list[Any]:
        """Return one answer, or one :class:`Failure`, per request.

        ``budget``: seconds for all requests, counted from when the first worker is ready.
        """
        lines = [json.dumps(request).encode() + b"\n" for request in requests]
        with self._lock:
            self._forget_workers_of_parent()
            try:
                seconds = self.deadline if deadline is None else deadline
                return self._run(lines, seconds, inf if budget is None else budget)
            except BaseException:  # pending answers must not be taken for those of later requests
                _stop_all(self._workers, self._owner)
                raise

    def close(self) -> None:
        """Stop all workers. A later request starts new ones."""
        with self._lock:
            _stop_all(self._workers, self._owner)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, lines: list[bytes], deadline: float, budget: float) -> list[Any]:
        answers: list[Any] = [None] * len(lines)
        seconds = [deadline] * len(lines)
        tried = [0] * len(lines)
        queue = deque(range(len(lines)))
        unanswered = len(lines)
        ends = inf
        spent = Failure("spent", f"had no time left (the batch's {budget:g} s were used up)")
        for worker in self._workers:  # it may have become ready meanwhile
            worker.due = time.monotonic() + START_DEADLINE

        def finish(worker: _Worker, answer: Any) -> None:
            nonlocal unanswered
            assert worker.task is not None
            answers[worker.task] = answer
            worker.task = None
            unanswered -= 1

        def drop(worker: _Worker, failure: Failure) -> None:
            """Drop a worker; retry its request if it had answered other requests before it died."""
            task = worker.task
            self._drop(worker)
            if not worker.ready:
                self._note_failed_start(failure.reason)
            elif task is not None:
                seconds[task] = worker.due - time.monotonic()
                if failure.kind == "died" and worker.answered and not tried[task]:
                    tried[task] += 1
                    queue.appendleft(task)
                else:
                    finish(worker, failure)

        self._exchange(0.0)
        while unanswered:
            if ends == inf and any(worker.ready for worker in self._workers):
                ends = time.monotonic() + budget
            if time.monotonic() >= ends:
                for worker in [w for w in self._workers if w.task is not None]:
                    self._drop(worker)
                    finish(worker, spent)
                while queue:
                    answers[queue.popleft()] = spent
                break
            while len(self._workers) < self.num_workers and self._num_free() < len(queue):
                self._workers.append(self._start())
            for worker in self._workers:
                if queue and worker.ready and worker.task is None:
                    worker.task = queue.popleft()
                    worker.outgoing = lines[worker.task]
                    worker.due = time.monotonic() + seconds[worker.task]
            due = min(ends, *(w.due for w in self._workers if w.waiting))
            for worker, line in self._exchange(max(0.0, due - time.monotonic())):
                if line is None:
                    worker.stop()
                    drop(worker, Failure("died", worker.ending()))
                elif worker.task is not None:
                    worker.answered += 1
                    finish(worker, json.loads(line))
            for worker in [w for w in self._workers if w.waiting and w.due <= time.monotonic()]:
                limit = deadline if worker.ready else START_DEADLINE
                drop(worker, Failure("late", f"was stopped after {limit:g} s"))
        return answers

    def _exchange(self, timeout: float) -> list[tuple[_Worker, bytes | None]]:
        """Write to and read from workers that are ready; return (worker, line or None if it ended).

        Drops idle workers that ended, and marks those that have become ready.
        """
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.stdout, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(worker.stdin, selectors.EVENT_WRITE, worker)
            events = selector.select(timeout)
        heard: list[tuple[_Worker, bytes | None]] = []
        for key, mask in events:
            worker = key.data
            if mask & selectors.EVENT_WRITE:
                worker.write()
                continue
            line = worker.read()
            if line is None and worker.ready and worker.task is None:
                self._drop(worker)
            elif line and not worker.ready:
                self._greet(worker, json.loads(line))
            elif line != b"":
                heard.append((worker, line))
        return heard

    def _greet(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "error" in message:
            raise RewardError(f"the {self.role} cannot start: {message['error']}{_hint(message)}")
        worker.ready = True
        self._failed_starts = 0

    def _num_free(self) -> int:
        return sum(worker.task is None for worker in self._workers)

    def _start(self) -> _Worker:
        # -P keeps the folder off the path, because its math.py would hide Python's own
        program = [_python(), "-P", str(Path(worker_module.__file__).resolve())]
        process = spawn([*program, str(os.getpid()), *self.arguments], self.environment)
        worker = _Worker(process, due=time.monotonic() + START_DEADLINE)
        os.set_blocking(worker.stdin.fileno(), False)
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.stop()
        self._workers.remove(worker)

    def _note_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._failed_starts = 0
            raise RewardError(
                f"the {self.role} cannot start: its process {reason}, {MOST_FAILED_STARTS} times. "
                f"See stderr for its messages."
            )

    def _forget_workers_of_parent(self) -> None:
        """After os.fork(), close the pipes of the workers that belong to the parent."""
        if self._owner[0] != os.getpid():
            for worker in self._workers:
                worker.close_pipes()
                worker.process.returncode = 0  # only the parent can wait for it
            self._workers.clear()
            self._owner[0] = os.getpid()


def _stop_all(workers: list[_Worker], owner: list[int]) -> None:
    if owner[0] == os.getpid():
        while workers:
            workers.pop().stop()


def _hint(message: dict[str, Any]) -> str:
    packages = {"math_verify": "math-verify", "latex2sympy2_extended": "math-verify"}
    missing = packages.get(message.get("missing") or "")
    return f". Type: pip install '{missing}>=0.9'" if missing else ""


def _python() -> str:
    if not sys.executable:
        raise RewardError(
            "rewards are graded in processes of the Python interpreter, but sys.executable is "
            "empty. Set sys.executable to its path."
        )
    return sys.executable
