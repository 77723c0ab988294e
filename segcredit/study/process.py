"""How a process that trains is started."""

import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path


def start_worker(log: Path, threads: int) -> "subprocess.Popen[str]":
    """One that is told what to do on its stdin and answers on its stdout; the rest is its log."""
    shares = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads)
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "segcredit.study.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={
                **{name: str(share) for name, share in shares.items()},
                **os.environ,
                **_same_package(),
                "TOKENIZERS_PARALLELISM": "false",
            },
            start_new_session=True,  # Ctrl-C comes through us
        )


def _same_package() -> dict[str, str]:
    """This package, also where another one is installed."""
    own = str(Path(str(files("segcredit"))).parent)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": own if before is None else os.pathsep.join([own, before])}
