"""Models, rows and recipes of verl_step.py, shared by verl and the native trainer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from real_shapes import policy_for, tokenizer_for
from real_step import generated

from segcredit.config import parse_recipe
from segcredit.data import load_prompts
from segcredit.models.images import open_image, to_png
from segcredit.train.build import build, make_plan
from segcredit.train.loop import evaluate_state
from segcredit.train.stages import stage_of
from segcredit.types import Prompt

TARGET = 0.3
"""Sampled accuracy at which imitation ends."""
WORLD: dict[str, Any] = {
    "given": 2,
    "derived": 2,
    "needed": [1, 2],
    "modulus": 7,
    "operations": "+-",
    "wrong": 0.3,  # demonstrations contain errors that reinforcement learning can remove
}
SMALL_WORLD: dict[str, Any] = {
    "given": 2,
    "derived": 1,
    "needed": [1, 1],
    "modulus": 5,
    "operations": "+-",
    "wrong": 0.3,
}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def write_rows(path: Path, prompts: Sequence[Prompt]) -> Path:
    """Write rows in verl's format with embedded images, as ``segcredit prepare`` does."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": str((prompt.columns or {}).get("data_source", "benchmark")),
            "prompt": [dict(x) for x in prompt.messages],
            **(
                {"images": [{"bytes": to_png(open_image(x))} for x in prompt.images]}
                if prompt.images
                else {}
            ),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": prompt.answer},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def warm_start(folder: Path, small: bool, target: float = TARGET) -> None:
    """Train a new Llama by imitation on a generated world until it reaches the target accuracy.

    If it does not reach the target, start again with an easier world.
    """
    for world in (SMALL_WORLD,) if small else (WORLD, SMALL_WORLD):
        if imitate(folder, small, world, target) >= 0.9 * target:
            return
    print(f"imitation did not reach {target:.0%}; continuing with this model", flush=True)


def imitate(folder: Path, small: bool, world: dict[str, Any], target: float) -> float:
    """Save model and rows in the directory; return the sampled accuracy."""
    recipe = parse_recipe(
        {
            "name": "warm-start",
            "model": {"tiny": "llama", "hidden": 48, "layers": 1, "heads": 2}
            if small
            else {"tiny": "llama", "hidden": 256, "layers": 4, "heads": 4},
            "data": {"world": "derived_variables", "settings": world},
            "reward": "exact",
            "algorithm": "sapo",
            "stages": [
                {
                    "kind": "warm_start",
                    "steps": 500 if small else 2000,
                    "batch": 32 if small else 256,
                    "lr": 4e-3 if small else 1e-3,
                }
            ],
            "rollout": {"prompts": 128, "max_tokens": longest(small)},
            "evaluation": {"prompts": 256, "samples": 1 if small else 4, "greedy": False},
        }
    )
    state = build(make_plan(recipe))
    test, state.test = state.test, state.train  # evaluate on the training prompts
    assert test is not None
    (stage,) = recipe.stages
    stage_of(state, stage).enter()
    reached = 0.0
    for step in range(1, stage.steps + 1):
        metrics, _ = stage_of(state, stage).step()
        state.step += 1
        state.stage_step += 1
        if step % 100 == 0:
            state.sync()
            found = evaluate_state(state)
            assert found is not None
            reached = found.sampled
            print(f"imitation, step {step}: nll {metrics['nll']:.3f}, {reached:.1%}", flush=True)
            if reached >= target:
                break
    state.policy.save(folder / "model")
    write_rows(folder / "train.parquet", state.train.take(0, 2048 if small else 16_384))
    write_rows(folder / "test.parquet", test.take(0, 256))
    return reached


def longest(small: bool) -> int:
    """Return the maximum response length: a line has 14 tokens, and some lines are redundant."""
    return 24 if small else 56


