"""A process that is killed, or told that the disk fails, at its n-th file operation in a folder.

Run as a program with a folder, it prepares a tiny run once, forks one process per case, and prints
what each case left. Operations are counted and not listed by hand: a new one is met as well.
"""

import _pyio
import builtins
import errno
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

READS = frozenset({"open", "read", "pread", "scandir", "listdir"})
WRITES = frozenset(
    {"create", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "ftruncate", "fchmod"}
)
REMOVES = frozenset({"unlink", "remove", "rmdir"})
FAULTS: dict[str, tuple[frozenset[str], int | None]] = {
    "kill": (WRITES | REMOVES, None),  # before a read, the disk is as before the next of these
    "EIO": (READS, errno.EIO),
    "EACCES": (frozenset({"open", "scandir", "listdir"}), errno.EACCES),
    "ENOSPC": (WRITES, errno.ENOSPC),
}
"""Which operations, and what the operating system answers; None: the process is killed."""


class Faults:
    """Counts the operations of some kinds below a folder, and strikes at one of them."""

    def __init__(self, root: Path, name: str, moment: int) -> None:
        self.root = str(root)
        self.kinds, self.number = FAULTS[name]
        self.moment = moment
        self.count = 0
        self.struck = ""

    def install(self) -> None:
        """For the rest of this process, whose files Python itself opens, reads and writes."""
        import safetensors
        import safetensors.torch as tensors
        from safetensors import serialize

        for name in sorted(READS | WRITES | REMOVES - {"create"}):
            if hasattr(os, name):
                setattr(os, name, self._watched(name, getattr(os, name)))
        builtins.open = io.open = _pyio.open  # calls what is above

        def write(data: Any, file: Any, metadata: Any = None) -> None:
            Path(file).write_bytes(serialize(data, metadata))

        tensors.serialize_file = write
        for module in list(sys.modules.values()):
            if getattr(module, "safe_open", None) is safetensors.safe_open and module:
                module.safe_open = self._opened(safetensors.safe_open)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            kind = name
            if name == "open" and len(arguments) > 1 and arguments[1] & os.O_CREAT:
                kind = "create"
            self.meet(kind, arguments[0] if arguments else ".", options.get("dir_fd"))
            return real(*arguments, **options)

        return call

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *arguments: Any, **options: Any) -> Any:
            self.meet("open", file, None)
            return real(file, *arguments, **options)

        return call

    def meet(self, kind: str, where: Any, folder: int | None) -> None:
        if kind not in self.kinds or not self._inside(where, folder):
            return
        self.count += 1
        if self.count != self.moment:
            return
        self.struck = f"{kind} {where}"
        if self.number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.number, os.strerror(self.number), str(where))

    def _inside(self, where: Any, folder: int | None) -> bool:
        if isinstance(where, int):
            path = os.readlink(f"/proc/self/fd/{where}")
        else:
            path = os.fsdecode(where)
            if folder is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        return path.startswith(self.root) and not path.endswith("/.lock")


# ── A tiny run ───────────────────────────────────────────────────────────────────────────────────

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "threads": 1,
    "model": {"tiny": "qwen2", "hidden": 16, "layers": 1, "heads": 2},
    "data": {
        "world": "derived_variables",
        "settings": {"given": 2, "derived": 3, "needed": [1, 2], "modulus": 7},
    },
    "reward": "exact",
    "algorithm": {"name": "sapo", "kl": 0.01},
    "stages": [
        {"kind": "warm_start", "steps": 1, "batch": 2},
        {"kind": "optimize", "steps": 2},
    ],
    "rollout": {"prompts": 2, "max_tokens": 4},
    "update": {"minibatches": 1},
    "evaluation": {"every": 1, "prompts": 1, "greedy": False, "watch": 1},
    "save": {"every": 1, "keep": 2, "rollouts_every": 1, "rollouts": 1},
}
AHEAD: dict[str, Any] = RECIPE | {
    "data": RECIPE["data"] | {"size": 4, "curriculum": True},
    "rollout": RECIPE["rollout"] | {"ahead": 1},
    "save": RECIPE["save"] | {"best": True},
}
"""With more to save: a batch that is sampled ahead, success rates, the best checkpoint."""


def prepared(recipe: dict[str, Any]) -> Any:
    """A trainer, and everything imported that a run needs."""
    import torch

    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.disable_progress_bar()
    from segcredit.config import parse_recipe
    from segcredit.runlog import storage as manifest
    from segcredit.train import trainer

    trainer.open_trackers = lambda *arguments: []
    trainer.describe_environment = lambda: {"python": "3", "packages": {}}
    manifest._threads = lambda: 1
    return trainer.Trainer.from_recipe(parse_recipe(recipe))


def go(trainer: Any, folder: Path) -> None:
    """Begin the run, or go on with it."""
    trainer.train(folder, resume=(folder / "config.yaml").is_file())


