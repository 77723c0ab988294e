"""SAPO by verl, vLLM and our plugin on one GPU, beside the native trainer on the same work.

    python benchmarks/verl_step.py learn                       # from scratch; the reward rises
    python benchmarks/verl_step.py real --data geo3k/train.jsonl   # a step of Qwen2.5-VL-3B
    python benchmarks/verl_step.py learn --small               # on a CPU, in .venv-verl
    python benchmarks/verl_step.py real --small

With --out the model and both logs stay, so that verl and the native trainer can have a call each
(--only verl, then --only native); the table is printed from what is there.

learn: a Llama of some millions of weights imitates a generated world until three answers in ten are
right; then so many steps of SAPO by ``segcredit verl``, and as many by the native trainer.
real: random weights of the real shapes, pictures from --data, a step to warm up and one that is
measured, by both.

Actor, critic, reference and vLLM share the GPU (FSDP2 on one process; vLLM asleep while the others
work). What a model of 3.75 B weights takes there, in GB: weights in float32 15 for the actor and 15
for the critic, the reference in bfloat16 7.5, gradients 15, Adam's moments 30 for each. With both
optimizers on the GPU 97.5 rest there, and 112.5 are in use before the first activation; so they
rest in main memory (60 of it) unless --keep says otherwise: 37.5 rest on the GPU beside vLLM,
82.5 are in use in an update, and activations and logits of --micro tokens, 10 to 25, come on top.
What differs from the native trainer: attention over padded rows (verl packs by flash-attn alone,
which is not needed here), log-probabilities from materialised logits, hence a smaller --micro.
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
"""What it is: the native trainer's phases, and verl's."""
CLI = "from segcredit.cli import main; main()"


def run(command: list[str], log: Path, env: dict[str, str], limit: float) -> int:
    """Its output goes to a file and, what matters of it, to the screen; nothing stays behind."""
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
                os.killpg(process.pid, signal.SIGKILL)  # Ray's processes belong to it
    if code != 0:
        said = log.read_text(errors="replace").splitlines()
        why = f"did not end within {limit:.0f} s" if code == -1 else f"ended with {code}"
        print(f"\n{' '.join(command[:4])} … {why}; the end of {log}:")
        print("\n".join(x[:300] for x in said[-60:]))
        errors = [x for x in said if ("Error" in x or "error:" in x) and "Warning" not in x]
        print("\nlines that name an error:\n" + "\n".join(x[:300] for x in errors[-12:]))
    return code


def by_verl(
    folder: Path, recipe: Path, place: Place, own: Settings, overrides: list[str], limit: float
) -> None:
    """``segcredit verl``, the command that a user types."""
    out = folder / "verl"
    shutil.rmtree(out, ignore_errors=True)
    given = [f"--verl={key}={x}" for key, x in (place.settings() | own).items()]
    options = ["--out", str(out), "--gpus=1", f"--rollout={place.rollout}", *given]
    command = [sys.executable, "-c", CLI, "verl", str(recipe), *overrides, *options]
    begin = time.perf_counter()
    run(command, folder / "verl.log", place.environment(folder), limit)
    print(f"verl: {time.perf_counter() - begin:.0f} s in all, log in {folder / 'verl.log'}")


def by_native(folder: Path, recipe: Path, limit: float) -> None:
    """The same recipe at home, in a process of its own, which gives the GPU back."""
    script = "import sys; from verl_work import run_native as go; go(sys.argv[1], sys.argv[2:])"
    here = Path(__file__).resolve().parent
    path = python_path(here, here.parent)
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    begin = time.perf_counter()
    run([sys.executable, "-c", script, str(recipe)], folder / "native.log", env, limit)
    print(f"native: {time.perf_counter() - begin:.0f} s in all, log in {folder / 'native.log'}")


def verl_steps(folder: Path) -> list[dict[str, float]]:
    """What verl logged of each step, in this call or in an earlier one."""
    log = folder / "verl" / "verl" / "metrics.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [row["data"] for row in map(json.loads, lines)]
    return [row for row in rows if "critic/score/mean" in row]


def native_steps(folder: Path) -> tuple[list[dict[str, float]], float]:
    """The same of the native trainer, and the device's peak in GiB."""
    log = folder / "native.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    found = [json.loads(x.removeprefix("NATIVE ")) for x in lines if x.startswith("NATIVE ")]
    return (found[-1]["steps"], found[-1]["peak"]) if found else ([], 0.0)


