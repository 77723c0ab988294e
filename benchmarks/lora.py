"""Compare LoRA adapters in bfloat16 and float32: time and memory of a 7B model's linear layers.

    python benchmarks/lora.py            # on a GPU; half a minute
    python benchmarks/lora.py --small    # on a CPU, as a smoke test

Runs the linear layers of four transformer layers with the shapes of Qwen2.5-VL-7B, forward and
backward, computed as PEFT computes them. "full" trains all weights; "frozen" trains none and has no
adapters.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = [
    (0, "full"),
    (0, "frozen"),
    (32, "bfloat16"),
    (32, "float32"),
    (128, "bfloat16"),
    (128, "float32"),
]


class Linear(nn.Module):
    """A linear layer with an optional adapter: W x + B A x."""

    def __init__(self, wide: int, out: int, rank: int, kind: str) -> None:
        super().__init__()
        made = {"device": DEVICE, "dtype": torch.bfloat16}
        weight = torch.randn(out, wide, **made) / wide**0.5
        self.weight = nn.Parameter(weight, requires_grad=kind == "full")
        self.rank = rank
        if rank:
            made["dtype"] = getattr(torch, kind)
            self.a = nn.Parameter(torch.randn(rank, wide, **made) / wide**0.5)
            self.b = nn.Parameter(torch.zeros(out, rank, **made))

    def forward(self, x: Tensor) -> Tensor:
        """Compute what PEFT computes at a scaling of 1."""
        base = linear(x, self.weight)
        if not self.rank:
            return base
        adapter = linear(linear(x.to(self.a.dtype), self.a), self.b) * 1.0
        return (base + adapter).to(base.dtype)


class Layer(nn.Module):
    """The linear layers of a transformer layer, without attention and norms."""

    def __init__(self, hidden: int, keys: int, middle: int, rank: int, kind: str) -> None:
        super().__init__()
        shapes = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
        shapes += [(hidden, middle), (hidden, middle), (middle, hidden)]
        self.parts = nn.ModuleList(Linear(*shape, rank, kind) for shape in shapes)
        self.shared = hidden // keys

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out, gate, up, down = self.parts
        mixed = query(x) + key(x).repeat(1, self.shared) + value(x).repeat(1, self.shared)
        x = x + out(mixed)
        return x + down(silu(gate(x)) * up(x))


def measure(layers: nn.ModuleList, x: Tensor, again: bool) -> tuple[float, float]:
    """Return the minimum time of six runs in seconds, and the additional peak memory in GiB."""
    times, peak = [], 0.0
    for _ in range(6):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
        y.sum().backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        times.append(time.perf_counter() - begin)
        for parameter in (x, *layers.parameters()):
            parameter.grad = None
        del y
    return min(times), peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    small = parser.parse_args().small
    tokens, *shape = (64, 56, 8, 296) if small else (16_384, 3584, 512, 18_944)
    print(f"torch {torch.__version__}, {DEVICE}")
    for rank, kind in WAYS:
        torch.manual_seed(0)
        layers = nn.ModuleList(Layer(*shape, rank, kind) for _ in range(4))
        x = torch.randn(tokens, shape[0], device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for again in (False, True):
            seconds, peak = measure(layers, x, again)
            how = "checkpointing" if again else "plain"
            print(f"rank {rank:>3} {kind:<8} {how:<14} {seconds * 1e3:8.1f} ms {peak:6.2f} GiB")
        del layers, x


if __name__ == "__main__":
    main()
