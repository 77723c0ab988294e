"""Measure a training step: its phases on the demo's model, and GRPO compared with TRL.

    python benchmarks/step.py --setup      # once: creates .venv-trl with TRL
    python benchmarks/step.py              # both tables; five to ten minutes on two CPU cores
    python benchmarks/step.py --no-trl     # only this package

First table: the reinforcement learning stage of the demo recipe. A tiny Qwen2.5-VL with a critic is
trained with SAPO on generated images, from random weights. "other" is the time outside all phases:
making prompts and metrics.

Second table: GRPO on a tiny Llama (text only). Steps of segcredit and of TRL alternate, so that
noise of the machine affects both. Both are warmed up first. Ratios are segcredit / TRL, medians
over consecutive steps. CPU seconds are those of the process. If they are well below the wall time
of one thread, other processes were using the cores. OpenMP threads sleep while they wait
(OMP_WAIT_POLICY=PASSIVE, unless set otherwise): on shared cores, spinning threads can make two
threads many times slower than one.

Identical on both sides:
  - weights (one saved model, float32, SDPA attention), transformers, torch, number of CPU threads
  - prompts (derived variables, same chat template), prompts per step, responses per prompt, token
    limit, sampling at temperature 1 from the whole vocabulary
  - reward (a count of characters), group z-scores, clip 0.2, no KL, no reference model, mean over
    each response's tokens
  - one gradient step per batch in a single forward and backward pass, AdamW, gradients clipped at
    norm 1, a learning rate so small that response lengths do not change
  - no checkpoints, no log files; TRL's defaults of gradient checkpointing and bfloat16 are off

"full": all responses have the maximum length, because the end token is outside the vocabulary. Both
sides sample the same number of tokens, so only this row compares equal work. "ended": responses end
at random, as those of a random model do. The number of tokens differs slightly, so compare the time
per token.

Differences: TRL samples with generate(), which keeps finished rows in the batch. It computes
entropies in the update and uses the fused AdamW (its default). segcredit has its own sampling loop,
which stores log-probabilities and entropies and removes finished rows. Neither recomputes old
log-probabilities. The random numbers and the order of the prompts differ; all prompts have the same
length. "collect" covers everything from prompts to scored responses, "update" the rest of the step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from step_trl import VERSION, worth

from segcredit.config import load_recipe
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.trainer import Trainer
from segcredit.types import Response, Reward

HERE = Path(__file__).resolve().parent
VENV = HERE.parent / ".venv-trl"
PACKAGES = ["torch==2.13.0", f"trl=={VERSION}", "accelerate==1.15.0", "datasets==5.2.0"]
"""TRL supports many versions of transformers; constraints.txt pins the one used here."""
PHASES = ("sample", "score", "annotate", "credit", "update", "sync")
LR = 1e-9
"""Learning rate of both sides; so small that all steps do the same work."""
WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True)
class Measured:
    """Measurements of one step."""

    seconds: float
    cpu: float
    tokens: int
    """Sampled tokens of all responses."""
    responses: int
    prompt_tokens: int
    phases: dict[str, float]

    @property
    def collect(self) -> float:
        """Seconds from prompts to scored responses."""
        return sum(self.phases.get(x, 0.0) for x in ("collect", "sample", "score", "annotate"))


class Worth:
    """The reward of step_trl.py, with this package's interface."""

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        return [Reward(worth(x.text), "fraction of characters") for x in responses]

    def close(self) -> None:
        """Do nothing: there are no worker processes."""


def our_step(state: State) -> Measured:
    """Run one step of reinforcement learning, as the training loop does."""
    begin, cpu = time.perf_counter(), time.process_time()
    metrics, stepped = stage_of(state, state.recipe.stages[state.stage]).step()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    state.step += 1
    state.stage_step += 1
    assert stepped is not None
    rollouts = stepped.batch.rollouts
    assert rollouts.prompts is not None
    return Measured(
        seconds,
        cpu,
        int(rollouts.mask.sum()),
        len(rollouts),
        sum(len(x.tokens) for x in rollouts.prompts),
        {name: metrics[f"time/{name}"] for name in PHASES},
    )


def demo_state(threads: int) -> State:
    """Return the demo recipe's state where reinforcement learning starts; random weights."""
    state = build(make_plan(load_recipe("demo", [f"threads={threads}"])))
    state.stage = len(state.recipe.stages) - 1
    stage_of(state, state.recipe.stages[state.stage]).enter()
    return state