def show_phases(native: list[dict[str, float]], verl: list[dict[str, float]]) -> None:
    """Medians over the steps after the first, in seconds."""
    native, verl = native[1:] or native, verl[1:] or verl

    def median(rows: list[dict[str, float]], keys: list[str]) -> float:
        found = [sum(row.get(key, 0.0) for key in keys) for row in rows]
        return statistics.median(found or [float("nan")])  # nan: it was not run

    print(f"\n{'phase':<22}{'native s':>10}{'verl s':>10}   verl's own names")
    for what, (ours, theirs) in PHASES.items():
        parts = {x: median(verl, [f"timing_s/{x}"]) for x in theirs}
        said = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds)
        home = median(native, [f"time/{x}" for x in ours])
        there = median(verl, [f"timing_s/{x}" for x in theirs])
        print(f"{what:<22}{home:>10.2f}{there:>10.2f}   {said}")
    home = median(native, sorted({x for row in native for x in row if x.startswith("time/")}))
    print(f"{'step':<22}{home:>10.2f}{median(verl, ['timing_s/step']):>10.2f}")
    for name in ("max_memory_allocated_gb", "max_memory_reserved_gb", "cpu_memory_used_gb"):
        if found := [x for row in verl for key, x in row.items() if key.endswith(f"perf/{name}")]:
            print(f"verl {name}: {max(found):.1f} GiB, of its training process")


def show_rewards(native: list[dict[str, float]], verl: list[dict[str, float]]) -> None:
    """Step by step."""
    print(f"\n{'step':>5}{'verl':>9}{'native':>9}{'V explains':>12}{'segments':>10}{'entropy':>9}")
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
        print(f"native: peak of the device {peak:.1f} GiB")
    if verl:
        ends = tuple(f"prompt_length/{x}" for x in ("min", "mean", "max"))
        shown = (*ends, "response_length/mean", "segment/num/mean", "actor/grad_norm")
        print("verl: " + ", ".join(f"{name} {verl[-1][name]:.4g}" for name in shown))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["learn", "real"])
    parser.add_argument("--small", action="store_true", help="tiny, on a CPU, without vLLM")
    parser.add_argument("--out", type=Path, help="where to keep model, logs and metrics")
    parser.add_argument("--steps", type=int, default=24, help="learn: of SAPO")
    parser.add_argument("--target", type=float, default=0.3, help="learn: where imitation ends")
    parser.add_argument("--data", type=Path, help="real: rows with pictures (jsonl, parquet)")
    parser.add_argument("--size", default="3b", help="real: 0.5b, 3b or 7b")
    parser.add_argument("--prompts", type=int, help="real: of a step; 512, or 8")
    parser.add_argument("--tokens", type=int, help="real: of a response; 1024, or 16")
    parser.add_argument("--micro", type=int, default=8192, help="real: verl's tokens at once")
    parser.add_argument("--native-micro", type=int, default=32_768, help="real: the native's")
    parser.add_argument(
        "--keep", choices=["actor", "critic", "both"], help="real: optimizers that stay on the GPU"
    )
    parser.add_argument(
        "--eager", action="store_true", help="real: vLLM begins minutes sooner, and samples slower"
    )
    parser.add_argument("--vllm-memory", type=float, default=0.4, help="verl's vLLM's share")
    parser.add_argument("--workers", type=int, default=8, help="that prepare prompts, and grade")
    parser.add_argument(
        "--only",
        choices=["verl", "native"],
        help="the other's numbers are those of an earlier call",
    )
    parser.add_argument("--limit", type=float, default=540, help="seconds that each may take")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then
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
