"""Compare SAPO on verl (with vLLM and our plugin) with the native trainer, on one GPU.

    python benchmarks/verl_step.py learn                       # a small model, until it learns
    python benchmarks/verl_step.py real --data geo3k/train.jsonl   # a step of Qwen2.5-VL-3B
    python benchmarks/verl_step.py learn --small               # on a CPU, in .venv-verl
    python benchmarks/verl_step.py real --small

--out keeps the model and both logs, so that verl and the native trainer can run in separate calls
(--only verl, then --only native). The table is printed from the existing logs.

learn: a Llama with a few million parameters is trained by imitation on a generated world until 30 %
of its answers are correct. Then ``segcredit verl`` and the native trainer each run SAPO from there.
real: random weights with the real shapes, images from --data. Both run one warm-up step and one
measured step.

Actor, critic, reference model and vLLM share the GPU (FSDP2 on one process; vLLM is in sleep mode
during training). Memory of a model with 3.75 B parameters, in GB:

    fp32 weights, actor and critic      15 each
    reference model in bfloat16         7.5
    gradients                           15
    Adam moments                        30 each
    both optimizers on the GPU          97.5 resident, 112.5 in an update before activations
    both optimizers offloaded (default) 37.5 resident besides vLLM, 82.5 in an update; 60 on the CPU
    activations and logits              10 to 25 for --micro tokens, in addition

--keep keeps optimizer state on the GPU. Differences from the native trainer: verl computes
attention over padded rows (it packs only with flash-attn, which is not required here) and
log-probabilities from materialized logits, so --micro is smaller.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verl_place import Place, Settings, python_path
from verl_ready import problems, read_by_verl, require

PHASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sampling and rewards": (("sample", "score"), ("gen", "reward")),
    "π_old, π_ref, V": (("annotate",), ("old_log_prob", "ref", "values")),
    "segments, credit": (("credit",), ("adv",)),
    "update": (("update",), ("update_critic", "update_actor")),
    "weights to sampler": (("sync",), ("update_weights",)),
}
"""Phase: names in the native trainer and in verl."""
CLI = "from segcredit.cli import main; main()"


def run(command: list[str], log: Path, env: dict[str, str], limit: float) -> int:
    """Run a command with output to a log file; print errors and kill all its processes."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # includes Ray's processes
    if code != 0:
        lines = log.read_text(errors="replace").splitlines()
        why = f"did not end within {limit:.0f} s" if code == -1 else f"ended with {code}"
        print(f"\n{' '.join(command[:4])} … {why}; the end of {log}:")
        print("\n".join(x[:300] for x in lines[-60:]))
        errors = [x for x in lines if ("Error" in x or "error:" in x) and "Warning" not in x]
        print("\nlines with errors:\n" + "\n".join(x[:300] for x in errors[-12:]))
    return code


def by_verl(
    folder: Path, recipe: Path, place: Place, own: Settings, overrides: list[str], limit: float
) -> None:
    """Run the recipe with ``segcredit verl``."""
    out = folder / "verl"
    shutil.rmtree(out, ignore_errors=True)
    given = [f"--verl={key}={x}" for key, x in (place.settings() | own).items()]
    options = ["--out", str(out), "--gpus=1", f"--rollout={place.rollout}", *given]
    command = [sys.executable, "-c", CLI, "verl", str(recipe), *overrides, *options]
    begin = time.perf_counter()
    run(command, folder / "verl.log", place.environment(folder), limit)
    print(f"verl: {time.perf_counter() - begin:.0f} s total, log in {folder / 'verl.log'}")


def by_native(folder: Path, recipe: Path, limit: float) -> None:
    """Run the same recipe with the native trainer, in a new process that frees the GPU."""
    script = "import sys; from verl_work import run_native as go; go(sys.argv[1], sys.argv[2:])"
    here = Path(__file__).resolve().parent
    path = python_path(here, here.parent)
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    begin = time.perf_counter()
    run([sys.executable, "-c", script, str(recipe)], folder / "native.log", env, limit)
    print(f"native: {time.perf_counter() - begin:.0f} s total, log in {folder / 'native.log'}")


