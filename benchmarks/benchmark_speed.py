"""Measure ``segcredit benchmark`` by vLLM beside VLMEvalKit's own loop, in questions per second.

    python benchmarks/benchmark_speed.py --data bench --environment vlmevalkit     # 3B, on a GPU
    python benchmarks/benchmark_speed.py --data bench --environment vlmevalkit --sets wemath
    python benchmarks/benchmark_speed.py --data bench --environment vlmevalkit --size small \
        --engine hf --server http://localhost:8000/v1 --limit 8 --tokens 4  # smoke test on a CPU

--data has VLMEvalKit's TSV files, or the git repositories of LogicVista and We-Math (as
logicvista/data and wemath/data), from which the files are made. --environment is a virtual
environment with ms-vlmeval (docs/appendix/benchmarks.md). Without --server, ``vllm serve`` is
started on the same checkpoint after segcredit's engine has ended.

The weights are random, with the real shapes, so almost no response ends early: both loops sample
--tokens tokens for every question, with temperature 0.6 and top-p 0.95, and reading and sending the
images is part of their time. Start-up (weights, compilation) is not. VLMEvalKit's seconds are those
of its own progress bar. Each loop answers all sets in one command, whose whole time is printed too.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from real_shapes import policy_for, tokenizer_for

from segcredit.benchmarks.run import load_questions
from segcredit.benchmarks.vlmevalkit import TOOLKIT

TESTS = Path(__file__).resolve().parent.parent / "tests"
CLI = "from segcredit.cli import main; main()"
SETS = ("logicvista", "wemath")
LINE = re.compile(r" (\w+): (\d+)/\d+")
"""A line of progress of segcredit benchmark: set and finished answers."""
BAR = re.compile(r"(\d+)/(\d+) \[([\d:]+)<")
"""VLMEvalKit's progress bar: finished, total, elapsed time."""


@dataclass(frozen=True)
class Speed:
    """Time of one loop over one set."""

    questions: int
    seconds: float

    def __str__(self) -> str:
        rate = self.questions / self.seconds if self.seconds else float("nan")
        return f"{self.questions:>10}{self.seconds:>10.1f}{rate:>14.2f}"


def tables_in(data: Path, names: Sequence[str], folder: Path) -> Path:
    """Return a folder with VLMEvalKit's TSV files, which are made in ``folder`` if necessary."""
    if all((data / f"{TOOLKIT[name].dataset}.tsv").is_file() for name in names):
        return data
    sys.path[:0] = [str(TESTS / "benchmarks"), str(TESTS)]
    import toolkit_tables

    write = {"logicvista": toolkit_tables.logicvista_tsv, "wemath": toolkit_tables.wemath_tsv}
    folder.mkdir(parents=True)
    for name in names:
        write[name](folder, source=data)
    return folder


def save_model(size: str, texts: Sequence[str], folder: Path) -> None:
    """Save a checkpoint of Qwen2.5-VL with random weights, and free the GPU again."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    policy = policy_for(size, True, tokenizer_for(texts), "cuda" if on_gpu else "cpu", dtype)
    policy.save(folder)
    del policy
    if on_gpu:
        torch.cuda.empty_cache()


def command(given: argparse.Namespace, names: Sequence[str], data: Path, out: Path) -> list[str]:
    """Return the command that both loops share."""
    start = [sys.executable, "-c", CLI, "benchmark", str(given.model), "--sets", ",".join(names)]
    start += ["--data", str(data), "--paper", "--max-tokens", str(given.tokens), "-o", str(out)]
    return [*start, *(["--limit", str(given.limit)] if given.limit else [])]


def run(typed: Sequence[str]) -> dict[str, list[tuple[float, int]]]:
    """Run a command; return by set the time and the count of each line of progress."""
    seen: dict[str, list[tuple[float, int]]] = {}
    with subprocess.Popen(
        typed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line.rstrip()}", flush=True)
            if match := LINE.search(line):
                seen.setdefault(match.group(1), []).append(
                    (time.perf_counter(), int(match.group(2)))
                )
    if process.returncode:
        raise SystemExit(f"the command above failed with exit code {process.returncode}.")
    return seen


def measure_own(
    given: argparse.Namespace, names: Sequence[str], data: Path, out: Path
) -> dict[str, Speed]:
    """Answer the sets by segcredit's own engine."""
    typed = [*command(given, names, data, out), "--engine", given.engine]
    seen = run([*typed, "--chunk", str(given.chunk)])
    return {name: Speed(seen[name][-1][1], seen[name][-1][0] - seen[name][0][0]) for name in names}


