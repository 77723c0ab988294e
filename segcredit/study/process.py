"""Start training processes, each on its GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(
    environment: Mapping[str, str] = os.environ, count: int | None = None
) -> tuple[str, ...]:
    """List the visible GPUs as in CUDA_VISIBLE_DEVICES: indices, UUIDs or MIG devices.

    ``count`` is the number of GPUs that CUDA sees; None: ask torch. CUDA ignores what follows the
    first invalid entry, so the list ends at its count. MIG devices are all listed, because
    a process sees at most one of them.
    """
    if count is None:
        from torch.cuda import device_count

        count = device_count()
    if count == 0:
        return ()
    if VISIBLE not in environment:
        return tuple(str(index) for index in range(count))
    named = [name.strip() for name in environment[VISIBLE].split(",")]
    mig = [name for name in named if name.startswith("MIG-")]
    return tuple(dict.fromkeys(mig or named[:count]))


def start_worker(log: Path, threads: int, device: str | None = None) -> "subprocess.Popen[str]":
    """Start a worker that reads orders on stdin and answers on stdout; stderr goes to its log.

    It sees only the GPU ``device``; None: every GPU that this process sees.
    """
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
                **({} if device is None else {VISIBLE: device}),
                "TOKENIZERS_PARALLELISM": "false",
            },
            start_new_session=True,  # Ctrl-C comes through us
        )


def _same_package() -> dict[str, str]:
    """This package, also where another one is installed."""
    own = str(Path(str(files("segcredit"))).parent)
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": own if before is None else os.pathsep.join([own, before])}