def verl_steps(folder: Path) -> list[dict[str, float]]:
    """Read verl's metrics of each step, from this call or an earlier one."""
    log = folder / "verl" / "verl" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [row["data"] for row in map(json.loads, lines)]
    return [row for row in rows if "critic/score/mean" in row]


def native_steps(folder: Path) -> tuple[list[dict[str, float]], float]:
    """Read the native trainer's metrics of each step, and the peak GPU memory in GiB."""
    log = folder / "native.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [json.loads(x.removeprefix("NATIVE ")) for x in lines if x.startswith("NATIVE ")]
    return (found[-1]["steps"], found[-1]["peak"]) if found else ([], 0.0)


def show_phases(native: list[dict[str, float]], verl: list[dict[str, float]]) -> None:
    """Print medians in seconds over the steps after the first."""
    native, verl = native[1:] or native, verl[1:] or verl

    def median(rows: list[dict[str, float]], keys: list[str]) -> float:
        found = [sum(row.get(key, 0.0) for key in keys) for row in rows]
        return statistics.median(found or [float("nan")])  # nan: not run

    print(f"\n{'phase':<22}{'native s':>10}{'verl s':>10}   verl's metric names")
    for what, (ours, theirs) in PHASES.items():
        parts = {x: median(verl, [f"timing_s/{x}"]) for x in theirs}
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds)
        home = median(native, [f"time/{x}" for x in ours])
        there = median(verl, [f"timing_s/{x}" for x in theirs])
        print(f"{what:<22}{home:>10.2f}{there:>10.2f}   {shown}")
    home = median(native, sorted({x for row in native for x in row if x.startswith("time/")}))
    print(f"{'step':<22}{home:>10.2f}{median(verl, ['timing_s/step']):>10.2f}")
    for name in ("max_memory_allocated_gb", "max_memory_reserved_gb", "cpu_memory_used_gb"):
        if found := [x for row in verl for key, x in row.items() if key.endswith(f"perf/{name}")]:
            print(f"verl {name}: {max(found):.1f} GiB, training process only")


