"""The mini laboratory's recipes: one world each, one budget, and small they run."""

from pathlib import Path

import pytest

from segcredit.config import Optimize, PretrainCritic, load_recipe
from segcredit.data.worlds import make_world
from segcredit.train.build import build, make_plan
from segcredit.train.trainer import Trainer
from segcredit_lab.worlds.bookings import Bookings

SMALL = (
    "threads=1",
    "model.hidden=32",
    "model.heads=4",
    "model.layers=1",
    "rollout.prompts=4",
    "rollout.max_tokens=6",
    "update.minibatches=2",
    "evaluation.prompts=2",
    "evaluation.watch=1",
)
NAMES = ("mini/text", "mini/vision", "mini/text-epochs", "mini/vision-epochs", "mini/text-choices")


@pytest.mark.parametrize("name", NAMES)
def test_budgets_are_as_documented_and_chains_fit(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name.replace("/", "-")
    rows = 32 if name.endswith("choices") else 128
    assert recipe.rollout.prompts * recipe.rollout.samples == rows
    assert recipe.update.minibatches == 4
    assert recipe.update.epochs == (4 if name.endswith("epochs") else 1)
    assert isinstance(recipe.stages[-2], PretrainCritic)
    assert recipe.stages[-1] == Optimize(steps=32 if "vision" in name else 40)
    assert recipe.data.world is not None
    world = make_world(recipe.data.world, **recipe.data.settings)
    assert isinstance(world, Bookings)
    first = ["look"] if "look" in world.phases else []
    assert [x.phase for x in recipe.stages[:-2]] == [*first, "both"]
    tokenizer = world.tokenizer()
    longest = max(
        len(tokenizer(world.oracle(x))["input_ids"]) for x in world.prompts("test", 0, 99)
    )
    assert longest + 20 < recipe.rollout.max_tokens


@pytest.mark.parametrize("name", NAMES[:2])
def test_models_have_five_to_fifty_million_parameters(name: str) -> None:
    state = build(make_plan(load_recipe(name, ["model.device=cpu", "evaluation.prompts=1"])))
    count = sum(x.numel() for x in state.policy.model.parameters())
    assert 5e6 <= count <= 50e6


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:2])
def test_small_they_run(name: str, tmp_path: Path) -> None:
    stages = load_recipe(name).stages
    steps = [f"stages.{number}.steps=1" for number in range(len(stages))]
    batches = [f"stages.{number}.batch=2" for number in range(len(stages) - 2)]
    batches.append(f"stages.{len(stages) - 2}.prompts=4")
    recipe = load_recipe(name, [*SMALL, *steps, *batches])
    assert Trainer.from_recipe(recipe).train(tmp_path / "run").model is not None
