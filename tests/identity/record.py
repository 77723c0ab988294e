"""Record what short CPU runs compute, to prove that a change of the code changes no result.

    python tests/identity/record.py                     # compare with expected.json
    python tests/identity/record.py text/sapo lora      # only these cases
    python tests/identity/record.py --write             # after a result was changed on purpose
    python tests/identity/record.py --against FILE      # compare with another recording
    python tests/identity/record.py --write --output FILE --keep FOLDER

Runs go through public surfaces only (the command line, ``segcredit.Trainer``, recipes by name), so
that this file works unchanged on trees whose modules have moved: ``PYTHONPATH=TREE python …``.

Recorded: all metrics as numbers; hashes of weights, optimizer state, rollouts, evaluations and
report data, one per file or column. Not recorded, because two equal runs differ in it or because it
is prose: times, memory, speeds, dates, paths, a reward's reason, labels on the report's page.
"""

import argparse
import csv
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

EXPECTED = Path(__file__).with_name("expected.json")
ADDED_FIELDS: dict[tuple[str, str], object] = {
    ("model", "family"): None,
    ("rollout", "mismatch_over"): "token",
    ("rollout", "mismatch_mask"): False,
    ("rollout", "mismatch_floor"): None,
    ("rollout", "refills"): 0,
    ("rollout", "refill_by"): "auto",
    ("rollout", "ahead"): 0,
    ("rollout", "device"): None,
    ("update", "mask_truncated"): False,
    ("update", "entropy_coef"): 0.0,
    ("evaluation", "metric"): "auto",
    ("evaluation", "patience"): None,
    ("evaluation", "min_gain"): 0.0,
    ("save", "best"): False,
    ("data", "curriculum"): False,
    ("data", "system"): None,
    ("rollout", "top_p"): 1.0,
    ("rollout", "stop"): [],
}
"""Recipe fields that are newer than the recording, with their defaults."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "100",
}
"""Set before torch is imported: one thread, no GPU, no network."""
LONGEST = 300
"""Seconds after which a case's process is stopped."""
TIMES = re.compile(r"time/|memory/|tokens_per_second$")
"""Metrics that two equal runs do not share."""
DIGITS = 12
"""Hexadecimal digits of a hash that are kept."""

Tree = dict[str, Any]

# ── The runs ─────────────────────────────────────────────────────────────────────────────────────

