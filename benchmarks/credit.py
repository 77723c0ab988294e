"""Measure the speed of segment credit against plain loops, and its growth with length.

    python benchmarks/credit.py                 # on the GPU if there is one, else on one CPU core
    python benchmarks/credit.py --no-loops      # only the package (the loops take minutes)

One run measures: top-entropy partition + segment GAE + geometric-mean ratio + clipped surrogate +
boundary value loss, forward and backward, on random batches whose responses are between half and
all of T tokens long. Times are wall times between two synchronizations. Growth is the median of
the ratios of consecutive measurements: on a GPU a step is CPU-bound, and the noise of the CPU from
second to second is larger than the differences.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from loops import loss_by_loops
from torch import Tensor

from segcredit.core.advantages import segment_gae
from segcredit.core.losses import boundary_value_loss, segment_policy_loss
from segcredit.partition import top_entropy

FRACTION, LAM, CLIP = 0.30, 0.99, 0.2


@dataclass(frozen=True)
class Inputs:
    """One random batch."""

    entropy: Tensor
    mask: Tensor
    value_old: Tensor
    reward: Tensor
    logp_old: Tensor
    logp: Tensor
    value: Tensor


def random_inputs(rows: int, width: int, device: str) -> Inputs:
    """Responses of T/2 … T tokens."""
    generator = torch.Generator().manual_seed(rows + width)
    length = torch.randint(width // 2, width + 1, (rows,), generator=generator)
    normal = lambda scale: scale * torch.randn(rows, width, generator=generator)  # noqa: E731
    logp_old = -normal(1.0).abs()
    columns = {
        "entropy": normal(1.0).abs(),
        "mask": torch.arange(width) < length[:, None],
        "value_old": normal(0.3),
        "reward": (torch.rand(rows, generator=generator) < 0.5).float(),
        "logp_old": logp_old,
        "logp": logp_old + normal(0.1),
        "value": normal(0.3),
    }
    return Inputs(**{name: x.to(device) for name, x in columns.items()})


Result = tuple[Tensor, Tensor, Tensor, Tensor]


def by_package(x: Inputs) -> Result:
    """Compute losses and gradients with segcredit."""
    logp, value = (v.detach().requires_grad_() for v in (x.logp, x.value))
    segments = top_entropy(x.entropy, x.mask, FRACTION)
    credit = segment_gae(x.reward, x.value_old, segments, 1.0, LAM)
    policy, _ = segment_policy_loss(logp, x.logp_old, credit.advantage, segments, CLIP, CLIP)
    critic = boundary_value_loss(value, x.value_old, credit.value_target, segments)
    (policy + critic).backward()
    return policy.detach(), critic.detach(), logp.grad, value.grad


def by_loops(x: Inputs) -> Result:
    """Compute the same with loops."""
    logp, value = (v.detach().requires_grad_() for v in (x.logp, x.value))
    policy, critic = loss_by_loops(
        x.entropy, x.mask, x.value_old, x.reward, x.logp_old, logp, value, FRACTION, LAM, CLIP
    )
    (policy + critic).backward()
    return policy.detach(), critic.detach(), logp.grad, value.grad


def timed_once(work: Callable[[], Result], device: str) -> tuple[float, Result]:
    """Return the wall time of a single run and its result."""
    results: list[Result] = []
    took, _ = milliseconds(lambda: results.append(work()), device, 1)
    return took, results[0]


def milliseconds(work: Callable[[], object], device: str, repeat: int) -> tuple[float, float]:
    """Return the median and minimum wall time."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeat):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), min(times)


