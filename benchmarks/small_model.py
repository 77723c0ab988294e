"""Measure the training step of a small pretrained model by phase, and list its GPU kernels.

    python benchmarks/small_model.py models/smollm2-135m-instruct data/gsm8k-plain/train.parquet
    python benchmarks/small_model.py MODEL DATA --prompts 4 --tokens 16 --repeat 1   # on a CPU

The settings are those of the recipe real/smollm2-135m/sapo. Speed does not depend on what the
weights are, but on the lengths of the responses: some tokens, drawn at random, end a response, so
that an untrained model's responses have --length tokens on average. A folder without weights gets
random ones. --profile records one more step and prints the time and number of its kernels.
"""

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import transformers

from segcredit.config import load_recipe
from segcredit.rollout import HFEngine
from segcredit.train.build import build, make_plan
from segcredit.train.metrics import Metrics
from segcredit.train.stages import stage_of
from segcredit.train.state import State

PHASES = ("sample", "score", "annotate", "credit", "update", "sync")


def with_weights(folder: Path) -> None:
    """Save random weights in a folder that has a configuration and a tokenizer only."""
    if [*folder.glob("*.safetensors")]:
        return
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.cpu().save_pretrained(folder)


def make_state(given: argparse.Namespace) -> State:
    """Return the state at the start of reinforcement learning."""
    settings = [
        f"model.path={given.model}",
        f"data.train=[{given.data}]",
        "data.test=[]",
        "stages=[{kind: optimize, steps: 1000}]",
        f"rollout.prompts={given.prompts}",
        f"rollout.max_tokens={given.tokens}",
        f"update.tokens_per_micro={given.micro}",
        "optimizer.lr=1e-9",
        "optimizer.critic_lr=1e-9",
        "evaluation.every=0",
        *given.set,
    ]
    state = build(make_plan(load_recipe(f"real/smollm2-135m/{given.algorithm}", settings)))
    stage_of(state, state.recipe.stages[0]).enter()
    if isinstance(state.engine, HFEngine) and given.length:
        width = state.policy.model.config.vocab_size
        chosen = torch.randperm(width, generator=torch.Generator().manual_seed(1))
        state.engine.end_tokens = tuple(chosen[: max(1, width // given.length)].tolist())
    return state


def one_step(state: State) -> dict[str, float]:
    """Run one step; return seconds of each phase and of the whole step, and its sizes."""
    begin = time.perf_counter()
    metrics, stepped = stage_of(state, state.recipe.stages[0]).step()
    found = {name: metrics.get(f"time/{name}", 0.0) for name in PHASES}
    found["step"] = time.perf_counter() - begin
    state.step += 1
    state.stage_step += 1
    assert stepped is not None
    rollouts = stepped.batch.rollouts
    found["response tokens"] = float(rollouts.mask.sum())
    found["ratio error"] = float(metrics.get("agreement/ratio_error", 0.0))
    assert rollouts.prompts is not None
    found["prompt tokens"] = float(sum(len(x.tokens) for x in rollouts.prompts))
    return found


@contextmanager
def marked_phases() -> Iterator[None]:
    """Mark the phases of a step in a profile."""
    timed = Metrics.time

    @contextmanager
    def mark(self: Metrics, phase: str) -> Iterator[None]:
        with torch.profiler.record_function(f"phase {phase}"), timed(self, phase):
            yield

    with mock.patch.object(Metrics, "time", mark):
        yield


def profile(state: State, rows: int) -> None:
    """Print the kernels of one step by phase: their time and number."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as recorded, marked_phases():
        one_step(state)
    spans, kernels = [], []
    for event in recorded.events() or ():
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith("phase ") and "cuda" not in str(event.device_type).lower():
            spans.append((span, event.name.removeprefix("phase ")))
        elif "cuda" in str(event.device_type).lower() and not event.name.startswith("phase "):
            kernels.append((span, event.name))
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    count: dict[str, Counter[str]] = defaultdict(Counter)
    for (begin, end), name in kernels:
        inside = [(stop - start, phase) for (start, stop), phase in spans if start <= begin <= stop]
        phase = min(inside)[1] if inside else "other"
        spent[phase][name] += end - begin
        count[phase][name] += 1
    for phase, times in spent.items():
        total, number = sum(times.values()), sum(count[phase].values())
        print(f"\n{phase}: kernels take {total / 1e3:.1f} ms, {number} launches")
        for name, took in times.most_common(rows):
            print(f"{took / 1e3:9.1f} ms {count[phase][name]:8d}  {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("data", type=Path, help="rows with questions")
    parser.add_argument("--algorithm", default="sapo")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="maximum length of a response")
    parser.add_argument(
        "--length", type=int, default=137, help="mean length; 0: the real end token"
    )
    parser.add_argument("--micro", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", type=int, default=0, help="kernels to list per phase")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    with_weights(given.model)
    state = make_state(given)
    begin = time.perf_counter()
    one_step(state)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"first step: {time.perf_counter() - begin:.1f} s")
    found = [one_step(state) for _ in range(given.repeat + 1)][1:]
    for name in found[0]:
        value = statistics.median(x[name] for x in found)
        text = f"{value:,.0f}" if "tokens" in name else f"{value:.3f}"
        print(f"{name:16s} {text:>10s}")
    if given.profile:
        profile(state, given.profile)


if __name__ == "__main__":
    main()