REWARD = '''
def graded(completions, **columns):
    """An untrained model is never right, so text decides: rewards differ between responses."""
    sums = [sum(map(ord, text)) for text in completions]
    return [{"reward": (n % 5) / 4, "correct": n % 5 >= 3, "reason": "sum"} for n in sums]
'''
TEXT: Tree = {
    "model": {"tiny": "qwen2", "hidden": 32, "layers": 1, "heads": 4},
    "data": {
        "world": "derived_variables",
        "settings": {"given": 2, "derived": 3, "needed": [1, 2], "modulus": 7},
    },
}
VISION: Tree = {
    "model": {"tiny": "qwen2_5_vl", "hidden": 32, "layers": 1, "heads": 2},
    "data": {
        "world": "shape_grid",
        "settings": {"size": 2, "colors": 2, "shapes": 2, "terms": 1, "twice": False},
    },
}
COMMON: Tree = {
    "name": "identity",
    "seed": 3,
    "threads": 1,
    "reward": "reward.py:graded",
    "rollout": {"prompts": 8, "max_tokens": 12},
    "update": {"minibatches": 2},
    "optimizer": {"lr": 3e-3, "critic_lr": 3e-3, "schedule": "linear"},
    "evaluation": {"every": 2, "prompts": 6, "samples": 2, "watch": 2},
    "save": {"every": 10, "rollouts_every": 1, "rollouts": 8},
}
UNITS = {"name": "fixed", "size": 4}
GROUPS: Tree = {"rollout": {"prompts": 4, "samples": 4, "max_tokens": 12}}
PAIRS: Tree = {"rollout": {"prompts": 6, "samples": 6, "max_tokens": 30}}
"""Methods that learn from complete right answers only need more of them."""
TREES: Tree = {
    "rollout": {"prompts": 3, "max_tokens": 12, "tree": {"branching": [2, 2], "tokens": 4}}
}
METHODS: dict[str, tuple[Any, Tree]] = {
    "sapo": ({"name": "sapo", "kl": 0.01}, {}),
    "sapo_authors": ("sapo_authors", {}),
    "sapo_token_ratio": ("sapo_token_ratio", {}),
    "ppo": ("ppo", {}),
    "vc_ppo": ("vc_ppo", {}),
    "vapo": ("vapo", GROUPS),
    "grpo": ("grpo", GROUPS),
    "grpo_verl": ("grpo_verl", GROUPS),
    "grpo_deepseekmath": ("grpo_deepseekmath", GROUPS),
    "grpo_spo": ("grpo_spo", GROUPS),
    **{
        name: (name, GROUPS)
        for name in (
            *("grpo_trl", "dapo", "dr_grpo", "cispo", "gmpo", "gspo", "soft_adaptive"),
            *("high_entropy", "vppo", "reinforce_pp", "reinforce_pp_baseline"),
        )
    },
    "sae": ("sae", {}),
    "rloo": ("rloo", GROUPS),
    "rloo_reinforce": ("rloo_reinforce", GROUPS),
    "rloo_spo": ("rloo_spo", GROUPS),
    "vineppo": ({"name": "vineppo", "samples": 3, "partition": UNITS}, {}),
    "spo_chain": ({"name": "spo_chain", "samples": 3, "every": 2}, {}),
    "spo_tree": ("spo_tree", TREES),
    "single_stream_spo": ("single_stream_spo", {"data": {"size": 12}}),
    "restem": ("restem", PAIRS | {"update": {"minibatches": 2, "epochs": 2}}),
    "dpo": ("dpo", PAIRS),
    "dpo_positive": ("dpo_positive", PAIRS),
    "dvo": ({"name": "dvo", "samples": 2, "partition": UNITS}, {}),
}
"""Every method with settings that fit a tiny run; test_identity.py holds the list complete."""
CRITIC = {"sapo", "sapo_authors", "sapo_token_ratio", "ppo", "vc_ppo", "vapo", "sae"}
PARTITIONS: tuple[Any, ...] = (
    "newline",
    "step",
    "token",
    "response",
    {"name": "fixed", "size": 3},
    {"name": "probability", "threshold": 0.05, "every": 2},
    {"name": "accumulate", "threshold": 0.05, "every": 2},
    {"name": "peaks", "fraction": 0.4},
    {"name": "smooth", "fraction": 0.4, "window": 3},
    {"name": "value", "fraction": 0.4},
)
OPTIONS: dict[str, Tree] = {
    "micro": {
        "update": {"minibatches": 2, "epochs": 2, "tokens_per_micro": 90},
        "memory": {"recompute_activations": True, "offload_optimizer": True},
        "optimizer": {"schedule": "cosine", "weight_decay": 0.1, "warmup_steps": 1},
    },
    "stream": {"memory": {"offload_optimizer": "stream"}, "model": {"dtype": "bfloat16"}},
    "packed": {"model": {"attention": "packed", "dtype": "bfloat16"}},
    "recompute": {"rollout": {"old_logp": "recompute", "mismatch_cap": 2.0, "temperature": 0.8}},
    "graphs": {"rollout": {"graphs": True, "rows": 3}},
    "prefixes": {
        "algorithm": {"name": "vineppo", "samples": 2, "partition": UNITS},
        "stages": [{"kind": "warm_start", "steps": 3}, {"kind": "optimize", "steps": 3}],
        "rollout": {"prefixes": 9},
    },
    "horizon": {"algorithm": {"name": "sapo", "gamma": 0.9, "lam": 0.7, "value_at": "end"}},
}
"""Settings beside the method; each is a run of SAPO on text unless it says otherwise."""
ANALYSES = (
    *("lift", "ratio_bias", "segments", "within", "jumps", "targets"),
    *("value_loss", "entropy", "length"),
)
"""Named, because some have no meaning for the run and are made on request alone."""
OLD_RUNS = Path(__file__).parents[1] / "fixtures" / "old_run"
OLD_RUNS_STEPS = {
    "sapo": "stages.2.steps=3",
    "single_stream_spo": "stages.1.steps=4",
    "lora": "stages.2.steps=3",
}
"""One step more than each has."""
ROUNDED = ("option/stream", "option/packed", "rows")
"""Cases that differ on another kind of CPU: bfloat16, and a token that is drawn by a hair."""
SMALL_BOOKS: Tree = {"kinds": 2, "regions": 2}


