"""Recipes: everything a run is, in one validated object, before any model loads."""

from segcredit.config.read import RecipeError, load_recipe, parse_recipe, recipe_path
from segcredit.config.recipe import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    Optimize,
    OptimizerSettings,
    PretrainCritic,
    Recipe,
    RolloutSettings,
    SaveSettings,
    Stage,
    UpdateSettings,
    WarmStart,
)

__all__ = [
    "DataSettings",
    "EvaluationSettings",
    "ModelSettings",
    "Optimize",
    "OptimizerSettings",
    "PretrainCritic",
    "Recipe",
    "RecipeError",
    "RolloutSettings",
    "SaveSettings",
    "Stage",
    "UpdateSettings",
    "WarmStart",
    "load_recipe",
    "parse_recipe",
    "recipe_path",
]
