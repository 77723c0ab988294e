"""Compare the time per step with and without sampling during the update (rollout.ahead).

    python benchmarks/ahead.py               # a tiny model, a minute on a CPU
    python benchmarks/ahead.py --real        # on a GPU: a model of SmolLM2-135M's shapes

Both runs have the same random weights, and their steps alternate. The table has medians. Responses
have the maximum length, because the end token is never sampled. With ahead=1, "sample" is what the
step still waits for, and "background" is the sampling that runs beside the update.
"""

import argparse
import statistics
import time

import torch
import transformers

from segcredit.rollout import HFEngine
from segcredit.train.ahead import Lookahead
from segcredit.train.build import build
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.trainer import Trainer

PHASES = ("sample", "score", "annotate", "credit", "update", "sync")
NEVER = 10**6
"""An end token outside every vocabulary."""
REAL = {"tiny": "llama", "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3}
"""Shapes of SmolLM2-135M, but for its vocabulary, which is the world's."""
TINY = {"tiny": "llama", "hidden": 96, "layers": 2, "heads": 4}


def make_state(given: argparse.Namespace, ahead: int) -> State:
    """Return the state at the start of reinforcement learning, with random weights."""
    trainer = Trainer(
        {**(REAL if given.real else TINY), "dtype": given.dtype},
        {"world": "derived_variables"},
        given.algorithm,
        "exact",
        stages=[{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 10**6}],
        rollout={
            "prompts": given.rows // given.samples,
            "samples": given.samples,
            "rows": given.rows,
            "max_tokens": given.tokens,
            "ahead": ahead,
        },
        update={"minibatches": given.minibatches, "tokens_per_micro": given.micro},
        optimizer={"lr": 1e-9, "critic_lr": 1e-9},
    )
    state = build(trainer.plan)
    state.stage = 1
    stage_of(state).enter()
    engines = [state.engine]
    if ahead:
        state.lookahead = Lookahead(state)
        engines.append(state.lookahead.engine.inner)
    for engine in engines:
        assert isinstance(engine, HFEngine)
        engine.end_tokens = (NEVER,)
    return state


def one_step(state: State) -> dict[str, float]:
    """Run one step; return seconds of each phase and of the whole step."""
    begin = time.perf_counter()
    metrics, _ = stage_of(state).step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found = {name: metrics[f"time/{name}"] for name in PHASES}
    found["step"] = time.perf_counter() - begin
    found["background"] = metrics.get("ahead/sample_seconds", 0.0)
    state.step += 1
    state.stage_step += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="SmolLM2-135M's shapes, for a GPU")
    parser.add_argument("--dtype", help="float32 or bfloat16 (default with --real)")
    parser.add_argument("--algorithm", default="sapo")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--micro", type=int, default=16384)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    given = parser.parse_args()
    given.dtype = given.dtype or ("bfloat16" if given.real else "float32")
    given.rows = given.rows or (512 if given.real else 64)
    given.tokens = given.tokens or (137 if given.real else 48)

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{device}, {torch.get_num_threads()} CPU threads, {versions}")
    states = {ahead: make_state(given, ahead) for ahead in (0, 1)}
    size = sum(x.numel() for x in states[0].policy.model.parameters())
    print(f"{size:,} parameters, {given.rows} responses of {given.tokens} tokens, {given.dtype}")
    found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for _ in range(given.warmup + given.steps):
        for ahead, state in states.items():
            found[ahead].append(one_step(state))
    print(f"{'phase':<12}{'ahead=0, ms':>14}{'ahead=1, ms':>14}{'ratio':>8}")
    for name in (*PHASES, "background", "step"):
        plain, early = (
            1e3 * statistics.median(x[name] for x in found[ahead][given.warmup :])
            for ahead in (0, 1)
        )
        ratio = f"{early / plain:.2f}" if plain >= 0.05 else ""
        print(f"{name:<12}{plain:>14.1f}{early:>14.1f}{ratio:>8}")
    for ahead, steps in found.items():
        each = sorted(x["step"] for x in steps[given.warmup :])
        print(f"ahead={ahead}: seconds per step {each[0]:.3f} to {each[-1]:.3f}")
    if torch.cuda.is_available():
        print(f"peak memory of both runs: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
