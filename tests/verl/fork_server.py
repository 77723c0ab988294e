"""Python processes of a run as forks of one that has imported what is heavy. Tests only.

    python fork_server.py -m verl.trainer.main_ppo SETTINGS…

A run of verl has some ten processes, each of which would read torch, transformers and the rest for
6 to 8 s: more than all it computes here. Those that ``sitecustomize.py`` sends here are forked
instead, with their own arguments, environment and files; what they execute is Ray's and verl's own.
"""

import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path

SERVER = "FORK_SERVER"
"""Names the socket in the environment of all that a run starts."""
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


def ask(path: str, request: dict) -> int:
    """Have a process forked that is to be this one; its exit code, when it has ended."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        body = json.dumps(request).encode()
        socket.send_fds(link, [_LENGTH.pack(len(body))], [0, 1, 2])
        link.sendall(body)
        answer = link.recv(16)
    return int(answer) if answer else 1


def serve(first: list[str]) -> list[str]:
    """Fork what is asked for until the first process has ended; a fork returns its arguments."""
    place = tempfile.mkdtemp(prefix="fork-")
    os.environ[SERVER] = f"{place}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ[SERVER])
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
        return _begin(first)
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
                    for other in (listener, ended, tell, link, *links.values()):
                        other.close()
                    os.environ.clear()
                    os.environ.update(body["environment"])
                    os.chdir(body["folder"])
                    return _begin(body["arguments"])
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
                Path(os.environ[SERVER]).unlink()
                Path(place).rmdir()
                os._exit(code if code >= 0 else 128 - code)
            if (link := links.pop(pid, None)) is not None:
                if link in {key.fileobj for key in chooser.get_map().values()}:
                    chooser.unregister(link)
                    link.send(str(code).encode())
                link.close()


def _receive(link: socket.socket) -> tuple[dict, list[int]] | None:
    head, files, *_ = socket.recv_fds(link, _LENGTH.size, 3)
    if len(head) < _LENGTH.size:
        return None
    body = bytearray()
    while len(body) < _LENGTH.unpack(head)[0]:
        if not (part := link.recv(65536)):
            return None
        body += part
    return json.loads(body), files


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


def _begin(arguments: list[str]) -> list[str]:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    return arguments


def execute(arguments: list[str]) -> None:
    """As ``python ARGUMENTS…`` does."""
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