def learning_recipe(folder: Path, small: bool, steps: int) -> Path:
    """Write the recipe that continues with SAPO."""
    return _write(
        folder,
        {
            "name": "learn",
            "model": {
                "path": str(folder / "model"),
                "dtype": "float32" if small else "bfloat16",
                "attention": "sdpa",
            },
            "data": {
                "train": [str(folder / "train.parquet")],
                "test": [str(folder / "test.parquet")],
                "max_prompt_tokens": 128,
            },
            "reward": "exact",
            "algorithm": {"name": "sapo", "kl": 0.0},
            "stages": [{"kind": "optimize", "steps": steps}],
            "rollout": {
                "prompts": 64 if small else 512,
                "max_tokens": longest(small),
                "engine": "hf" if small else "vllm",
                "vllm": {"eager": True},  # starts a minute faster; responses are short
                "old_logp": "recompute",
            },
            "update": {"minibatches": 2, "tokens_per_micro": 32_768},
            "optimizer": {"lr": 5e-4 if small else 1e-4, "critic_lr": 1e-3},
            "evaluation": {"every": 0, "prompts": 128},
            "save": {"every": 1000, "rollouts_every": 0},
        },
    )


def real_model(folder: Path, data: Path | None, size: str, prompts: int, small: bool) -> Path:
    """Save a checkpoint of random weights with the real shapes, and rows with images."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = data or generated(prompts, folder)
    found = load_prompts([str(rows)], limit=prompts).prompts
    if len(found) < prompts:
        raise SystemExit(f"--prompts {prompts} is more than the {len(found)} rows of {rows}.")
    tokenizer = tokenizer_for(x["content"] for prompt in found for x in prompt.messages)
    dtype = torch.float32 if small else torch.bfloat16
    policy = policy_for(size, True, tokenizer, device(), dtype)
    policy.save(folder / "model")
    # one step's rows, so that every step does the same work on both sides
    write_rows(folder / "train.parquet", found)
    print(f"{sum(x.numel() for x in policy.model.parameters()) / 1e9:.2f} B parameters", flush=True)
    return folder


def real_recipe(
    folder: Path, small: bool, prompts: int, tokens: int, micro: int, eager: bool = False
) -> Path:
    """Write the recipe of benchmarks/real_step.py."""
    return _write(
        folder,
        {
            "name": "real",
            "model": {"path": str(folder / "model"), "dtype": "float32" if small else "bfloat16"},
            "data": {"train": [str(folder / "train.parquet")], "max_prompt_tokens": 1024},
            "reward": "geo3k",
            "algorithm": "sapo",
            "stages": [{"kind": "optimize", "steps": 2}],
            "rollout": {
                "prompts": prompts,
                "max_tokens": tokens,
                "engine": "hf" if small else "vllm",
                "vllm": {"eager": eager},
                "old_logp": "recompute",
            },
            "update": {"minibatches": 2 if small else 4, "tokens_per_micro": micro},
            "memory": {"recompute_activations": True, "offload_optimizer": not small},
            "optimizer": {"lr": 1e-6, "critic_lr": 2e-6},
            "evaluation": {"every": 0},
            "save": {"every": 1000, "rollouts_every": 0},
        },
    )


def _write(folder: Path, recipe: dict[str, Any]) -> Path:
    parse_recipe(recipe)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run_native(recipe: Path, overrides: list[str]) -> None:
    """Run the recipe with the native trainer; print the metrics as JSON on the last line."""
    from peak import Peak

    from segcredit.config import load_recipe

    plan = make_plan(load_recipe(str(recipe), overrides))
    state = build(plan)
    (stage,) = plan.recipe.stages
    stage_of(state, stage).enter()
    found = []
    with Peak() as peak:
        for _ in range(stage.steps):
            metrics, _ = stage_of(state, stage).step()
            state.step += 1
            state.stage_step += 1
            found.append(metrics)
            shown = {k: round(x, 3) for k, x in metrics.items() if k.startswith("time/")}
            print(f"native step {len(found)}: reward {metrics['reward']:.3f} {shown}", flush=True)
    print("NATIVE " + json.dumps({"steps": found, "peak": peak.gib}), flush=True)
