"""Python processes of a run as forks of one that has imported what is heavy. Tests only.

    python fork_server.py -m verl.trainer.main_ppo SETTINGS…

A run of verl has some ten processes, each of which would read torch, transformers and the rest for
6 to 8 s: more than all it computes here. Those that ``sitecustomize.py`` sends here are forked
instead, with their own arguments, folder, environment and standard files; what they execute is
Ray's and verl's own. What Python reads once, as it starts, is the server's: its path, its hash
seed, the number of threads. So is the process group, and whoever kills that kills all of a run.
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import uuid
from pathlib import Path

SERVER = "FORK_SERVER"
"""Names the socket in the environment of all that a run starts; it has no file that could stay."""
HEAVY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "tensordict",
    "transformers",
    "datasets",
    "peft",
    "hydra",
    "fastapi",
    "aiohttp",
    "torchdata.stateful_dataloader",
)
"""Not Ray, which reads the environment of its process, nor what imports it."""
_LENGTH = struct.Struct("!I")


def ask(name: str, request: dict) -> int:
    """Have a process forked that is to be this one; its exit code, when it has ended."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"\0{name}")
        body = json.dumps(request).encode()
        socket.send_fds(link, [_LENGTH.pack(len(body))], [0, 1, 2])
        link.sendall(body)
        answer = link.recv(16)
    return int(answer) if answer else 1


def serve(first: list[str]) -> list[str]:
    """Fork what is asked for until the first process has ended; a fork returns its arguments.

    The server ends as the first process did: with its code, or 128 and the number of its signal.
    """
    os.environ[SERVER] = f"fork-{uuid.uuid4()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{os.environ[SERVER]}")
    listener.listen(64)
    ended, tell = socket.socketpair()
    tell.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    chooser = selectors.DefaultSelector()
    chooser.register(listener, selectors.EVENT_READ)
    chooser.register(ended, selectors.EVENT_READ)
    links: dict[int, socket.socket] = {}
    main = os.fork()
    if main == 0:
        return _begin(first, listener, ended, tell)
    while True:
        for key, _ in chooser.select():
            if key.fileobj is listener:
                link, _ = listener.accept()
                if (request := _receive(link)) is None:
                    link.close()
                    continue
                body, files = request
                pid = os.fork()
                if pid == 0:
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    os.environ.clear()
                    os.environ.update(body["environment"])
                    os.chdir(body["folder"])
                    return _begin(body["arguments"], listener, ended, tell, link, *links.values())
                for file in files:
                    os.close(file)
                links[pid] = link
                chooser.register(link, selectors.EVENT_READ)
            elif key.fileobj is ended:
                ended.recv(4096)
            else:  # whoever asked was killed
                pid = next(pid for pid, link in links.items() if link is key.fileobj)
                chooser.unregister(key.fileobj)
                os.kill(pid, signal.SIGKILL)
        for pid, code in _ended():
            if pid == main:
                os._exit(code if code >= 0 else 128 - code)
            if (link := links.pop(pid, None)) is not None:
                if link in {key.fileobj for key in chooser.get_map().values()}:
                    chooser.unregister(link)
                    with contextlib.suppress(OSError):  # who asked is gone, too
                        link.send(str(code).encode())
                link.close()


def _receive(link: socket.socket) -> tuple[dict, list[int]] | None:
    head, files, *_ = socket.recv_fds(link, _LENGTH.size, 3)
    body, wanted = bytearray(), _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
    while len(body) < wanted and (part := link.recv(65536)):
        body += part
    if wanted and len(body) == wanted:
        return json.loads(body), files
    for file in files:  # who asked was killed
        os.close(file)
    return None


def _ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def _begin(arguments: list[str], *servers: socket.socket) -> list[str]:
    """In a fork: leave what is the server's."""
    signal.set_wakeup_fd(-1)
    for link in servers:
        link.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    return arguments


def execute(arguments: list[str]) -> None:
    """As ``python ARGUMENTS…`` does, but that other modules do not find the code of ``-c``."""
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[0] = os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path[0] = ""
            exec(code, {"__name__": "__main__"})
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    for name in HEAVY:
        importlib.import_module(name)
    execute(serve(sys.argv[1:]))
