"""Small settings in which every method learns within seconds, and their warm starts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcredit.config import Recipe, parse_recipe
from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.stages import stage_of
from segcredit.train.state import State

ROWS = 128
"""Responses per step."""


@dataclass(frozen=True)
class Small:
    """A world, a model and its imitation."""

    world: str
    settings: dict[str, Any]
    tiny: str
    imitation: tuple[dict[str, Any], ...]
    sizes: dict[str, int] = field(default_factory=lambda: {"hidden": 48, "layers": 1, "heads": 2})


def grid(tiny: str, cell: int) -> Small:
    """Two by two cells, one kind of shape; a glance is always wrong, so checking pays."""
    return Small(
        "shape_grid",
        {
            "size": 2,
            "colors": 1,
            "shapes": 1,
            "terms": 1,
            "twice": False,
            "cell": cell,
            "careful": 0.4,
            "glance_error": 1.0,
        },
        tiny,
        (
            {"kind": "warm_start", "phase": "look", "steps": 50},
            {"kind": "warm_start", "phase": "solve", "steps": 110, "warmup_steps": 0},
        ),
    )


def chains() -> Small:
    """One sum or difference modulo 5; three results in ten are demonstrated wrong."""
    return Small(
        "derived_variables",
        {
            "given": 2,
            "derived": 1,
            "needed": [1, 1],
            "modulus": 5,
            "operations": "+-",
            "wrong": 0.3,
        },
        "llama",
        ({"kind": "warm_start", "phase": "solve", "steps": 500, "lr": 4e-3},),
    )


SMALL = {
    "grid": grid("qwen2_5_vl", 28),
    "chains": chains(),
    "grid_qwen3_vl": grid("qwen3_vl", 32),
}


def recipe(small: Small, algorithm: Any = "sapo", samples: int = 1, **changes: Any) -> Recipe:
    """The small setting's recipe for one method; ``changes`` replace whole sections."""
    pretrain = [{"kind": "pretrain_critic", "steps": 3}] if changes.pop("pretrain", False) else []
    steps = changes.pop("steps", 16)
    found = {
        "model": {"tiny": small.tiny, **small.sizes},
        "data": {
            "world": small.world,
            "settings": small.settings,
            "size": changes.pop("size", None),
        },
        "reward": "exact",
        "algorithm": algorithm,
        "stages": [*small.imitation, *pretrain, {"kind": "optimize", "steps": steps}],
        "rollout": {"prompts": ROWS // samples, "samples": samples, "max_tokens": 24},
        "update": {"minibatches": 2},
        "optimizer": {"lr": 1e-3, "critic_lr": 2e-3},
        "evaluation": {"prompts": 16, "every": 0},
        **changes,
    }
    return parse_recipe(found)


def warm_start(small: Small, folder: Path) -> Path:
    """Imitate once and keep the policy."""
    state = build(make_plan(recipe(small)))
    for number, stage in enumerate(state.recipe.stages[: len(small.imitation)]):
        run_stage(state, number, stage)
    state.policy.save(folder)
    return folder


def run_stage(state: State, number: int, stage: Any) -> list[dict[str, float]]:
    """All steps of one stage; what each measured."""
    state.stage, state.stage_step = number, 0
    stage_of(state, stage).enter()
    found = []
    for _ in range(stage.steps):
        found.append(stage_of(state, stage).step()[0])
        state.stage_step += 1
        state.step += 1
    return found


def after_warm_start(made: Recipe, folder: Path) -> tuple[State, list[dict[str, float]]]:
    """Everything behind the imitation, from a kept policy; metrics of the optimization."""
    state = build(make_plan(made), Policy.from_pretrained(folder))
    found: list[dict[str, float]] = []
    for number, stage in enumerate(made.stages):
        if stage.kind != "warm_start":
            found = run_stage(state, number, stage)
    return state, found
