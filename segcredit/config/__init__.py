"""Recipes: the complete settings of a run, validated before any model is loaded."""

from segcredit.config.files import (
    RecipeError,
    merge_settings,
    read_settings,
    recipe_settings,
    shipped_recipes,
)
from segcredit.config.read import (
    VERSION,
    apply_overrides,
    load_recipe,
    load_run_recipe,
    parse_recipe,
)
from segcredit.config.recipe import (
    DataSettings,
    EvaluationSettings,
    LoraSettings,
    MismatchUnits,
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
from segcredit.runlog.folder import GIVEN_IN_PYTHON

__all__ = [
    "GIVEN_IN_PYTHON",
    "VERSION",
    "DataSettings",
    "EvaluationSettings",
    "LoraSettings",
    "MismatchUnits",
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
    "apply_overrides",
    "load_recipe",
    "load_run_recipe",
    "merge_settings",
    "parse_recipe",
    "read_settings",
    "recipe_settings",
    "shipped_recipes",
]
