"""Recipes of a study's runs, and of the starting runs that many runs share."""

import copy
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from segcredit.algorithms import ALGORITHMS
from segcredit.columns import VALUE, resolve
from segcredit.config import (
    Optimize,
    PretrainCritic,
    Recipe,
    RecipeError,
    WarmStart,
    apply_overrides,
    merge_settings,
    parse_recipe,
    recipe_settings,
)
from segcredit.config.recipe import algorithm_of
from segcredit.runlog.folder import CRITIC, POLICY
from segcredit_lab.study.definition import Arm, Scale, Study

EQUAL = ("kl", "clip", "gamma")
"""Settings of the base's method that every arm inherits if its method has them."""
PAPER = "paper"


def arm_recipe(study: Study, name: str, scale: Scale, overrides: Sequence[str] = ()) -> Recipe:
    """Complete recipe of an arm, including its warm start, with the recipe's seed and rate."""
    arm = study.arms[name]
    source = f"study {study.name}, arm {name}"
    found = copy.deepcopy(_settings(study, arm, scale))
    found["name"] = name
    apply_overrides(found, overrides)
    found["stages"] = _stages(found, arm)
    if arm.rounds > 1:
        found = _in_rounds(found, arm.rounds)
    return parse_recipe(found, source)


def _settings(study: Study, arm: Arm, scale: Scale) -> dict[str, Any]:
    if scale.name == PAPER and arm.paper is not None:
        return merge_settings(recipe_settings(arm.paper), study.recipe)
    base = scale.bases.get(study.base, study.base)
    if scale.name == PAPER and study.paper_base is not None:
        base = study.paper_base
    found = merge_settings(recipe_settings(base), study.recipe)
    if arm.algorithm is not None:
        method = with_shared_settings(found.get("algorithm"), arm.algorithm)
        found = merge_settings(found, {"algorithm": method})
    if arm.samples is not None or arm.share < 1:
        least = int((found.get("update") or {}).get("minibatches", 4))
        drawn = _rollouts(found.get("rollout") or {}, arm, least)
        found = merge_settings(found, {"rollout": drawn})
    return merge_settings(found, arm.recipe)


def with_shared_settings(base: Any, method: str | dict[str, Any]) -> dict[str, Any]:
    """Copy kl, clip and gamma from the base to an arm's method, if the method accepts them."""
    made = {"name": method} if isinstance(method, str) else dict(method)
    try:
        known = signature(ALGORITHMS[str(made.get("name"))]).parameters
    except ValueError:  # reading the recipe reports a wrong name
        return made
    if not isinstance(base, dict):
        return made
    return {**{key: base[key] for key in EQUAL if key in base and key in known}, **made}