def in_a_child(work: Callable[[], None]) -> int:
    """Exit code: 0 done, 2 stopped with a message for users, 3 anything else; or the signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 3
    try:
        work()
        code = 0
    except (ValueError, OSError):
        code = 2
    except BaseException as error:
        code = 2 if type(error).__name__ == "CheckpointError" else 3
        if code == 3:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# ── What is left ─────────────────────────────────────────────────────────────────────────────────

STEPS = ("rollouts", "watched", "evaluations")


def lines(folder: Path) -> list[str]:
    """Metrics, less times."""
    found = []
    for file in [folder / "metrics.jsonl", *sorted(folder.glob("rolled_back/*/metrics.jsonl"))]:
        for line in file.read_text().splitlines() if file.exists() else []:
            row = {
                k: x
                for k, x in json.loads(line).items()
                if not re.match("time|memory|tok|ahead/", k)
            }
            found.append(json.dumps(row))
    return found


def result(folder: Path) -> dict[str, str]:
    """What two equal runs share: metrics, and files of steps and of the last two checkpoints."""
    own = folder / "metrics.jsonl"
    kept = {"metrics": str(lines(own.parent)[: own.read_text().count("\n")])}
    places = (*STEPS, "checkpoints/step-000002", "checkpoints/step-000003")
    files = [x for place in places for x in sorted((folder / place).rglob("*"))]
    for file in (*files, folder / "best.json"):
        if file.is_file() and file.name not in ("manifest.json", "tokenizer_config.json"):
            data = re.sub(rb'\["metrics_position", \d+\]', b"", file.read_bytes())
            kept[str(file.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return kept


def lost(before: Path, after: Path) -> list[str]:
    """Files and lines of a run that are nowhere any more."""
    everywhere = {x.read_bytes() for x in after.rglob("*") if x.is_file()}
    gone = [
        str(file.relative_to(before))
        for place in (*STEPS, "checkpoints/step-000002")
        for file in (before / place).rglob("*")
        if file.is_file() and file.read_bytes() not in everywhere
    ]
    return gone + sorted(set(lines(before)) - set(lines(after)))


def state_of(folder: Path) -> str:
    """The same for states of the disk from which a run goes on alike."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        name = re.sub(r"-\d+$", "", str(file.relative_to(folder)))
        if file.is_dir() or name.startswith(("rolled_back", ".lock")):
            continue
        data = file.read_bytes()
        if file.name in ("manifest.json", "state.json", "metrics.jsonl"):  # with times in them
            data = str((bool(data), data.count(b"\n") if "metrics" in name else 0)).encode()
        digest.update(name.encode() + b"\0" + hashlib.sha256(data).digest())
    return digest.hexdigest()


def cases(start: Path, scenario: str, fault: str, stride: int) -> None:
    """Strike at the first, second, … operation, until a process comes to its end untouched."""
    trainer = prepared(AHEAD if scenario == "ahead" else RECIPE)
    whole = start / "whole"
    assert in_a_child(lambda: go(trainer, whole)) == 0
    before = start / "before"
    if scenario != "begin":  # step 3 was made, but its checkpoint is gone
        shutil.copytree(whole, before)
        shutil.rmtree(before / "checkpoints" / "step-000003")
    expected, known = result(whole), set[str]()
    moment, told = 1, {"cases": 0, "codes": {}, "states": 0, "problems": []}
    while True:
        folder = start / "run"
        if before.exists():
            shutil.copytree(before, folder)
        faults = Faults(folder, fault, moment)

        def struck(faults: Faults = faults, folder: Path = folder) -> None:
            faults.install()
            try:
                go(trainer, folder)
            finally:
                untouched = faults.count < faults.moment
            if untouched:
                os._exit(4)

        code = in_a_child(struck)
        if code != 4:
            told["cases"] += 1
            told["codes"][str(code)] = told["codes"].get(str(code), 0) + 1
        case = f"{scenario}, {fault} at {moment}"
        if code not in (0, 2, 4, -signal.SIGKILL):
            told["problems"].append(f"{case}: exit code {code}")
        if before.exists() and (gone := lost(before, folder)):
            told["problems"].append(f"{case}: lost {gone}")
        state = state_of(folder) if folder.exists() else ""
        if state not in known:
            known.add(state)
            if (again := in_a_child(lambda: go(trainer, folder))) != 0:  # noqa: B023
                told["problems"].append(f"{case}: going on ends with {again}")
            elif result(folder) != expected:
                told["problems"].append(f"{case}: another run")
        shutil.rmtree(folder, ignore_errors=True)
        if code == 4:
            break
        moment += stride
    told["states"] = len(known)
    print(json.dumps(told))


if __name__ == "__main__":
    cases(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
