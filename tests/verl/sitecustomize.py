"""Read by every Python that a test's run starts: Ray's workers and verl itself become forks."""

import os
import sys

FORKED = ("setup_worker.py", "default_worker.py", "verl.trainer.main_ppo")


def _forked(server: str) -> None:
    """If this is such a process, have it forked, and end as it ends."""
    arguments = sys.orig_argv[1:]
    while arguments and arguments[0] in ("-u", "-B"):
        arguments = arguments[1:]
    program = arguments[1:2] if arguments[:1] == ["-m"] else arguments[:1]
    if not program or os.path.basename(program[0]) not in FORKED:
        return
    from fork_server import ask  # what others need not wait for

    request = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    code = ask(server, request)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if "FORK_SERVER" in os.environ:
    _forked(os.environ["FORK_SERVER"])