def merged(*parts: Mapping[str, Any]) -> Tree:
    """Later parts win; a method is replaced as a whole."""
    made: Tree = {}
    for part in parts:
        for key, value in part.items():
            old = made.get(key)
            both = isinstance(old, dict) and isinstance(value, Mapping) and key != "algorithm"
            made[key] = merged(old, value) if both and isinstance(old, dict) else value
    return made


def recipe(world: Tree, method: str, *changes: Mapping[str, Any], steps: int = 3) -> Tree:
    """The recipe of a tiny run of one method."""
    algorithm, settings = METHODS[method]
    phase = {"phase": "solve"}
    stages: list[Tree] = [{"kind": "warm_start", "steps": 3, "batch": 4, **phase}]
    if method in CRITIC:
        stages.append({"kind": "pretrain_critic", "steps": 1})
    stages.append({"kind": "optimize", "steps": steps})
    return merged(COMMON, world, {"algorithm": algorithm, "stages": stages}, settings, *changes)


def write_recipe(folder: Path, made: Tree) -> Path:
    """recipe.yaml (JSON is YAML) and the reward that it names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(made, indent=1))
    return path


def train(folder: Path, made: Tree) -> Tree:
    """Train by this recipe; what the run computed."""
    write_recipe(folder, made)
    segcredit(folder, "train", "recipe.yaml", "-o", "run")
    return of_run(folder / "run")


def one_method(world: Tree, method: str, folder: Path) -> Tree:
    return train(folder, recipe(world, method))


def partitions(folder: Path) -> Tree:
    """SAPO over every other partition."""
    found = {}
    for spec in PARTITIONS:
        name = spec if isinstance(spec, str) else spec["name"]
        change = {"algorithm": {"name": "sapo", "partition": spec}}
        found[name] = train(folder / name, recipe(TEXT, "sapo", change, steps=2))
    return found


def models(folder: Path) -> Tree:
    """The other two tiny families."""
    llama = recipe(TEXT, "grpo", {"model": {"tiny": "llama"}}, steps=2)
    qwen3 = recipe(VISION, "sapo", {"model": {"tiny": "qwen3_vl"}}, steps=2)
    frozen = recipe(VISION, "ppo", {"model": {"freeze_vision": True}}, steps=1)
    return {
        "llama": train(folder / "llama", llama),
        "qwen3_vl": train(folder / "qwen3_vl", qwen3),
        "freeze_vision": train(folder / "freeze_vision", frozen),
    }


def worlds(folder: Path) -> Tree:
    """The laboratory's two worlds."""
    books = {"data": {"world": "ledger", "settings": SMALL_BOOKS}}
    tiles = {"data": {"world": "tile_tour", "settings": {"size": 2, "codes": 2, "visited": [2, 3]}}}
    text = {"model": TEXT["model"]} | books
    vision = {"model": VISION["model"]} | tiles
    return {
        "ledger": train(folder / "ledger", recipe(text, "sapo", steps=1)),
        "tile_tour": train(folder / "tile_tour", recipe(vision, "sapo", steps=1)),
    }


def lora(folder: Path) -> Tree:
    """Adapters, with a critic and a reference, on text and on vision."""
    change = {"model": {"lora": {"rank": 4, "alpha": 8}}}
    return {
        "text": train(folder / "text", recipe(TEXT, "sapo", change)),
        "vision": train(folder / "vision", recipe(VISION, "ppo", change, steps=2)),
    }


def processes(folder: Path) -> Tree:
    """Two processes, as torchrun starts them: whole models on each, and sharded ones."""
    found = {}
    for name, change in (("whole", {}), ("shard", {"memory": {"shard": True}})):
        write_recipe(folder / name, recipe(TEXT, "sapo", change, steps=2))
        segcredit(folder / name, "train", "recipe.yaml", "-o", "run", size=2)
        found[name] = of_run(folder / name / "run")
    return found


def demo(folder: Path) -> Tree:
    """The demo, shortened; its reward is the real one."""
    folder.mkdir()
    small = ["stages.0.steps=20", "stages.1.steps=80", "stages.2.steps=1", "stages.3.steps=2"]
    sizes = ["rollout.prompts=64", "evaluation.prompts=8", "save.rollouts_every=1"]
    segcredit(folder, "demo", "-o", "run", *small, *sizes)
    return of_run(folder / "run")


