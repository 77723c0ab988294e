"""Benchmark the language-model head: log-probability and entropy, forward and backward.

    python benchmarks/head.py            # on a GPU; seconds
    python benchmarks/head.py --small    # on a CPU, as a smoke test

Ours processes the logits in chunks (Triton kernels on a GPU, plain torch elsewhere).
"Materialized" is the direct implementation: all logits, log_softmax in float32, autograd. Both get
the same bfloat16 inputs. Times are medians of alternating runs. Memory is the additional peak,
including the head's gradient. Errors are maximum errors against float64 on fewer tokens, relative
to the largest entry; ours must not be larger than those of the materialized version.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from segcredit.core.checks import has_head_kernels
from segcredit.core.logits import head_logp_and_entropy, token_logp_and_entropy

Numbers = tuple[Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor], Numbers]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def materialized(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Numbers:
    """Compute all logits at once."""
    return token_logp_and_entropy(hidden @ weight.T, tokens)


def ours(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Numbers:
    """Compute the logits in chunks."""
    return head_logp_and_entropy(hidden, weight, tokens)


def plain(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Numbers:
    """Compute the logits in chunks, without Triton kernels."""
    import segcredit.core.logits as head

    kept, head.has_head_kernels = head.has_head_kernels, lambda _: False
    try:
        logp, entropy = head_logp_and_entropy(hidden, weight, tokens)
        # the backward pass calls has_head_kernels too, so it must run here
        (logp.sum() + 0.1 * entropy.sum()).backward()
    finally:
        head.has_head_kernels = kept
    return logp.detach(), entropy.detach()


def inputs(count: int, width: int, vocabulary: int, dtype: torch.dtype) -> list[Tensor]:
    """Make random inputs whose softmax is neither uniform nor one-hot."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(count, width, device=DEVICE, generator=generator)
    weight = torch.randn(vocabulary, width, device=DEVICE, generator=generator) * (3 / width**0.5)
    tokens = torch.randint(0, vocabulary, (count,), device=DEVICE, generator=generator)
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), tokens]


def step(way: Way, given: list[Tensor]) -> Numbers:
    """Run forward and backward through both outputs."""
    for x in given[:2]:
        x.grad = None
    logp, entropy = way(*given)
    if logp.requires_grad:
        (logp.sum() + 0.1 * entropy.sum()).backward()
    return logp.detach(), entropy.detach()


def sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(ways: dict[str, Way], given: list[Tensor], repeat: int) -> dict[str, tuple[float, ...]]:
    """Return median and minimum ms and peak GiB of each implementation; runs alternate."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0.0)
    for _ in range(repeat + 1):
        for name, way in ways.items():
            for x in given[:2]:
                x.grad = None
            sync()
            before = 0
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            start = time.perf_counter()
            step(way, given)
            sync()
            times[name].append(1e3 * (time.perf_counter() - start))
            if DEVICE == "cuda":
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {
        name: (statistics.median(found[1:]), min(found[1:]), peaks[name])
        for name, found in times.items()
    }


def errors(way: Way, given: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return errors of log-probabilities, entropies and the gradients of hidden states and head."""
    logp, entropy = step(way, given)
    found = [logp, entropy, given[0].grad, given[1].grad]
    return [
        float((a.double() - b).abs().max() / b.abs().max())
        for a, b in zip(found, exact, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--repeat", type=int, default=7, help="runs per median (default 7)")
    given = parser.parse_args()
    shapes = [(16 * 1024, 2048, 151_936), (32 * 1024, 2048, 151_936), (32 * 1024, 2048, 32_000)]
    checked = 1024
    if given.small:
        shapes, checked = [(256, 64, 1000)], 64
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, bfloat16, median of {given.repeat}")
    print(f"{'tokens':>8}{'hidden':>8}{'vocabulary':>12}  {'version':<14}", end="")
    print(f"{'ms':>9}{'min':>9}{'ratio':>8}{'GiB':>8}")
    for shape in shapes:
        tensors = inputs(*shape, torch.bfloat16)
        ways: dict[str, Way] = {"materialized": materialized, "ours": ours}
        if has_head_kernels(tensors[0]):
            ways["ours, no kernel"] = plain
        if shape[0] * shape[2] > 3e9:  # would not fit in memory with its gradients
            del ways["materialized"]
        found = measure(ways, tensors, given.repeat)
        base = found.get("materialized", (float("nan"),))[0]
        for way, (median, least, peak) in found.items():
            print(f"{shape[0]:>8}{shape[1]:>8}{shape[2]:>12}  {way:<16}", end="")
            print(f"{median:>7.1f}{least:>9.1f}{median / base:>8.2f}{peak:>8.2f}")
        del tensors
    print(f"\nmaximum relative error against float64, {checked} tokens")
    print(f"{'vocabulary':>12}  {'version':<14}{'log π':>10}{'H':>10}{'∂hidden':>10}{'∂head':>10}")
    for vocabulary in sorted({x[2] for x in shapes}):
        low = inputs(checked, shapes[0][1], vocabulary, torch.bfloat16)
        high = [x.detach().double().requires_grad_() for x in low[:2]] + [low[2]]
        numbers = step(materialized, high)
        exact = [*numbers, high[0].grad, high[1].grad]
        for way, function in (("materialized", materialized), ("ours", ours)):
            row = "".join(f"{x:>10.1e}" for x in errors(function, low, exact))
            print(f"{vocabulary:>12}  {way:<14}{row}")
        del low, high, numbers, exact


if __name__ == "__main__":
    main()
