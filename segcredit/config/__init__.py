"""Recipes: everything a run is, in one validated object, before any model loads."""

from segcredit.config.read import (
    GIVEN_IN_PYTHON,
    RecipeError,
    load_recipe,
    parse_recipe,
    recipe_path,
)
from segcredit.config.recipe import (
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    ModelSettings,
    Optimize,
    OptimizerSettings,
    PretrainCritic,
    Recipe,
    RolloutSettings,
    SaveSettings,
    Stage,
    TreeSettings,
    UpdateSettings,
    WarmStart,
)

__all__ = [
    "GIVEN_IN_PYTHON",
    "DataSettings",
    "EvaluationSettings",
    "LoraSettings",
    "ModelSettings",
    "Optimize",
    "OptimizerSettings",
    "PretrainCritic",
    "Recipe",
    "RecipeError",
    "RolloutSettings",
    "SaveSettings",
    "Stage",
    "TreeSettings",
    "UpdateSettings",
    "WarmStart",
    "load_recipe",
    "parse_recipe",
    "recipe_path",
]