def after_training(folder: Path) -> Tree:
    """A run is resumed, evaluated, reported, segmented and analyzed."""
    found = {"train": train(folder, recipe(TEXT, "sapo", {"save": {"every": 2}}))}
    run = folder / "run"
    trust = "--trust-run"
    out = segcredit(folder, "evaluate", "run", trust, "--json", "-k", 3, "--prompts", 5)
    found["evaluate"] = numbers(json.loads(out))
    out = segcredit(folder, "segment", "run", "-s", "all", "--json")
    found["segment"] = of_segments(out)
    found["example"] = of_segments(segcredit(folder, "segment", "--example", "-s", "all", "--json"))
    asked = [x for name in ANALYSES for x in ("--only", name)]
    segcredit(folder, "analyze", "run", "-o", "analysis", "--resamples", 50, *asked)
    found["analyze"] = {
        path.stem: digest(numbers(json.loads(path.read_text())))
        for path in sorted((folder / "analysis").glob("*.json"))
    }
    segcredit(folder, "train", "--resume", "run", trust, "stages.2.steps=5")
    found["resume"] = of_run(run)
    segcredit(folder, "report", "run", "-o", "page.html")
    found["report"] = of_page(folder / "page.html")
    return found


def python(folder: Path) -> Tree:
    """``segcredit.Trainer`` with rows, a function as reward and a method as an object."""
    base = recipe(TEXT, "grpo", steps=1)
    train(folder / "model", base)
    model = folder / "model" / "run" / "checkpoints" / "step-000004" / "policy"
    rows = [
        {"problem": f"a = {n % 7} ; b = {n % 3} ; c = a + b ; c ?", "answer": str(n % 7)}
        for n in range(14)
    ]

    def act() -> None:
        from segcredit import Trainer
        from segcredit.algorithms import ppo

        scope: Tree = {}
        exec(REWARD, scope)
        settings = {key: base[key] for key in ("update", "optimizer", "evaluation", "save")}
        trainer = Trainer(
            str(model),
            rows[:10],
            algorithm=ppo(kl=0.01, lam=0.9),
            reward=scope["graded"],
            test=rows[10:],
            steps=3,
            rollout={"prompts": 4, "samples": 2, "max_tokens": 10},
            seed=1,
            threads=1,
            **settings,
        )
        result = trainer.train(folder / "run", report=False)
        said = {"before": dict(result.before), "after": dict(result.after)}
        (folder / "result.json").write_text(json.dumps(said))

    finish([fork(folder, act)])
    return {"result": json.loads((folder / "result.json").read_text()), **of_run(folder / "run")}


