"""Measure the phases of a small model's training step, with and without CUDA graphs.

    python benchmarks/small_step.py               # on a GPU: 512 responses of 300 tokens
    python benchmarks/small_step.py --small       # smoke test, a minute on a CPU

The model is a randomly initialized text model with a few million parameters and a critic, trained
with SAPO on generated variables. All responses have the maximum length, because the end token is
never sampled. Kernel launches dominate the step: every token needs hundreds of kernels of a few
microseconds. Steps with rollout.graphs false and true alternate, and the table compares their
medians. The row "process" is CPU time, the resource that several runs on one GPU compete for.

The script then counts the device synchronizations of each phase in one more step, with torch's sync
debug mode, and lists the lines that cause most of them. On a CPU it counts the operations that
would synchronize on a GPU: reading a number, and results whose size depends on values.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segcredit.rollout import HFEngine
from segcredit.train.build import build
from segcredit.train.metrics import Metrics
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.trainer import Trainer

PHASES = ("sample", "score", "annotate", "credit", "update", "sync")
NEVER = 10**6
"""An end token outside every vocabulary."""
SYNCS = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2"}
HERE = Path(__file__).resolve().parent.parent


def make_state(given: argparse.Namespace, graphs: bool) -> State:
    """Return the state at the start of reinforcement learning, with random weights."""
    trainer = Trainer(
        {
            "tiny": given.model,
            "hidden": given.hidden,
            "layers": given.layers,
            "heads": given.heads,
            "dtype": given.dtype,
        },
        {"world": "derived_variables"},
        given.algorithm,
        "exact",
        stages=[
            {"kind": "warm_start", "steps": 1},
            {"kind": "optimize", "steps": 1000},
        ],
        rollout={
            "prompts": given.rows // given.samples,
            "samples": given.samples,
            "rows": given.rows,
            "max_tokens": given.tokens,
            "graphs": graphs,
        },
        update={"minibatches": given.minibatches, "tokens_per_micro": given.micro},
        optimizer={"lr": 1e-9, "critic_lr": 1e-9},
    )
    state = build(trainer.plan)
    state.stage = len(state.recipe.stages) - 1
    stage_of(state, state.recipe.stages[state.stage]).enter()
    assert isinstance(state.engine, HFEngine)
    state.engine.end_tokens = (NEVER,)
    return state


def one_step(state: State) -> dict[str, float]:
    """Run one step; return seconds of each phase, of the whole step, and of CPU time."""
    begin, cpu = time.perf_counter(), time.process_time()
    metrics, stepped = stage_of(state, state.recipe.stages[state.stage]).step()
    found = {name: metrics[f"time/{name}"] for name in PHASES}
    found["step"] = time.perf_counter() - begin
    found["process"] = time.process_time() - cpu
    state.step += 1
    state.stage_step += 1
    assert stepped is not None
    found["tokens"] = float(stepped.batch.rollouts.mask.sum())
    return found


class SyncCounter(TorchDispatchMode):
    """Counts device synchronizations by phase and by line."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.phase = "other"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside this context; phases are those that the metrics time."""
        timed = Metrics.time
        counter = self

        @contextmanager
        def time_phase(self: Metrics, phase: str) -> Iterator[None]:
            counter.phase = phase
            with timed(self, phase):
                yield
            counter.phase = "other"

        with mock.patch.object(Metrics, "time", time_phase):
            if not torch.cuda.is_available():
                with self:
                    yield
                return
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = self._warned
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    yield
                finally:
                    torch.cuda.set_sync_debug_mode("default")

    def _warned(
        self, message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any
    ) -> None:
        if "synchroniz" in str(message):
            self._count(filename, lineno)

    def _count(self, filename: str, lineno: int) -> None:
        short = filename.removeprefix(f"{HERE}/").split("site-packages/")[-1]
        self.phases[self.phase] += 1
        self.lines[f"{short}:{lineno}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        if name in SYNCS or by_mask:
            self._count(*_caller())
        return func(*args, **(kwargs or {}))


def _caller() -> tuple[str, int]:
    """Return the calling line in this package or in transformers."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/segcredit/" in file or "/transformers/" in file:
            return file, frame.f_lineno
        frame = frame.f_back
    return "?", 0


def print_row(*cells: object, widths: tuple[int, ...] = (12, 15, 14, 10, 12, 12)) -> None:
    print("".join(str(x).rjust(w) for x, w in zip(cells, widths, strict=True)), flush=True)


def add_arguments(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Add the options of the model and of the step."""
    parser.add_argument("--small", action="store_true", help="reduced sizes, a minute on a CPU")
    parser.add_argument("--model", default="qwen2")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default=dtype, help="float32 or bfloat16")
    parser.add_argument("--algorithm", default="sapo")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--micro", type=int, default=65536)
    parser.add_argument("--warmup", type=int, default=2)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options; --small reduces the sizes."""
    given = parser.parse_args()
    if given.small:
        given.hidden, given.layers, given.heads, given.dtype = 64, 2, 4, "float32"
        given.rows, given.tokens, given.warmup, given.micro = 16, 24, 1, 1024
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "float32")
    parser.add_argument("--repeat", type=int, default=5)
    given = parse(parser)
    given.repeat = 2 if given.small else given.repeat
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "CPU, without graphs"

    states = {graphs: make_state(given, graphs) for graphs in (False, True)}
    parameters = sum(x.numel() for x in states[True].policy.model.parameters())
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(
        f"{given.model}, {parameters / 1e6:.1f} M parameters in {given.dtype} and a critic, "
        f"{given.algorithm}: "
        f"{given.rows} responses of {given.tokens} tokens, {given.minibatches} gradient steps, "
        f"micro-batches of {given.micro} tokens"
    )
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for number in range(given.warmup + given.repeat):
        for graphs, state in states.items():
            found[graphs].append(one_step(state))
            if not number:
                took = found[graphs][0]["sample"]
                print(f"first step, graphs {str(graphs).lower()}: sampled in {took:.2f} s")
    syncs = {graphs: SyncCounter() for graphs in states}
    for graphs, state in states.items():
        with syncs[graphs].counting():
            one_step(state)

    print()
    print_row("phase", "no graphs, ms", "graphs, ms", "ratio", "syncs", "syncs")
    for name in (*PHASES, "step", "process"):
        plain, fast = (
            1e3 * statistics.median(x[name] for x in found[graphs][given.warmup :])
            for graphs in (False, True)
        )
        counted = [
            sum(x.phases.values()) if name == "step" else x.phases.get(name, 0)
            for x in syncs.values()
        ]
        print_row(
            name,
            f"{plain:.1f}",
            f"{fast:.1f}",
            f"{fast / plain:.2f}" if plain >= 0.05 else "",
            *([""] * 2 if name == "process" else counted),
        )
    tokens = found[True][-1]["tokens"]
    for graphs, word in ((False, "without graphs"), (True, "with graphs")):
        seconds = statistics.median(x["sample"] for x in found[graphs][given.warmup :])
        print(
            f"{word}: {tokens / seconds:,.0f} tokens/s sampled, "
            f"{1e3 * seconds / given.tokens:.2f} ms per token of all rows"
        )
    engine = states[True].engine
    if isinstance(engine, HFEngine) and engine._fixed is not None:
        print(f"{len(engine._fixed.graphs)} graphs")
        if engine._fixed.state is not None:
            print(f"buffers: {engine._fixed.state.size}")
    print("\nlines with the most synchronizations, with graphs:")
    for line, count in syncs[True].lines.most_common(15):
        print(f"{count:8d}  {line}")


if __name__ == "__main__":
    main()