@dataclass(frozen=True)
class Case:
    """The workload of both sides."""

    folder: Path
    ends: bool
    threads: int
    prompts: int
    samples: int
    max_tokens: int
    steps: int

    def save_model(self) -> None:
        """Save a tiny Llama; for full responses the model cannot produce its end token."""
        tokenizer = make_world("derived_variables").tokenizer()
        policy = Policy.tiny("llama", tokenizer)
        if not self.ends:
            tokenizer.add_special_tokens({"eos_token": "<|never|>"})
            policy.model.generation_config.eos_token_id = tokenizer.eos_token_id
        policy.save(self.folder)

    def state(self) -> State:
        """Build this package's side."""
        rows = make_world("derived_variables").prompts("train", 0, self.prompts * self.steps)
        trainer = Trainer(
            self.folder,
            rows,
            {"name": "grpo", "kl": 0.0},
            Worth(),
            steps=self.steps,
            threads=self.threads,
            rollout={
                "prompts": self.prompts,
                "samples": self.samples,
                "max_tokens": self.max_tokens,
            },
            update={"minibatches": 1, "tokens_per_micro": 10**9},
            optimizer={"lr": LR},
        )
        state = build(trainer.plan)
        stage_of(state, state.recipe.stages[0]).enter()
        return state

    def save_job(self) -> Path:
        """Write the job file for TRL's side."""
        rows = make_world("derived_variables").prompts("train", 0, self.prompts * self.steps)
        job = {
            "model": str(self.folder),
            "output": str(self.folder / "trl"),
            "prompts": [[dict(x) for x in row.messages] for row in rows],
            "prompts_per_step": self.prompts,
            "samples": self.samples,
            "max_tokens": self.max_tokens,
            "threads": self.threads,
            "steps": self.steps,
            "lr": LR,
        }
        path = self.folder / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        return path