def rows(folder: Path) -> Tree:
    """Files of rows: a warm start on their responses, a suffix, a prompt limit."""
    train(folder / "model", recipe(TEXT, "grpo", steps=1))
    model = folder / "model" / "run" / "checkpoints" / "step-000004" / "policy"
    for name, first in (("train", 0), ("test", 20)):
        lines = [
            {
                "prompt": [{"role": "user", "content": f"a = {n % 7} ; a ?"}],
                "reward_model": {"ground_truth": str(n % 7)},
                "response": f"a = {n % 7}\n\\boxed{{{n % 7}}}",
            }
            for n in range(first, first + 9)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    made = recipe(TEXT, "rloo", {"reward": "exact"}, steps=2)
    made["model"] = {"path": str(model)}
    data = {"train": ["train.jsonl"], "test": ["test.jsonl"], "suffix": "; b ?"}
    made["data"] = {**data, "max_prompt_tokens": 60}
    return train(folder, made)


def old_run(name: str, folder: Path) -> Tree:
    """A run directory of an earlier version is evaluated, resumed for a step and reported."""
    shutil.copytree(OLD_RUNS, folder)
    trust = "--trust-run"
    out = segcredit(folder, "evaluate", name, trust, "--json", "-k", 2, "--prompts", 4)
    segments = segcredit(folder, "segment", name, "--json")
    last = OLD_RUNS_STEPS[name]
    segcredit(folder, "train", "--resume", name, trust, last)
    segcredit(folder, "report", name, "-o", "page.html")
    return {
        "evaluate": numbers(json.loads(out)),
        "segment": of_segments(segments),
        **of_run(folder / name),
        "report": of_page(folder / "page.html"),
    }


def study(folder: Path) -> Tree:
    """A study at smoke scale: the values of its tables."""
    folder.mkdir()
    segcredit(folder, "study", "table2", "--scale", "smoke", "-o", "studies", "--no-tune")
    return {
        path.name: of_table(path)
        for path in sorted((folder / "studies" / "table2-smoke").glob("*.csv"))
        if path.stem != "times"
    }


def recipes(folder: Path) -> Tree:
    """All settings of every recipe whose name the recording knows: no name may be lost."""
    from segcredit.config import load_recipe

    names = json.loads(EXPECTED.read_text())["cases"]["recipes"]
    found = {}
    for name in sorted(names):
        settings = load_recipe(name).as_dict()
        for (section, field), default in ADDED_FIELDS.items():
            if settings[section].get(field) == default:
                settings[section].pop(field, None)
        found[name] = digest(settings)
    return found


CASES: dict[str, Callable[[Path], Tree]] = {
    **{f"text/{name}": partial(one_method, TEXT, name) for name in METHODS if name != "vppo"},
    **{f"vision/{name}": partial(one_method, VISION, name) for name in METHODS},
    **{
        f"option/{name}": partial(lambda change, x: train(x, recipe(TEXT, "sapo", change)), change)
        for name, change in OPTIONS.items()
    },
    **{f"old_run/{name}": partial(old_run, name) for name in OLD_RUNS_STEPS},
    "after_training": after_training,
    "demo": demo,
    "lora": lora,
    "models": models,
    "partitions": partitions,
    "processes": processes,
    "python": python,
    "recipes": recipes,
    "rows": rows,
    "study": study,
    "worlds": worlds,
}

# ── Processes ────────────────────────────────────────────────────────────────────────────────────


def preload() -> None:
    """Import what takes seconds once, before processes are forked."""
    for name in (
        "matplotlib.backends.backend_agg",
        "matplotlib.figure",
        "peft",
        "torch.utils.tensorboard",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
        "segcredit.cli",
    ):
        __import__(name)
    import torch

    torch.set_num_threads(1)


def fork(folder: Path, act: Callable[[], object], environment: Mapping[str, str] = {}) -> int:
    """Run ``act`` in a process of its own, in that folder; its output goes to out.txt."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(LONGEST)
        os.chdir(folder)
        os.environ.update(environment)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        rank = environment.get("RANK", "")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, f"out{rank}.txt"), (2, f"err{rank}.txt")):
            os.dup2(os.open(name, flags), number)
        act()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(pids: Iterable[int]) -> None:
    """Wait for all; raise if one failed."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")


def segcredit(folder: Path, *arguments: object, size: int = 1) -> str:
    """``segcredit`` with these arguments, in ``size`` processes; what it printed."""

    def act() -> None:
        from segcredit.cli import main

        sys.argv = ["segcredit", *map(str, arguments)]
        main()

    environments: list[dict[str, str]] = [{}]
    if size > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        environments = [
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)
        ]
    try:
        finish([fork(folder, act, x) for x in environments])
    except RuntimeError as error:
        said = "".join(x.read_text()[-3000:] for x in sorted(folder.glob("*.txt")))
        raise RuntimeError(f"segcredit {' '.join(map(str, arguments))}: {error}\n{said}") from None
    return (folder / ("out.txt" if size == 1 else "out0.txt")).read_text()


# ── What is recorded ─────────────────────────────────────────────────────────────────────────────