def measure_toolkit(
    given: argparse.Namespace, names: Sequence[str], data: Path, out: Path
) -> dict[str, Speed]:
    """Answer the sets by VLMEvalKit's loop against a server."""
    typed = [*command(given, names, data, out), "--driver", "vlmevalkit"]
    typed += ["--environment", str(wrapped(given.environment, out / "environment"))]
    if given.server:
        typed += ["--server", given.server]
    elif given.serve_args:
        typed += [f"--serve-args={given.serve_args}"]
    run(typed)
    return {name: toolkit_speed(name, out) for name in names}


def toolkit_speed(name: str, out: Path) -> Speed:
    """Read the last state of VLMEvalKit's progress bar."""
    (log,) = out.rglob(f"{name}.log")
    *_, (_, total, elapsed) = BAR.findall(log.read_text(errors="replace"))
    seconds = 0
    for part in elapsed.split(":"):
        seconds = 60 * seconds + int(part)
    return Speed(int(total), seconds)


def wrapped(environment: Path, folder: Path) -> Path:
    """Make an environment that accepts TSV files of our own (tests/benchmarks/real_toolkit.py)."""
    real = environment.absolute() / "bin" / "python"
    if not real.exists():
        raise SystemExit(f"--environment: expected a virtual environment; {real} does not exist.")
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    patched = TESTS / "benchmarks" / "real_toolkit.py"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec {real} "$@"\nshift 2\nexec {real} {patched} "$@"\n'
    )
    python.chmod(0o755)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="TSV files or git repositories")
    parser.add_argument("--environment", type=Path, required=True, help="with ms-vlmeval")
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated")
    parser.add_argument("--loops", default="segcredit,VLMEvalKit", help="comma-separated")
    parser.add_argument("--size", default="3b", help="0.5b, 3b, 7b or small")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--engine", default="vllm", help="of segcredit: vllm or hf")
    parser.add_argument("--chunk", type=int, default=1024, help="of segcredit benchmark")
    parser.add_argument("--server", help="URL of a server that has the model already")
    parser.add_argument("--serve-args", default="", help="further arguments of vllm serve")
    parser.add_argument("--tokens", type=int, default=512, help="length of every response")
    parser.add_argument("--limit", type=int, help="first questions of each set")
    given = parser.parse_args()
    names = given.sets.split(",")
    transformers.utils.logging.disable_progress_bar()
    found: list[tuple[str, str, Speed]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = tables_in(given.data, names, folder / "data")
        if given.model is None:
            given.model = folder / "model"
            asked = load_questions(names, data)
            texts = [x.messages[-1]["content"] for group in asked for x in group.questions]
            save_model(given.size, texts, given.model)
        loops = {"segcredit": measure_own, "VLMEvalKit": measure_toolkit}
        for loop in given.loops.split(","):
            measure = loops[loop]
            print(loop, flush=True)
            begin = time.perf_counter()
            speeds = measure(given, names, data, folder / loop)
            print(f"{loop}: whole command {time.perf_counter() - begin:.0f} s", flush=True)
            found += [(loop, name, speed) for name, speed in speeds.items()]
            print_table(found)


def print_table(found: Sequence[tuple[str, str, Speed]]) -> None:
    print(f"\n{'loop':<12}{'set':<12}{'questions':>10}{'s':>10}{'questions/s':>14}")
    for loop, name, speed in found:
        print(f"{loop:<12}{name:<12}{speed}", flush=True)


if __name__ == "__main__":
    main()