def _rollouts(base: dict[str, Any], arm: Arm, least: int) -> dict[str, int]:
    """Compute prompts and responses per prompt, with at least ``least`` responses per step."""
    prompts, samples = int(base.get("prompts", 128)), int(base.get("samples", 1))
    drawn = samples if arm.samples is None else arm.samples
    rows = prompts * samples
    if not arm.same_prompts and rows % drawn:
        raise RecipeError(
            f"{rows} rollouts per step cannot be divided into {drawn} responses per prompt: "
            f"set rollout.prompts to a multiple of {drawn}."
        )
    asked = prompts if arm.same_prompts else rows // drawn
    return {"samples": drawn, "prompts": max(-(-least // drawn), round(arm.share * asked))}


def _in_rounds(found: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Merge several steps into one round with the same rollouts, mini-batches and evaluations.

    ``save.every`` stays, since the shared warm start has it, too.
    """
    stages = []
    for stage in found.get("stages") or []:
        if isinstance(stage, dict) and stage.get("kind") == "optimize":
            steps = int(stage.get("steps", 0))
            if steps % rounds:
                raise RecipeError(
                    f"{steps} optimization steps cannot be joined to rounds of {rounds} steps: set "
                    f"steps to a multiple of {rounds}."
                )
            stage = stage | {"steps": steps // rounds}
        stages.append(stage)
    counts = {
        "rollout": {"prompts": rounds * int((found.get("rollout") or {}).get("prompts", 128))},
        "update": {"minibatches": rounds * int((found.get("update") or {}).get("minibatches", 4))},
        "evaluation": {"every": _every(found, "evaluation", "every", 10, rounds)},
        "save": {"rollouts_every": _every(found, "save", "rollouts_every", 10, rounds)},
    }
    return merge_settings(found | {"stages": stages}, counts)


def _every(found: dict[str, Any], section: str, key: str, default: int, rounds: int) -> int:
    """Return an interval in rounds instead of steps; 0 stays 0."""
    steps = int((found.get(section) or {}).get(key, default))
    return steps and max(1, steps // rounds)


def _stages(found: dict[str, Any], arm: Arm) -> Any:
    """Remove critic pretraining if the method has no critic or the arm sets ``cold``."""
    stages = found.get("stages")
    try:
        has_critic = VALUE in resolve(algorithm_of(found.get("algorithm") or "sapo").needs)
    except (ValueError, TypeError, KeyError):
        return stages  # parse_recipe reports what is wrong
    if not isinstance(stages, list) or (has_critic and not arm.cold):
        return stages
    return [x for x in stages if not (isinstance(x, dict) and x.get("kind") == "pretrain_critic")]


def seeded(recipe: Recipe, seed: int, rate: float | None = None) -> Recipe:
    """Set a recipe's seed, and the policy's learning rate."""
    changes: dict[str, Any] = {"seed": seed}
    if rate is not None:
        changes["optimizer"] = recipe.optimizer.model_copy(update={"lr": rate})
    return recipe.model_copy(update=changes)


def shortened(recipe: Recipe, share: float) -> Recipe:
    """Shorten a recipe to a share of its optimization steps, for tuning."""
    stages = [
        stage.model_copy(update={"steps": max(1, round(share * stage.steps))})
        if isinstance(stage, Optimize)
        else stage
        for stage in recipe.stages
    ]
    return recipe.model_copy(update={"stages": stages})


def warm_start_of(recipe: Recipe) -> Recipe | None:
    """Return the recipe of the warm start as a separate run; None if the recipe has none.

    It keeps only the settings that the warm start and its evaluation read, so that all arms of a
    seed share one warm start, whatever their method.
    """
    stages = _imitation(recipe)
    return _beginning(recipe, "warm", stages) if stages else None


def pretraining_of(recipe: Recipe) -> Recipe | None:
    """Return the recipe of warm start and critic pretraining; None unless the recipe has both.

    The critic is trained on the return at every token, so all arms of a seed share it, whatever
    their partition. It cannot be shared with an adapter, or if values are discounted by the arm's
    units (γ < 1).
    """
    stages, pretraining = _imitation(recipe), _pretraining(recipe)
    gamma = getattr(getattr(recipe.make_algorithm(), "credit", None), "gamma", 1.0)
    if not stages or not pretraining or recipe.model.lora is not None or gamma != 1.0:
        return None
    method = {"name": "sapo", "partition": "token"}
    return _beginning(recipe, "critic", [*stages, *pretraining], method)


def _beginning(
    recipe: Recipe,
    name: str,
    stages: Sequence[WarmStart | PretrainCritic],
    method: dict[str, Any] | None = None,
) -> Recipe:
    """Reduce a recipe to these stages and the settings they read; ``method`` if it has a critic."""
    drawing = ["max_tokens", "temperature", "rows", "engine", "graphs", "vllm"]
    stepping = ["kind", "beta1", "eps", "weight_decay", "max_grad_norm"]
    updating = ["tokens_per_micro"]
    if method is not None:
        drawing += ["samples", "prompts"]
        stepping += ["beta2"]
        updating += ["minibatches"]
        if any(isinstance(stage, PretrainCritic) and stage.lr is None for stage in stages):
            stepping += ["critic_lr"]
    whole, default = recipe.as_dict(), Recipe.model_fields
    whole["model"]["critic"] = None
    _use_stage_settings(whole, [x for x in stages if isinstance(x, PretrainCritic)])
    found = {
        **{key: whole[key] for key in ("seed", "threads", "model", "data", "reward", "memory")},
        "name": name,
        "algorithm": default["algorithm"].default if method is None else method,
        "stages": [stage.model_dump(mode="json") for stage in stages],
        "rollout": {key: whole["rollout"][key] for key in drawing},
        "update": {key: whole["update"][key] for key in updating},
        "optimizer": {key: whole["optimizer"][key] for key in stepping},
        "evaluation": {**whole["evaluation"], "every": 0, "watch": 0},
        "save": {"every": whole["save"]["every"], "keep": 1, "rollouts_every": 0},
    }
    return parse_recipe(found, f"{name} of {recipe.name}")


def _use_stage_settings(whole: dict[str, Any], stages: Sequence[PretrainCritic]) -> None:
    """Copy ``prompts`` and ``minibatches`` from the stages to the recipe, if all stages set them.

    The recipe's values are then unused. Replacing them makes the recipes of arms that differ only
    in these values equal, so that the arms share one run.
    """
    prompts = [stage.prompts for stage in stages if stage.prompts is not None]
    if stages and len(prompts) == len(stages):
        whole["rollout"]["prompts"] = min(prompts)
    counts = [stage.minibatches for stage in stages if stage.minibatches is not None]
    if stages and len(counts) == len(stages):
        whole["update"]["minibatches"] = min(counts)


def after(recipe: Recipe, start: Recipe, place: str) -> Recipe:
    """Return the recipe of the remaining stages; its models come from checkpoint ``place``."""
    folder = Path(place)
    model = {"path": str(folder / POLICY), "tiny": None}
    if pretrains(start):
        model["critic"] = str(folder / CRITIC)
    changes = {
        "stages": recipe.stages[len(start.stages) :],
        "model": recipe.model.model_copy(update=model),
    }
    return parse_recipe(recipe.model_copy(update=changes).as_dict(), recipe.name)


def _imitation(recipe: Recipe) -> list[WarmStart]:
    """Return the leading warm-start stages."""
    found: list[WarmStart] = []
    for stage in recipe.stages:
        if not isinstance(stage, WarmStart):
            break
        found.append(stage)
    return found


def _pretraining(recipe: Recipe) -> list[PretrainCritic]:
    """Return the critic pretraining stages directly after the warm start."""
    found: list[PretrainCritic] = []
    for stage in recipe.stages[len(_imitation(recipe)) :]:
        if not isinstance(stage, PretrainCritic):
            break
        found.append(stage)
    return found


def pretrains(recipe: Recipe) -> bool:
    """Whether a recipe pretrains its critic."""
    return any(isinstance(stage, PretrainCritic) for stage in recipe.stages)