def digest(x: Any) -> str:
    """Hash of bytes, or of a JSON value."""
    data = x if isinstance(x, bytes) else json.dumps(x, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def of_run(run: Path) -> Tree:
    """Everything a run directory holds that equal runs share."""
    found: Tree = {"metrics": of_metrics(run), "weights": of_weights(run)}
    for kind in ("rollouts", "watched", "evaluations"):
        files = sorted((run / kind).glob("*.jsonl"))
        lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        found[kind] = of_rows(lines) if kind == "rollouts" else digest(of_rows(lines))
    images = sorted(x.name for x in (run / "images").glob("*"))
    if images:
        found["images"] = digest(images)
    if (run / "report.html").exists():
        found["page"] = of_page(run / "report.html")
    return found


def of_metrics(run: Path) -> Tree:
    """Each stage's metrics as columns: stage → metric → a value for each line."""
    stages: dict[str, list[Tree]] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        kept = {key: x for key, x in line.items() if not TIMES.match(key) and key != "stage"}
        stages.setdefault(line["stage"], []).append(kept)
    return {
        stage: {key: [line.get(key) for line in lines] for key in keys_of(lines)}
        for stage, lines in stages.items()
    }


def of_weights(run: Path) -> Tree:
    """A hash for each tensor file of the last checkpoint, by names and values.

    Optimizer state is hashed as a set of values: how its tensors are numbered may change.
    """
    checkpoints = run / "checkpoints"
    last = max(checkpoints.glob("step-*"))
    found = {}
    for path in sorted(checkpoints.rglob("*.safetensors")):
        place = path.relative_to(checkpoints)
        if place.parts[0] not in ("reference", last.name):
            continue
        named = path.name.startswith(("model", "adapter", "value_head"))
        tensors = [(name if named else "", x) for name, x in read_tensors(path)]
        key = place.as_posix().replace(last.name, "last")
        found[key] = digest(sorted(digest(name.encode() + x) for name, x in tensors))
    return found


def read_tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and (kind, shape, values) of every tensor of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, x in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in x["data_offsets"])
            yield name, f"{x['dtype']}{x['shape']}".encode() + data[start:end]


def of_rows(lines: list[Tree]) -> Tree:
    """A hash for each column; reasons are prose."""
    columns = [key for key in keys_of(lines) if key != "reason"]
    return {key: digest([line.get(key) for line in lines]) for key in columns}


def of_page(page: Path) -> Tree:
    """The data that a report embeds, without labels, times, facts about the machine."""
    pattern = r'<script type="application/json" id="([^"]+)">(.*?)</script>'
    parts = {name: json.loads(x) for name, x in re.findall(pattern, page.read_text(), re.DOTALL)}
    overview = parts["overview"]
    (run,) = overview["runs"]
    rows = [row for name in sorted(parts) if name.startswith("rows-") for row in texts(parts[name])]
    cuts = [row.pop("cuts") for row in rows]
    curves = {
        stage: {key: x for key, x in found.items() if not TIMES.match(key)}
        for stage, found in run["curves"].items()
    }
    return {
        "results": [[x["before"], x["after"]] for x in run["results"]],
        "curves": digest(curves),
        "files": digest(overview["files"]),
        "images": digest(parts.get("images")),
        "rows": digest(of_rows(rows)),
        "cuts": sorted(digest(x)[:6] for x in zip(*cuts, strict=True)),
    }


def texts(part: Tree) -> list[Tree]:
    """Rows of the page with their pieces as text."""
    return [{**x, "pieces": [part["texts"][n] for n in x["pieces"]]} for x in part["rows"]]


def of_segments(output: str) -> Tree:
    """A hash for each response and strategy of ``segment --json``."""
    lines = [json.loads(line) for line in output.splitlines()]
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line["strategy"], []).append(digest(line)[:6])
    return found


def of_table(path: Path) -> list[Tree]:
    """Rows of a CSV file without times and labels."""
    timed = re.compile(r"minute|second|time|hour|date|path|folder|label")
    return [
        {key: number(x) for key, x in row.items() if not timed.search(key)}
        for row in csv.DictReader(io.StringIO(path.read_text()))
    ]


def number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def numbers(x: Any) -> Any:
    """A tree without its texts."""
    if isinstance(x, dict):
        return {key: numbers(value) for key, value in x.items() if not isinstance(value, str)}
    if isinstance(x, list):
        return [numbers(value) for value in x if not isinstance(value, str)]
    return x


def keys_of(lines: Iterable[Tree]) -> list[str]:
    return list(dict.fromkeys(key for line in lines for key in line))


# ── Comparing ────────────────────────────────────────────────────────────────────────────────────


