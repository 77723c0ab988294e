"""The command line in real processes without its seconds of imports: a server imports once, then
forks a process per call. Each has its own id, can be killed, and says how it ended."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

LONGEST = 90.0
"""Seconds until what is waited for must have happened."""
_SERVER = """
import atexit, json, os, subprocess, sys, threading
sys.path.append(sys.argv[1])
import torch
torch.set_num_threads(1)
from segcredit.cli import main
import segcredit.commands.report, segcredit.train.progress, segcredit.evaluate.checkpoint
import segcredit.report.curves
import segcredit.train.trainer
import forked_worker, segcredit_lab.study.workers
import segcredit_lab.study.execute, segcredit_lab.study.tables
import matplotlib.backends.backend_agg, matplotlib.figure, torch.utils.tensorboard
import peft
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen2 import modeling_qwen2
get_checkpoint_conversion_mapping("qwen2")  # makes those of all models
assert threading.active_count() == 1, threading.enumerate()

def replace(module, name, value):
    getattr(module, name)  # a name that moved would silently no longer be replaced
    setattr(module, name, value)

def serve():
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        elif "shell" in order:
            answer = subprocess.run(["sh", "-c", order["shell"]]).returncode
        else:
            answer = os.fork()
            if answer == 0:
                return order
        print(json.dumps(answer), flush=True)

order = serve()
if order is not None:
    os.setsid()
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    files = [os.open(order[name], os.O_WRONLY | os.O_APPEND) for name in ("out", "err")]
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, number)
    if not order["pictures"]:  # they take longer than the run
        replace(segcredit.report.curves, "draw_curves", lambda run, path: None)
        replace(segcredit.commands.report, "draw_analyses", lambda runs: None)
    if order["forks"]:
        replace(segcredit_lab.study.workers, "start_worker", forked_worker.start_worker)
    sys.argv = ["segcredit", *order["arguments"]]
    try:
        main()
    except SystemExit as end:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)  # what is left to Python's own end takes two seconds
"""


@dataclass
class Call:
    """One process that runs the command line."""

    pid: int
    out: Path
    err: Path
    server: "Server"
    code: int | None = None

    @property
    def said(self) -> str:
        return self.out.read_text()

    @property
    def complained(self) -> str:
        return self.err.read_text()

    def alive(self) -> bool:
        """Whether it has not ended yet, waited for or not."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    def signal(self, number: signal.Signals) -> None:
        """To its process group, as a terminal's Ctrl-C goes."""
        os.killpg(self.pid, number)

    def wait_until(self, happened: Callable[[], bool]) -> bool:
        """True once it has happened, False if the process ended first."""
        until = time.monotonic() + LONGEST
        while not happened():
            if not self.alive():
                return False
            assert time.monotonic() < until, f"waited in vain: {self.said} {self.complained}"
            time.sleep(0.001)
        return True

    def wait(self) -> int:
        """How it ended; negative: by that signal."""
        if self.code is None:
            until = time.monotonic() + LONGEST
            while self.alive():
                if time.monotonic() > until:
                    self.signal(signal.SIGKILL)
                    raise AssertionError(f"it does not end: {self.said} {self.complained}")
                time.sleep(0.001)
            self.code = self.server.ask({"wait": self.pid})
        return self.code


class Server:
    """Forks calls; ``within`` is a command that the server itself runs under."""

    def __init__(self, within: Sequence[str] = ()) -> None:
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [*within, sys.executable, "-c", _SERVER, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **one_thread, "COLUMNS": "80", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._calls = 0
        atexit.register(self.stop)

    def ask(self, order: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(json.loads(self._process.stdout.readline()))

    def start(
        self,
        folder: Path,
        *arguments: object,
        pictures: bool = False,
        forks: bool = True,
        environment: dict[str, str] | None = None,
        out: Path | None = None,
        err: Path | None = None,
    ) -> Call:
        """``segcredit`` with these arguments, begun in that folder; a study's workers are forks."""
        if "--resume" in arguments and "--trust-run" not in arguments:
            arguments = (*arguments, "--trust-run")  # runs of tests name reward.py of the tests
        self._calls += 1
        name = f"call-{os.getpid()}-{self._calls}"
        out, err = out or folder / f"{name}.out", err or folder / f"{name}.err"
        for file in (out, err):
            if not file.exists():
                file.touch()
        order = {
            "arguments": [*map(str, arguments)],
            "folder": str(folder),
            "out": str(out),
            "err": str(err),
            "pictures": pictures,
            "forks": forks,
            "environment": environment or {},
        }
        return Call(self.ask(order), out, err, self)

    def run(
        self, folder: Path, *arguments: object, pictures: bool = False, forks: bool = True
    ) -> Call:
        """The same, to its end."""
        call = self.start(folder, *arguments, pictures=pictures, forks=forks)
        call.wait()
        return call

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        atexit.unregister(self.stop)


@cache
def shared_server() -> Server:
    """One for all tests: it stops with the interpreter."""
    return Server()


def start(
    folder: Path,
    *arguments: object,
    environment: dict[str, str] | None = None,
    out: Path | None = None,
    err: Path | None = None,
) -> Call:
    """``segcredit`` with these arguments, begun in that folder; what it says goes to ``out``."""
    return shared_server().start(folder, *arguments, environment=environment, out=out, err=err)


def run(folder: Path, *arguments: object, pictures: bool = False, forks: bool = True) -> Call:
    """The same, to its end."""
    return shared_server().run(folder, *arguments, pictures=pictures, forks=forks)


def several(folder: Path, size: int, *arguments: object) -> list[Call]:
    """Processes that train together, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [
        start(folder, *arguments, environment={**shared, "RANK": str(rank)}) for rank in range(size)
    ]


def run_several(folder: Path, size: int, *arguments: object) -> None:
    """The same, to their end, which must be a good one."""
    for call in several(folder, size, *arguments):
        assert call.wait() == 0, call.said + call.complained