def peak_bytes(shape: tuple[int, int], device: str) -> int | None:
    """Return the peak memory of one step without its inputs; None if it cannot be measured."""
    if device == "cuda":
        x = random_inputs(*shape, device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        by_package(x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # a new process: in this one, reused memory that was freed earlier would not be counted
    command = [sys.executable, __file__, "--peak", *map(str, shape)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(found) if found.strip() else None


def print_own_peak(rows: int, width: int) -> None:
    """Print the peak resident memory of one step in this new process (Linux only)."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return
    read = lambda key: 1024 * int(status.read_text().split(key)[1].split()[0])  # noqa: E731
    by_package(random_inputs(2, 64, "cpu"))  # excludes one-time initialization
    x = random_inputs(rows, width, "cpu")
    reset.write_text("5")  # reset the peak resident size
    before = read("VmRSS:")
    by_package(x)
    print(read("VmHWM:") - before)


def device_milliseconds(work: Callable[[], object]) -> float:
    """Return the total time of all GPU kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profiler.key_averages()) / 1e3


def print_row(*cells: object) -> None:
    widths = (14, 12, 12, 12, 13, 13, 13)
    print("".join(str(cell).rjust(w) for cell, w in zip(cells, widths, strict=False)))


def compare(shapes: list[tuple[int, int]], device: str, repeat: int, loops: bool) -> None:
    print("\nPackage and loops")
    print_row("(B, T)", "median ms", "min ms", "loops ms", "ratio", "peak MiB", "max |diff|")
    for rows, width in shapes:
        x = random_inputs(rows, width, device)
        for _ in range(3):
            ours = by_package(x)
        fast, least = milliseconds(lambda x=x: by_package(x), device, repeat)
        peak = peak_bytes((rows, width), device)
        mib = "–" if peak is None else f"{peak / 2**20:.0f}"
        if not loops:
            print_row((rows, width), f"{fast:.2f}", f"{least:.2f}", "–", "–", mib, "–")
            continue
        slow, theirs = timed_once(lambda x=x: by_loops(x), device)
        worst = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        print_row(
            (rows, width),
            f"{fast:.2f}",
            f"{least:.2f}",
            f"{slow:.0f}",
            f"{slow / fast:.0f}×",
            mib,
            f"{worst:.1e}",
        )


def growth(tokens: int, device: str, repeat: int) -> None:
    """Measure all lengths in turn, so that noise of the CPU affects each of them equally."""
    print(f"\nGrowth with T at {tokens:,} tokens")
    columns = ["(B, T)", "median ms", "min ms", "vs T = 512", "bytes/token"]
    print_row(*columns, *(["GPU busy ms"] if device == "cuda" else []))
    shapes = [(tokens // width, width) for width in (512, 2048, 8192, 32_768)]
    inputs = [random_inputs(*shape, device) for shape in shapes]
    for x in inputs * 3:
        by_package(x)
    rounds = [
        [milliseconds(lambda x=x: by_package(x), device, 1)[0] for x in inputs]
        for _ in range(repeat)
    ]
    for i, shape in enumerate(shapes):
        times = [one[i] for one in rounds]
        ratio = statistics.median(one[i] / one[0] for one in rounds)
        peak = peak_bytes(shape, device)
        cells = [shape, f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{ratio:.2f}×"]
        cells.append("–" if peak is None else f"{peak / tokens:.0f}")
        if device == "cuda":
            cells.append(f"{device_milliseconds(lambda i=i: by_package(inputs[i])):.2f}")
        print_row(*cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=there, choices=["cpu", "cuda"])
    parser.add_argument("--repeat", type=int, default=None, help="runs per median")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--no-loops", action="store_true", help="skip the loops")
    parser.add_argument("--rows", type=int, nargs="*", default=[128, 512], help="B at T = 2048")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print_own_peak(*given.peak)
        return
    repeat = given.repeat or (100 if given.device == "cuda" else 7)

    name = (
        torch.cuda.get_device_name() if given.device == "cuda" else f"{given.threads} CPU thread(s)"
    )
    print(f"{name}, torch {torch.__version__}, float32, median of {repeat}")
    if given.device == "cuda":
        tiny = torch.zeros(8, device="cuda")

        def launches() -> None:
            for _ in range(100):
                tiny.mul(1.0)

        launches()
        print(f"one small torch operation: {10 * milliseconds(launches, 'cuda', 20)[0]:.1f} µs")
    compare([(rows, 2048) for rows in given.rows], given.device, repeat, not given.no_loops)
    growth(512 * 2048, given.device, repeat)


if __name__ == "__main__":
    main()