def machine() -> Tree:
    """What numbers depend on beside our code."""
    import torch
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def differences(expected: Any, got: Any, where: str = "") -> Iterator[str]:
    """One line for each value that differs, with both values."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in dict.fromkeys([*expected, *got]):
            place = f"{where} {key}".strip()
            if key not in got:
                yield f"{place}: missing; expected {short(expected[key])}"
            elif key not in expected:
                yield f"{place}: new; got {short(got[key])}"
            else:
                steps = got.get("step") if isinstance(got.get("step"), list) else None
                yield from _values(expected[key], got[key], place, steps)
    else:
        yield from _values(expected, got, where, None)


def _values(expected: Any, got: Any, where: str, steps: list[int] | None) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        yield from differences(expected, got, where)
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            name = f"step {steps[index]}" if steps else f"[{index}]"
            yield from _values(one, other, f"{where} {name}", None)
    elif not same(expected, got):
        yield f"{where}: expected {short(expected)}; got {short(got)}"


def same(one: Any, other: Any) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return one == other or (both and math.isnan(one) and math.isnan(other))


def share_apart(expected: Any, got: Any) -> float:
    """Share of numbers that differ by more than rounding; for another kind of CPU, without hashes.

    Measured with torch's AVX2 and scalar code against AVX-512: none, but for one clipped token and
    the cases of ``ROUNDED``.
    """
    pairs = list(_numbers(expected, got))
    apart = [abs(x - y) > 1e-4 * max(abs(x), abs(y), 0.01) for x, y in pairs]
    return sum(apart) / max(1, len(pairs))


def _numbers(expected: Any, got: Any) -> Iterator[tuple[float, float]]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in expected:
            yield from _numbers(expected[key], got.get(key))
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for one, other in zip(expected, got, strict=True):
            yield from _numbers(one, other)
    elif isinstance(expected, int | float):
        known = isinstance(got, int | float) and math.isfinite(expected)
        yield (expected, got) if known else (0.0, float(got is None or math.isfinite(expected)))


def short(x: Any) -> str:
    text = repr(x)
    return text if len(text) < 80 else f"{text[:77]}…"


# ── The command ──────────────────────────────────────────────────────────────────────────────────


def record(name: str, keep: Path | None = None) -> Tree:
    """Run one case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "case"
        if keep is not None:
            folder = keep / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
        return CASES[name](folder)


def render(x: Any, indent: int = 0) -> str:
    """JSON in which a list stands on one line, so that a diff shows what changed."""
    if not isinstance(x, dict) or not x:
        return json.dumps(x, ensure_ascii=False, separators=(",", ":"))
    inner = [f"{json.dumps(key)}: {render(value, indent + 1)}" for key, value in x.items()]
    pad = " " * indent
    return "{\n" + ",\n".join(f"{pad} {line}" for line in inner) + f"\n{pad}}}"


def serve() -> None:
    """Record each case that is named on standard input; for test_identity.py."""
    for line in sys.stdin:
        try:
            answer = {"found": record(line.strip())}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="names of cases, or their beginnings; all if none")
    parser.add_argument("--write", action="store_true", help="write the recording")
    parser.add_argument("--output", type=Path, default=EXPECTED, help="where --write writes it")
    parser.add_argument("--against", type=Path, default=EXPECTED, help="recording to compare with")
    parser.add_argument("--keep", type=Path, help="folder in which run directories are kept")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [x for x in CASES if not options.cases or x.startswith(tuple(options.cases))]
    if options.list:
        sys.exit(print("\n".join(chosen)))
    preload()
    if options.serve:
        sys.exit(serve())
    import segcredit as package

    print(f"{package.__file__}, {machine()}")
    whole = {"machine": machine(), "cases": {}}
    if options.write and options.cases and options.output.exists():
        whole["cases"] = json.loads(options.output.read_text())["cases"]
    expected = {} if options.write else json.loads(options.against.read_text())["cases"]
    wrong = 0
    for name in chosen:
        start = time.monotonic()
        try:
            found = json.loads(json.dumps(record(name, options.keep and options.keep.resolve())))
            whole["cases"][name] = found
            lines = [] if options.write else list(differences(expected.get(name, {}), found))
        except Exception as error:
            lines = [f"failed: {error}"]
        wrong += bool(lines)
        print(f"{name}: {time.monotonic() - start:.1f} s, {len(lines)} differences", flush=True)
        for line in lines[:40]:
            print(f"  {line}")
    if options.write:
        options.output.write_text(render(whole) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main()