def show_rewards(native: list[dict[str, float]], verl: list[dict[str, float]]) -> None:
    """Print rewards and diagnostics of each step."""
    print(f"\n{'step':>5}{'verl':>9}{'native':>9}{'expl. var.':>12}{'segments':>10}{'entropy':>9}")
    for number, row in enumerate(verl):
        home = f"{native[number]['reward']:>9.3f}" if number < len(native) else f"{'':>9}"
        print(
            f"{number + 1:>5}{row['critic/score/mean']:>9.3f}{home}"
            f"{row['segment/value_explained_variance']:>12.3f}{row['segment/num/mean']:>10.1f}"
            f"{row.get('actor/entropy', float('nan')):>9.3f}"
        )
    rewards = [row["critic/score/mean"] for row in verl]
    part = max(1, len(rewards) // 4)
    first, last = (statistics.mean(x) for x in (rewards[:part], rewards[-part:]))
    print(f"first {part} steps {first:.3f}, last {part} {last:.3f}: {last - first:+.3f}")


def learn(given: argparse.Namespace, folder: Path, place: Place) -> None:
    from verl_work import learning_recipe, warm_start

    begin = time.perf_counter()
    if not (folder / "model" / "config.json").exists():
        warm_start(folder, given.small, given.target)
    print(f"warm start: {time.perf_counter() - begin:.0f} s", flush=True)
    recipe = learning_recipe(folder, given.small, given.steps)
    if given.only != "native":
        by_verl(folder, recipe, place, {}, [], given.limit)
    if given.only != "verl":
        by_native(folder, recipe, given.limit)
    native, _ = native_steps(folder)
    verl = verl_steps(folder)
    if verl:
        show_rewards(native, verl)
    show_phases(native, verl)


def real(given: argparse.Namespace, folder: Path, place: Place) -> None:
    from verl_work import real_model, real_recipe

    size = "small" if given.small else given.size
    begin = time.perf_counter()
    if not (folder / "model" / "config.json").exists():
        real_model(folder, given.data, size, given.prompts, given.small)
    if not given.small and (problem := read_by_verl(folder / "model")):
        raise SystemExit(f"error: {problem}")
    print(f"model and rows: {time.perf_counter() - begin:.0f} s", flush=True)
    sizes = (given.prompts, given.tokens, given.native_micro)
    recipe = real_recipe(folder, given.small, *sizes, eager=given.eager)
    own: Settings = {}
    for name, key in (("actor", "actor_rollout_ref.actor.fsdp_config"), ("critic", "critic.fsdp")):
        if given.keep in (name, "both"):
            own[f"{key}.optimizer_offload"] = False
    if not given.small:
        own["actor_rollout_ref.rollout.max_model_len"] = 1024 + given.tokens
    overrides = ["model.attention=sdpa", f"update.tokens_per_micro={given.micro}"]
    if given.only != "native":
        by_verl(folder, recipe, place, own, overrides, given.limit)
    if given.only != "verl":
        by_native(folder, recipe, given.limit)
    native, peak = native_steps(folder)
    verl = verl_steps(folder)
    show_phases(native, verl)
    if peak:
        print(f"native: peak GPU memory {peak:.1f} GiB")
    if verl:
        ends = tuple(f"prompt_length/{x}" for x in ("min", "mean", "max"))
        shown = (*ends, "response_length/mean", "segment/num/mean", "actor/grad_norm")
        print("verl: " + ", ".join(f"{name} {verl[-1][name]:.4g}" for name in shown))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["learn", "real"])
    parser.add_argument("--small", action="store_true", help="reduced sizes on a CPU, without vLLM")
    parser.add_argument("--out", type=Path, help="directory for model, logs and metrics")
    parser.add_argument("--steps", type=int, default=24, help="learn: number of SAPO steps")
    parser.add_argument(
        "--target", type=float, default=0.3, help="learn: accuracy at which imitation ends"
    )
    parser.add_argument("--data", type=Path, help="real: rows with images (jsonl, parquet)")
    parser.add_argument("--size", default="3b", help="real: 0.5b, 3b or 7b")
    parser.add_argument("--prompts", type=int, help="real: prompts per step (512; 8 with --small)")
    parser.add_argument(
        "--tokens", type=int, help="real: tokens per response (1024; 16 with --small)"
    )
    parser.add_argument(
        "--micro", type=int, default=8192, help="real: tokens per micro-batch, verl"
    )
    parser.add_argument(
        "--native-micro", type=int, default=32_768, help="real: tokens per micro-batch, native"
    )
    parser.add_argument(
        "--keep", choices=["actor", "critic", "both"], help="real: optimizers to keep on the GPU"
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="real: vLLM without compilation; starts minutes faster, samples slower",
    )
    parser.add_argument(
        "--vllm-memory", type=float, default=0.4, help="vLLM's fraction of the GPU memory, on verl"
    )
    parser.add_argument(
        "--workers", type=int, default=8, help="processes for prompts, and for rewards"
    )
    parser.add_argument(
        "--only",
        choices=["verl", "native"],
        help="run only one side; read the other's numbers from an earlier call",
    )
    parser.add_argument(
        "--limit", type=float, default=540, help="time limit of each side in seconds"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are killed
    given.prompts = given.prompts or (8 if given.small else 512)
    given.tokens = given.tokens or (16 if given.small else 1024)
    vision = given.what == "real"
    require(lambda: problems(given.small, vision, 120 if vision else 20))
    folder = given.out or Path(tempfile.mkdtemp(prefix="verl-step-"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    place = Place(given.small, given.workers, given.vllm_memory)
    {"learn": learn, "real": real}[given.what](given, folder, place)


if __name__ == "__main__":
    main()
