"""From an arm to the recipe of one run, and the beginnings that many runs share."""

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
"""Settings of the base's method that hold for every arm whose method knows them."""
PAPER = "paper"


def arm_recipe(study: Study, name: str, scale: Scale, overrides: Sequence[str] = ()) -> Recipe:
    """The whole recipe of an arm, its warm start included, with the recipe's seed and rate."""
    arm = study.arms[name]
    source = f"study {study.name}, arm {name}"
    found = copy.deepcopy(_settings(study, arm, scale))
    found["name"] = name
    apply_overrides(found, overrides)
    found["stages"] = _stages(found, arm)
    return parse_recipe(found, source)


def _settings(study: Study, arm: Arm, scale: Scale) -> dict[str, Any]:
    if scale.name == PAPER and arm.paper is not None:
        return merge_settings(recipe_settings(arm.paper), study.recipe)
    base = scale.bases.get(study.base, study.base)
    if scale.name == PAPER and study.paper_base is not None:
        base = study.paper_base
    found = merge_settings(recipe_settings(base), study.recipe)
    if arm.algorithm is not None:
        method = on_equal_terms(found.get("algorithm"), arm.algorithm)
        found = merge_settings(found, {"algorithm": method})
    if arm.samples is not None or arm.share < 1:
        least = int((found.get("update") or {}).get("minibatches", 4))
        drawn = _rollouts(found.get("rollout") or {}, arm, least)
        found = merge_settings(found, {"rollout": drawn})
    return merge_settings(found, arm.recipe)


def on_equal_terms(base: Any, method: str | dict[str, Any]) -> dict[str, Any]:
    """The arm's method with the base's kl, clip and gamma, as far as it knows them."""
    made = {"name": method} if isinstance(method, str) else dict(method)
    try:
        known = signature(ALGORITHMS[str(made.get("name"))]).parameters
    except ValueError:  # reading the recipe reports a wrong name
        return made
    if not isinstance(base, dict):
        return made
    return {**{key: base[key] for key in EQUAL if key in base and key in known}, **made}


def _rollouts(base: dict[str, Any], arm: Arm, least: int) -> dict[str, int]:
    """Responses per prompt, and of how many prompts: ``least`` responses a step at least."""
    prompts, samples = int(base.get("prompts", 128)), int(base.get("samples", 1))
    drawn = samples if arm.samples is None else arm.samples
    rows = prompts * samples
    if not arm.same_prompts and rows % drawn:
        raise RecipeError(
            f"{rows} rollouts a step cannot be divided among {drawn} responses per prompt: "
            f"set rollout.prompts to a multiple of {drawn}."
        )
    asked = prompts if arm.same_prompts else rows // drawn
    return {"samples": drawn, "prompts": max(-(-least // drawn), round(arm.share * asked))}


def _stages(found: dict[str, Any], arm: Arm) -> Any:
    """Without the critic's pretraining, if the method has none or the arm wants it cold."""
    stages = found.get("stages")
    try:
        has_critic = VALUE in resolve(algorithm_of(found.get("algorithm") or "sapo").needs)
    except (ValueError, TypeError, KeyError):
        return stages  # the recipe's own message says what is wrong
    if not isinstance(stages, list) or (has_critic and not arm.cold):
        return stages
    return [x for x in stages if not (isinstance(x, dict) and x.get("kind") == "pretrain_critic")]


def seeded(recipe: Recipe, seed: int, rate: float | None = None) -> Recipe:
    """The same with a seed, and with a learning rate of the policy's."""
    changes: dict[str, Any] = {"seed": seed}
    if rate is not None:
        changes["optimizer"] = recipe.optimizer.model_copy(update={"lr": rate})
    return recipe.model_copy(update=changes)


def shortened(recipe: Recipe, share: float) -> Recipe:
    """The same with a share of the steps of optimisation, to tune by."""
    stages = [
        stage.model_copy(update={"steps": max(1, round(share * stage.steps))})
        if isinstance(stage, Optimize)
        else stage
        for stage in recipe.stages
    ]
    return recipe.model_copy(update={"stages": stages})


def warm_start_of(recipe: Recipe) -> Recipe | None:
    """The recipe's imitation as a run of its own; None if it begins otherwise.

    Of the other settings it keeps those that imitation and the evaluation after it read, so that
    all arms of a seed, whatever their method, have the same warm start.
    """
    stages = _imitation(recipe)
    return _beginning(recipe, "warm", stages) if stages else None


def pretraining_of(recipe: Recipe) -> Recipe | None:
    """The warm start and the critic's pretraining behind it; None if the recipe has not both.

    The critic learns the return at every token, so that it is the same for all arms of a seed,
    wherever they cut and whatever they do with it. What cannot be shared is the arm's own: an
    adapter, or values that are discounted by the arm's units (γ < 1).
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
    """A run of these stages alone, with the settings they read; ``method`` if it has a critic."""
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
    _as_the_critics_own(whole, [x for x in stages if isinstance(x, PretrainCritic)])
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


def _as_the_critics_own(whole: dict[str, Any], stages: Sequence[PretrainCritic]) -> None:
    """Settings that every stage has of its own do not depend on the arm's, and fit them."""
    prompts = [stage.prompts for stage in stages if stage.prompts is not None]
    if stages and len(prompts) == len(stages):
        whole["rollout"]["prompts"] = min(prompts)
    counts = [stage.minibatches for stage in stages if stage.minibatches is not None]
    if stages and len(counts) == len(stages):
        whole["update"]["minibatches"] = min(counts)


def after(recipe: Recipe, start: Recipe, place: str) -> Recipe:
    """The rest of the recipe, from the models that ``start`` left in the checkpoint ``place``."""
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
    """The stages before the first that is no warm start."""
    found: list[WarmStart] = []
    for stage in recipe.stages:
        if not isinstance(stage, WarmStart):
            break
        found.append(stage)
    return found


def _pretraining(recipe: Recipe) -> list[PretrainCritic]:
    """The stages behind those, until the first that does not train the critic alone."""
    found: list[PretrainCritic] = []
    for stage in recipe.stages[len(_imitation(recipe)) :]:
        if not isinstance(stage, PretrainCritic):
            break
        found.append(stage)
    return found


def pretrains(recipe: Recipe) -> bool:
    """Whether its critic is trained before the policy is."""
    return any(isinstance(stage, PretrainCritic) for stage in recipe.stages)
