"""Runs of a second, what they leave behind, and whether two of them are the same run."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "threads": 1,
    "model": {"tiny": "qwen2", "hidden": 32, "layers": 1, "heads": 4},
    "data": {
        "world": "derived_variables",
        "settings": {"given": 2, "derived": 3, "needed": [1, 2], "modulus": 7},
    },
    "reward": "reward.py:by_length",
    "algorithm": {"name": "sapo", "kl": 0.01},
    "stages": [
        {"kind": "warm_start", "steps": 2, "batch": 4},
        {"kind": "warm_start", "steps": 2, "batch": 4, "lr": 1e-3, "beta2": 0.9},
        {"kind": "pretrain_critic", "steps": 3, "lr": 2e-3},
        {"kind": "optimize", "steps": 8},
    ],
    "rollout": {"prompts": 8, "max_tokens": 12},
    "update": {"minibatches": 2},
    "optimizer": {"lr": 1e-3, "critic_lr": 1e-3, "schedule": "linear"},
    "evaluation": {"every": 2, "prompts": 8},
    "save": {"every": 2, "rollouts_every": 2, "rollouts": 4},
}
REWARD = """
def by_length(num_tokens, **columns):
    return [(n % 4) / 3 for n in num_tokens]
"""
"""Of an untrained model nothing is right, and equal rewards would hide a critic that is lost."""
TIMES = re.compile(r"time/|memory/|tokens_per_second$|ahead/sample_seconds$")
TITLE = re.compile(r"^\d (imitate|train critic|reinforce) \(stages\.\d\): ", re.MULTILINE)
"""What a run prints when it has begun, or has gone on."""


def changed(**changes: Any) -> dict[str, Any]:
    """The recipe with other settings, ``stages__0__steps=3``."""
    made = copy.deepcopy(RECIPE)
    for path, value in changes.items():
        *way, last = [int(x) if x.isdigit() else x for x in path.split("__")]
        place: Any = made
        for step in way:
            place = place[step]
        place[last] = value
    return made


def write_recipe(folder: Path, **changes: Any) -> Path:
    """recipe.yaml, with the reward it names beside it."""
    (folder / "reward.py").write_text(REWARD)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(changed(**changes)))
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every line, less what no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: x for key, x in line.items() if not TIMES.match(key)} for line in lines]


def count_lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def kept(run: Path) -> dict[str, bytes]:
    """Every file whose bytes two equal runs share: weights, optimizers, rollouts, the settings."""
    places = ("checkpoints", "rollouts", "watched", "images", "evaluations", "config.yaml")
    files = [x for place in places for x in [run / place, *(run / place).rglob("*")]]
    found = {str(x.relative_to(run)): x.read_bytes() for x in files if x.is_file()}
    for name in found:  # where metrics.jsonl ended differs: its seconds have more or fewer digits
        if name.endswith("state.json"):
            found[name] = re.sub(rb'\["metrics_position", \d+\]', b"", found[name])
    # and transformers notes in tokenizer_config.json whether a tokenizer was loaded or made
    others = ("manifest.json", "tokenizer_config.json")
    return {name: x for name, x in found.items() if not name.endswith(others)}


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit."""
    for mine, its in zip(metrics(one), metrics(other), strict=True):
        assert mine == its, f"{mine} is not {its}"
    ours, theirs = kept(one), kept(other)
    assert ours.keys() == theirs.keys(), f"only one of them has {ours.keys() ^ theirs.keys()}"
    assert any(name.endswith("policy/model.safetensors") for name in ours)
    different = [name for name in ours if ours[name] != theirs[name]]
    assert not different, f"these files differ: {different}"
