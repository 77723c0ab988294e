"""Measure how many small runs should share one GPU: steps per second of 1, 4 and 8 processes.

    python benchmarks/side_by_side.py                          # 512 responses of 300 tokens, SAPO
    python benchmarks/side_by_side.py --copies 1 8 12 --mps    # also with NVIDIA MPS
    python benchmarks/side_by_side.py --small                  # a minute on a CPU

Each process trains the model of small_step.py independently. The measurement starts when all
processes have completed their warm-up steps, and takes the same time in each. ``--mps`` starts the
NVIDIA MPS service, which runs kernels of several processes concurrently, and measures again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from small_step import add_arguments, make_state, one_step, parse, print_row

WIDTHS = (12, 14, 10, 12, 12, 12, 12)
PHASES = ("sample", "annotate", "update", "process")


def child(given: argparse.Namespace) -> None:
    """Run one process: warm up, wait for the others, count steps."""
    here = Path(given.meet)
    state = make_state(given, graphs=True)
    for _ in range(given.warmup):
        one_step(state)
    (here / f"ready-{given.number}").touch()
    while len(list(here.glob("ready-*"))) < given.copies[0]:
        time.sleep(0.01)
    seconds: list[dict[str, float]] = []
    begun = time.perf_counter()
    while time.perf_counter() - begun < given.seconds:
        seconds.append(one_step(state))
    took = time.perf_counter() - begun
    phases = {name: sum(x[name] for x in seconds) / len(seconds) for name in PHASES}
    (here / f"found-{given.number}").write_text(json.dumps({"rate": len(seconds) / took, **phases}))


def measure(given: argparse.Namespace, copies: int, arguments: list[str]) -> dict[str, float]:
    """Run this many processes; return total steps per second and mean seconds of the phases."""
    with tempfile.TemporaryDirectory() as meet:
        own = [sys.executable, __file__, *arguments, "--meet", meet, "--copies", str(copies)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen([*own, "--number", str(n)], env=environment) for n in range(copies)
        ]
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            time.sleep(0.1)
        if any(process.poll() != 0 for process in running):
            for process in running:  # they would wait forever for the failed one
                process.kill()
            raise SystemExit(f"one of {copies} processes failed; see its message above")
        found: list[dict[str, Any]] = [json.loads(x.read_text()) for x in Path(meet).glob("found*")]
    mean = {key: sum(x[key] for x in found) / copies for key in found[0]}
    return {**mean, "rate": sum(x["rate"] for x in found)}


def table(given: argparse.Namespace, name: str, alone: float | None, arguments: list[str]) -> float:
    """Print the rows for one sharing mode; return the rate of a single process."""
    for copies in given.copies:
        found = measure(given, copies, arguments)
        alone = alone or found["rate"]
        print_row(
            f"{copies} {name}",
            f"{found['rate']:.2f}",
            f"{found['rate'] / alone:.2f}",
            *(f"{1e3 * found[key]:.0f}" for key in PHASES),
            widths=WIDTHS,
        )
    assert alone is not None
    return alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, nargs="+", help="1 4 8; with --small 1 2")
    parser.add_argument("--mps", action="store_true", help="also measure with NVIDIA MPS")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    add_arguments(parser, "bfloat16")
    given = parse(parser)
    given.seconds = 3.0 if given.small else given.seconds
    given.copies = given.copies or ([1, 2] if given.small else [1, 4, 8])
    if given.meet:
        child(given)
        return
    arguments = [x for x in sys.argv[1:] if x != "--mps"]
    print(f"{given.rows} responses of {given.tokens} tokens, {given.algorithm}, {given.dtype}")
    titles = ("processes", "steps/s", "gain", "sample, ms", "annotate", "update", "CPU, ms")
    print_row(*titles, widths=WIDTHS)
    alone = table(given, "plain", None, arguments)
    service = shutil.which("nvidia-cuda-mps-control")
    if given.mps and service is None:
        print("MPS: nvidia-cuda-mps-control is not installed")
    elif given.mps and service is not None:
        subprocess.run([service, "-d"], check=True)
        try:
            table(given, "MPS", alone, arguments)
        finally:
            subprocess.run([service], input="quit\n", text=True, check=True)


if __name__ == "__main__":
    main()
