"""Use an OpenAI-compatible server: a running one, or ``vllm serve`` started by segcredit."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from segcredit.installing import install_command
from segcredit.printable import named, printable
from segcredit.rewards.client import Client, NoReplyError, require_url

START_TIMEOUT = 1800.0
"""Seconds within which a server must answer: it loads the weights and compiles."""
POLL_INTERVAL = 1.0
"""Seconds between two attempts to reach a server that is starting."""
STOP_TIMEOUT = 20.0
"""Seconds between asking a process to stop and killing it."""
_TAIL = 2**14
_TAIL_LINES = 15
_LIST_TIMEOUT = 10.0
"""Seconds within which a running server must list its models."""


class ServerError(ValueError):
    """The server cannot be started or reached, or it stopped."""


@dataclass(frozen=True)
class Server:
    """A running OpenAI-compatible server."""

    url: str
    """Base URL, such as http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model in requests."""
    process: "Program | None" = None
    """None: the server is not ours."""

    def check(self) -> None:
        """Raise ServerError if the server was started here and has stopped."""
        if self.process is not None and self.process.ended is not None:
            raise ServerError(
                f"vllm serve stopped with exit code {self.process.ended} before all questions were "
                f"answered.{self.process.last_lines()}\nRun the same command again: finished "
                f"answers are kept. If it ran out of memory, lower its use: "
                f"--serve-args '--gpu-memory-utilization 0.8 --max-model-len 8192'"
            )


class Program:
    """A process that writes to a log file and is stopped with all its children."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._begin = file.tell()
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=None if env is None else dict(env),
                start_new_session=True,
            )

    @property
    def ended(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        """Return the end of this process's output."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._begin, end - _TAIL))
            return file.read(_TAIL).decode(errors="replace")

    def last_lines(self) -> str:
        """Return the last lines for a message, with the name of the log file."""
        lines = [printable(x, 300) for x in self.tail().splitlines() if x.strip()]
        shown_lines = "".join(f"\n  {x}" for x in lines[-_TAIL_LINES:])
        return f" Last lines of {named(self.log)}:{shown_lines}"

    def stop(self) -> None:
        """Stop the process and its children."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            _signal(self._process.pid, sign)
            try:
                self._process.wait(STOP_TIMEOUT)
                break
            except subprocess.TimeoutExpired:
                continue
        _signal(self._process.pid, signal.SIGKILL)  # children that outlived it


def _signal(group: int, sign: signal.Signals) -> None:
    try:
        os.killpg(group, sign)
    except (ProcessLookupError, PermissionError):  # it has ended
        return


def connect(url: str, option: str = "--server") -> Server:
    """Use a running server; ``option`` is the command-line option that named it."""
    require_url(option, url, "http://localhost:8000/v1")
    base = url.rstrip("/")
    try:
        return Server(base, _first_model(base))
    except NoReplyError as error:
        raise ServerError(
            f"expected an OpenAI-compatible server at {printable(base, 200)} ({option}); got "
            f"{printable(str(error), 200)}. Start it (vllm serve MODEL), correct {option} URL, or "
            f"leave {option} out."
        ) from None


@contextmanager
def serve(model: str, log: Path, port: int | None = None, arguments: str = "") -> Iterator[Server]:
    """Start ``vllm serve`` on a model, wait until it answers, and stop it at the end.

    Args:
        model: A Hugging Face folder or Hub id.
        port: None: any free port.
        arguments: Further arguments of ``vllm serve``, as in a shell.
    """
    place = _free_port(port)
    command = [
        *(_find_vllm(), "serve", model, "--host", "127.0.0.1", "--port", str(place)),
        *("--served-model-name", "model", *shlex.split(arguments)),
    ]
    process = Program(command, log)
    try:
        url = f"http://127.0.0.1:{place}/v1"
        _wait(process, url)
        yield Server(url, "model", process)
    finally:
        process.stop()


def _wait(process: Program, url: str) -> None:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if process.ended is not None:
            raise ServerError(
                f"vllm serve stopped with exit code {process.ended} before it answered."
                f"{process.last_lines()}\nCorrect what it reports (--serve-args passes arguments "
                f"to it), or start a server yourself and pass --server URL."
            )
        try:
            _first_model(url)
            return
        except NoReplyError:
            time.sleep(POLL_INTERVAL)
    raise ServerError(
        f"vllm serve did not answer within {START_TIMEOUT / 60:.0f} minutes.{process.last_lines()}"
        f"\nStart it yourself and pass --server URL."
    )


def _find_vllm() -> str:
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise ServerError(
            "--driver vlmevalkit starts vllm serve, and vLLM is not installed. Type: "
            f"{install_command('vllm')}; or start an OpenAI-compatible server on any machine and "
            "pass --server http://HOST:PORT/v1"
        )
    return found


def _free_port(port: int | None) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ServerError(
                f"--port {port} is not free: {error.strerror}. Leave --port out to use any free "
                f"port; or, if the model is served there, pass --server http://127.0.0.1:{port}/v1"
            ) from None
        return int(probe.getsockname()[1])


def _first_model(url: str) -> str:
    """Return the first model of the server; raise NoReplyError if it does not answer."""
    return Client(url, attempts=1).first_model(time.monotonic() + _LIST_TIMEOUT)
