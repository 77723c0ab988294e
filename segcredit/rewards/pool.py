"""Worker processes that can be killed: JSON lines over pipes, one request in flight for each.

Not multiprocessing: no pickle, and a script without a ``__main__`` guard works. Workers start when
the first request comes; one that misses its deadline is killed (SIGKILL, with its children) and
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
    """The thread of this process; a forked child has none of its parent's threads."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.orders: SimpleQueue[_Order] = SimpleQueue()
        threading.Thread(target=self._serve, name="segcredit spawner", daemon=True).start()

    def _serve(self) -> None:
        while True:
            command, environment, made = self.orders.get()
            try:
                made.set_result(_popen(command, environment))
            except BaseException as error:  # whoever waits for it wants to know
                made.set_exception(error)


_spawner: _Spawner | None = None
_lock = threading.Lock()


def _popen(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C reaches us alone, and its children can be killed with it
        bufsize=0,
    )


def spawn(command: list[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """A process with pipes to its stdin and stdout, started by a thread that never ends."""
    global _spawner
    with _lock:
        if _spawner is None or _spawner.owner != os.getpid():
            _spawner = _Spawner()
    made: Future[subprocess.Popen[bytes]] = Future()
    _spawner.orders.put((command, environment, made))
    return made.result()


START_DEADLINE = 60.0
"""Seconds until a worker must be ready: a cold disk may need some."""
MOST_FAILED_STARTS = 3
"""In a row, before the pool gives up."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Failure:
    """A request without an answer, and why."""

    kind: Literal["late", "died", "spent"]
    reason: str
    """Completes the sentence "the worker …"."""


@dataclass
class _Worker:
    """One process and what it is doing."""

    process: subprocess.Popen[bytes]
    due: float
    """When it must have said that it is ready, or answered."""
    ready: bool = False
    task: int | None = None
    """Number of the request in flight."""
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
        """Whether something is expected of it."""
        return not self.ready or self.task is not None

    def write(self) -> None:
        try:
            self.outgoing = self.outgoing[os.write(self.stdin.fileno(), self.outgoing[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outgoing = b""  # it died: reading will tell

    def read(self) -> bytes | None:
        """A whole line; b"" if there is none yet; None at the end of the process."""
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
        """Kill it and whatever it started, and wait for its end."""
        if self.process.returncode is None:  # not reaped yet, so the number is still its own
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it dies when it can
                self.process.wait(timeout=5)
        self.close_pipes()

    def close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with suppress(BrokenPipeError):
                pipe.close()

    def ending(self) -> str:
        """How it ended by itself, to complete "the worker …"."""
        code = self.process.returncode
        if code == worker_module.OUT_OF_MEMORY:
            return "ran out of memory"
        if code is not None and code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit status {code}"


class Pool:
    """Asks many questions of a few processes; answers come in the order of the questions.

    Args:
        arguments: what the worker program is told to serve.
        role: what to call it in messages.
        workers: how many processes at most.
        deadline: seconds for each answer.
        environment: variables set for the workers.
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
            self._leave_the_workers_of_a_parent()
            try:
                seconds = self.deadline if deadline is None else deadline
                return self._run(lines, seconds, inf if budget is None else budget)
            except BaseException:  # answers may be under way: nobody must take them for others
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
        for worker in self._workers:  # it may have become ready while nobody looked
            worker.due = time.monotonic() + START_DEADLINE

        def finish(worker: _Worker, answer: Any) -> None:
            nonlocal unanswered
            assert worker.task is not None
            answers[worker.task] = answer
            worker.task = None
            unanswered -= 1

        def lose(worker: _Worker, failure: Failure) -> None:
            """Replace a worker; if it had served before, its last request may not be to blame."""
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

        self._look(0.0)
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
            for worker, line in self._look(max(0.0, due - time.monotonic())):
                if line is None:
                    worker.stop()
                    lose(worker, Failure("died", worker.ending()))
                elif worker.task is not None:
                    worker.answered += 1
                    finish(worker, json.loads(line))
            for worker in [w for w in self._workers if w.waiting and w.due <= time.monotonic()]:
                limit = deadline if worker.ready else START_DEADLINE
                lose(worker, Failure("late", f"was stopped after {limit:g} s"))
        return answers

    def _look(self, timeout: float) -> list[tuple[_Worker, bytes | None]]:
        """Write what can be written, read what is there: lines, and None for an end.

        Idle workers that ended, and those that have become ready, are dealt with here.
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
        # By path and with -P: the folder's math.py must not hide Python's own.
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
                f"Its messages, if any, are on stderr."
            )

    def _leave_the_workers_of_a_parent(self) -> None:
        """After os.fork() they are still its own: forget them, close our ends of the pipes."""
        if self._owner[0] != os.getpid():
            for worker in self._workers:
                worker.close_pipes()
                worker.process.returncode = 0  # not ours to wait for
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
