"""Starting processes from one thread that never ends.

A worker asks Linux to be killed when its parent ends, and to Linux the parent is the *thread* that
started it. So a worker must not be started by whichever thread happens to need it first.
"""

import os
import subprocess
import threading
from concurrent.futures import Future
from queue import SimpleQueue

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