class Trl:
    """A process that runs step_trl.py and waits between steps."""

    def __init__(self, case: Case) -> None:
        command = [str(VENV / "bin" / "python"), str(HERE / "step_trl.py")]
        self.errors = (case.folder / "trl.log").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [*command, str(case.save_job())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(case.threads)},
        )
        self.versions: dict[str, str] = self._read()["versions"]

    def step(self) -> Measured:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        found = self._read()
        collect = {"collect": found.pop("collect")}
        return Measured(**found, phases=collect)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            sys.exit(f"The TRL process stopped:\n{self.errors.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()
        self.errors.close()


def print_row(*cells: object, widths: Sequence[int]) -> None:
    print("".join(str(cell).rjust(w) for cell, w in zip(cells, widths, strict=True)))


def middle(found: Sequence[Measured], what: Callable[[Measured], float]) -> float:
    return statistics.median(what(x) for x in found)


def print_phases(threads: int, warmup: int, repeat: int) -> None:
    """Print the first table."""
    state = demo_state(threads)
    found = [our_step(state) for _ in range(warmup + repeat)][warmup:]
    wall = middle(found, lambda x: x.seconds)
    settings = state.recipe.rollout
    print(
        f"\nSAPO on the demo's model, {threads} thread(s): {settings.prompts} responses of at most "
        f"{settings.max_tokens} tokens, {state.recipe.update.minibatches} gradient steps"
    )
    widths = (12, 12, 12, 10)
    print_row("phase", "median ms", "min ms", "share", widths=widths)
    parts = {name: [x.phases[name] for x in found] for name in PHASES}
    parts["other"] = [x.seconds - sum(x.phases.values()) for x in found]
    parts["step"] = [x.seconds for x in found]
    for name, times in parts.items():
        median = statistics.median(times)
        cells = (f"{1e3 * median:.1f}", f"{1e3 * min(times):.1f}", f"{median / wall:.0%}")
        print_row(name, *cells, widths=widths)
    print(
        f"{middle(found, lambda x: x.tokens / x.seconds):,.0f} tokens/s, "
        f"{middle(found, lambda x: x.tokens / x.responses):.1f} tokens per response, "
        f"{middle(found, lambda x: x.prompt_tokens / x.responses):.1f} tokens per prompt; "
        f"{middle(found, lambda x: x.cpu):.2f} CPU s per step"
    )


WIDTHS = (11, 9, 8, 11, 10, 10, 11, 11, 10, 11)
COLUMNS = ("responses", "threads", "side", "median s", "min s", "CPU s")
COLUMNS += ("collect s", "update s", "tokens", "µs/token")


def compare(case: Case, warmup: int, with_trl: bool) -> None:
    """Print rows of the second table; steps of both sides alternate."""
    case.folder.mkdir()
    case.save_model()
    state = case.state()
    theirs = Trl(case) if with_trl else None
    rounds = []
    for _ in range(case.steps):
        ours = our_step(state)
        rounds.append((ours,) if theirs is None else (ours, theirs.step()))
    if theirs is not None:
        check_same(rounds[0], theirs.versions)
        theirs.close()
    rounds = rounds[warmup:]
    sides = list(zip(*rounds, strict=True))
    for name, found in zip(("ours", "TRL"), sides, strict=False):
        print_row(
            f"{'ended' if case.ends else 'full'} {case.max_tokens}",
            case.threads,
            name,
            f"{middle(found, lambda x: x.seconds):.3f}",
            f"{min(x.seconds for x in found):.3f}",
            f"{middle(found, lambda x: x.cpu):.3f}",
            f"{middle(found, lambda x: x.collect):.3f}",
            f"{middle(found, lambda x: x.seconds - x.collect):.3f}",
            f"{statistics.mean(x.tokens / x.responses for x in found):.1f}",
            f"{middle(found, lambda x: 1e6 * x.seconds / x.tokens):.1f}",
            widths=WIDTHS,
        )
    if len(sides) < 2:
        return

    def ratio(what: Callable[[Measured], float]) -> str:
        return f"{statistics.median(what(a) / what(b) for a, b in rounds):.2f}"

    fastest = min(x.seconds for x in sides[0]) / min(x.seconds for x in sides[1])
    print_row(
        *("", "", "ratio", ratio(lambda x: x.seconds), f"{fastest:.2f}", ratio(lambda x: x.cpu)),
        *(ratio(lambda x: x.collect), ratio(lambda x: x.seconds - x.collect)),
        *(ratio(lambda x: x.tokens), ratio(lambda x: x.seconds / x.tokens)),
        widths=WIDTHS,
    )


def check_same(sides: tuple[Measured, ...], versions: dict[str, str]) -> None:
    """Exit if the two sides do different work or have different versions."""
    ours, theirs = sides
    for name in ("responses", "prompt_tokens"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            sys.exit(f"The two sides differ in {name}: segcredit {a}, TRL {b}.")
    here = {"trl": VERSION, "transformers": transformers.__version__, "torch": torch.__version__}
    if versions != here:
        sys.exit(f"Versions differ: expected {here}, .venv-trl has {versions}. Run: {SETUP}")


SETUP = f"{sys.executable} benchmarks/step.py --setup"


def set_up() -> None:
    """Create a virtual environment with TRL that git ignores."""
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    (VENV / ".gitignore").write_text("*\n", encoding="utf-8")
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "-c", str(HERE.parent / "constraints.txt")]
    subprocess.run([*pip, PACKAGES[0]], check=True)  # first, to get the CPU build if available
    subprocess.run([*pip, *PACKAGES], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help="install TRL into .venv-trl and exit")
    parser.add_argument("--no-trl", action="store_true", help="only this package")
    parser.add_argument("--no-demo", action="store_true", help="only the second table")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads")
    parser.add_argument("--repeat", type=int, default=9, help="steps per median (default 9)")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up steps (default 2)")
    parser.add_argument("--prompts", type=int, default=16, help="per step, second table")
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt, second table")
    parser.add_argument(
        "--max-tokens", type=int, nargs="+", default=[64, 160], help="per response, second table"
    )
    given = parser.parse_args()
    if given.setup:
        set_up()
        return
    if WAIT_POLICY not in os.environ:  # torch reads it when it is loaded, so restart
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {WAIT_POLICY: "PASSIVE"}
        )
    transformers.utils.logging.disable_progress_bar()
    with_trl = not given.no_trl
    if with_trl and not (VENV / "bin" / "python").exists():
        print(
            f"TRL is not installed, so only this package is measured. To install it, run: {SETUP}"
        )
        with_trl = False
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, float32, "
        f"{os.cpu_count()} CPU cores, median of {given.repeat}; "
        f"load average at the start: {os.getloadavg()[0]:.1f}"
    )
    for threads in [] if given.no_demo else given.threads:
        print_phases(threads, given.warmup, given.repeat)
    print(
        f"\nGRPO on a tiny Llama{f' and TRL {VERSION}' if with_trl else ''}: {given.prompts} "
        f"prompts × {given.samples} responses, 1 gradient step"
    )
    print_row(*COLUMNS, widths=WIDTHS)
    steps = given.warmup + given.repeat
    cases = product((False, True), given.max_tokens, given.threads)
    with tempfile.TemporaryDirectory() as folder:
        for ends, max_tokens, threads in cases:
            place = Path(folder) / f"{ends}-{max_tokens}-{threads}"
            sizes = (given.prompts, given.samples, max_tokens, steps)
            compare(Case(place, ends, threads, *sizes), given.warmup, with_trl)
    print(f"load average at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
