"""Describe versions, hardware and source of a run, without names of machine or user."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from segcredit import __version__

PACKAGES = (
    "accelerate",
    "antlr4-python3-runtime",
    "datasets",
    "deepspeed",
    "flash-attn",
    "jaxtyping",
    "jinja2",
    "latex2sympy2_extended",
    "liger-kernel",
    "math-verify",
    "mpmath",
    "numpy",
    "peft",
    "pillow",
    "pyarrow",
    "pydantic",
    "ray",
    "safetensors",
    "sympy",
    "tensorboard",
    "tokenizers",
    "torch",
    "torchvision",
    "transformers",
    "triton",
    "verl",
    "vllm",
)
"""Packages whose versions are recorded: those that affect training, grading and prompts."""

_SECRET = re.compile(r"(?i)(api|access|auth|private)[_.-]?key|token(?!s|i)|secret|passw(or)?d")
"""Names of settings whose values are secret; max_tokens and tokenizer do not match."""
_PACKAGE = Path(__file__).resolve().parents[1]


def describe_environment(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the content of environment.json; ``command`` defaults to this process's arguments."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_secrets(sys.argv if command is None else command),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": _versions(),
        "hardware": {
            "cpus": _usable_cpus(),
            "memory_gib": _memory_gib(),
            "gpus": _gpus(),
        },
        "git": source_commit(_PACKAGE),
    }


def environment_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List changes of the environment that may change results, e.g. "torch 2.12 → 2.13"."""
    before, after = then.get("packages") or {}, now.get("packages") or {}
    both = [name for name in before if name in after]
    pairs = [("python", then.get("python"), now.get("python"))]
    pairs += [(name, before[name], after[name]) for name in both]
    pairs.append(("segcredit's commit", _commit(then), _commit(now)))
    return [
        f"{name} {old} → {new}" for name, old, new in pairs if old != new and None not in (old, new)
    ]


def _commit(description: Mapping[str, Any]) -> str | None:
    """Format the commit of segcredit in an environment description; None if it has none."""
    if "git" not in description:
        return None
    git = description["git"]
    if git is None:
        return "none (installed)"
    return f"{str(git['commit'])[:12]}{' with changes' * bool(git['dirty'])}"


def without_secrets(command: Sequence[str]) -> list[str]:
    """Replace the values of keys, tokens and passwords in a command line by stars."""
    shown: list[str] = []
    hidden = False
    for word in command:
        name, equals, _ = word.partition("=")
        secret = _SECRET.search(name) is not None
        if hidden and not word.startswith("-"):
            shown.append("***")
        else:
            shown.append(f"{name}=***" if secret and equals else word)
        hidden = secret and word.startswith("-") and not equals
    return shown


def source_commit(package: Path) -> dict[str, Any] | None:
    """Return the commit of the package's checkout, and whether the package differs from it.

    None for an installed package: the repository around a virtual environment is not its source.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changes.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"segcredit": __version__}  # works even if the package is only on PYTHONPATH
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": x.name, "memory_gib": round(x.total_memory / 2**30, 1)} for x in found]
