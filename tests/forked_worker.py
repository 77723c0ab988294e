"""A study's worker as a fork of the process that starts it, which has imported everything."""

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from segcredit_lab.study.workers import main

NAME = "study.worker"
"""What /proc calls such a process: its command line is that of the one it was forked from."""


def start_worker(log: Path, threads: int, device: str | None = None) -> "subprocess.Popen[str]":
    """In place of ``segcredit_lab.study.workers.start_worker``."""
    with log.open("w") as errors:
        return subprocess.Popen(
            ["never", "executed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            preexec_fn=_work,
        )


def _work() -> None:
    """Behind the fork: what a new program would begin with, and then the worker until its end."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # other workers' pipes, too, or none would end
    Path("/proc/self/comm").write_text(NAME)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
