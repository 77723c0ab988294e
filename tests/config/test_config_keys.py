"""Every mistake in a recipe is named by its key, with what was expected, all in one message."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from tiny_runs import changed

from segcredit import __version__, algorithms
from segcredit.config import Recipe, RecipeError, load_recipe, parse_recipe, shipped_recipes
from segcredit.config.recipe import Settings


def error_of(recipe: dict[str, Any]) -> list[str]:
    """The lines below the headline."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(recipe, "my.yaml")
    headline, *lines = str(error.value).splitlines()
    count = "one mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    assert headline == f"my.yaml: {count}"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def the_error_of(**changes: Any) -> str:
    (line,) = error_of(changed(**changes))
    return line


@each(
    ("changes", "expected"),
    [
        ({"optimiser": {}}, "optimiser: unknown key. Did you mean 'optimizer'?"),
        ({"learning_rate": 1e-5}, "learning_rate: unknown key. Did you mean 'optimizer.lr'?"),
        (
            {"optimizer__learning_rate": 1e-5},
            "optimizer.learning_rate: unknown key. Did you mean 'optimizer.lr'?",
        ),
        (
            {"rollout__num_generations": 4},
            "rollout.num_generations: unknown key. Did you mean 'rollout.samples'?",
        ),
        ({"rollout__beta": 0.1}, "rollout.beta: unknown key. Did you mean 'algorithm.kl'?"),
        ({"optimizer__beta": 0.1}, "optimizer.beta: unknown key. Did you mean 'beta2'?"),
        ({"optimizer__lrr": 1}, "optimizer.lrr: unknown key. Did you mean 'lr'?"),
        ({"rollout__prompt": 1}, "rollout.prompt: unknown key. Did you mean 'prompts'?"),
        ({"stages__0__step": 1}, "stages.0.step: unknown key. Did you mean 'steps'?"),
        ({"stages__1__betta2": 1}, "stages.1.betta2: unknown key. Did you mean 'beta2'?"),
        (
            {"stages__2__phase": "x"},
            "stages.2.phase: unknown key. Known keys: epochs, kind, lr, minibatches, prompts, "
            "schedule, steps.",
        ),
        ({"stages__3__lr": 1}, "stages.3.lr: unknown key. Did you mean 'optimizer.lr'?"),
        (
            {"zzz": 1},
            "zzz: unknown key. Known keys: algorithm, data, evaluation, memory, model, name, ",
        ),
    ],
)
def test_unknown_keys_with_the_nearest_of_that_place(changes: Any, expected: str) -> None:
    assert the_error_of(**changes).startswith(expected)


@pytest.mark.parametrize("version", ["999.0.0", "0.2.1", "0.3.0.dev3", 12.5])
def test_a_recipe_of_a_newer_version_says_so(version: Any) -> None:
    with pytest.raises(RecipeError) as error:
        parse_recipe(changed(version=version, rollout__vines=3), "my.yaml")
    headline, line = str(error.value).splitlines()
    assert headline == (
        f"my.yaml: written by version {version!r} of segcredit; this is version {__version__}: "
        f"upgrade segcredit. Settings unknown to this version:"
    )
    assert line.startswith("  rollout.vines: unknown key.")


@each("version", [__version__, "0.0.9", "nonsense", None, [1]])
def test_a_recipe_of_this_version_has_a_mistake(version: Any) -> None:
    assert error_of(changed(version=version, rollout__vines=3))[0].startswith("rollout.vines: unk")
    assert parse_recipe(changed(version=version)) == parse_recipe(changed())


@each(
    ("changes", "expected"),
    [
        ({"optimizer__lr": "fast"}, "optimizer.lr: Input should be a valid number"),
        ({"optimizer__lr": -1}, "optimizer.lr: Input should be greater than 0; got -1"),
        ({"optimizer__lr": math.nan}, "optimizer.lr: Input should be a finite number; got nan"),
        ({"optimizer__lr": math.inf}, "optimizer.lr: Input should be a finite number; got inf"),
        ({"optimizer__lr": True}, "optimizer.lr: expected a number; got true"),
        ({"seed": False}, "seed: expected a number; got false"),
        ({"stages__0__steps": True}, "stages.0.steps: expected a number; got true"),
        ({"rollout__prompts": 2.5}, "rollout.prompts: Input should be a valid integer"),
        ({"rollout__prompts": None}, "rollout.prompts: Input should be a valid integer"),
        ({"rollout": 3}, "rollout: expected settings, such as {ahead: …}; got 3"),
        (
            {"stages": [3]},
            "stages.0: expected a stage, such as {kind: optimize, steps: 100}; got 3",
        ),
        ({"stages": {"a": 1}}, "stages: Input should be a valid list"),
        ({"stages": []}, "stages: List should have at least 1 item"),
        ({"stages__0": {"steps": 3}}, "stages.0: a stage needs its kind: warm_start, "),
        (
            {"stages__3__kind": "optimise"},
            "stages.3.kind: expected warm_start, pretrain_critic, optimize; got 'optimise'. Did "
            "you mean 'optimize'?",
        ),
        ({"stages__0": {"kind": "optimize"}}, "stages.0.steps: missing"),
        ({"name": "a/b"}, "name: String should match pattern"),
        ({"model": {}}, "model: give exactly one of path"),
        ({"model": {"tiny": "qwen2", "path": "x"}}, "model: give exactly one of path"),
        ({"data": {}}, "data: give exactly one of train"),
        ({"data": {"train": ["a"], "world": "shape_grid"}}, "data: give exactly one of train"),
        ({"data": {"train": ["a"], "settings": {"size": 3}}}, "data: settings belong to a world"),
        ({"model__dtype": "float8"}, "model.dtype: Input should be 'float32' or 'bfloat16'"),
        ({"algorithm": 3}, "algorithm: expected a name, or settings with a name"),
        ({"algorithm": {"lam": 1}}, "algorithm: expected a name, or settings with a name"),
        ({"reward": [5]}, "reward: expected a name, or settings with a name"),
    ],
)
def test_wrong_types_and_values(changes: Any, expected: str) -> None:
    assert the_error_of(**changes).startswith(expected)


@each(
    ("changes", "expected"),
    [
        ({"algorithm": "sappo"}, "algorithm: unknown method 'sappo'. Did you mean 'sapo'?"),
        (
            {"algorithm": {"name": "sapo", "lambda": 1}},
            "algorithm: method sapo has no setting 'lambda'. Did you mean 'lam'?",
        ),
        ({"algorithm": {"name": "sapo", "lam": 5}}, "algorithm: lam must be in [0, 1]; got 5."),
        (
            {"algorithm": {"name": "sapo", "kl": "lots"}},
            "algorithm: a setting of {'name': 'sapo', ",
        ),
        ({"reward": "mth"}, "reward: unknown reward 'mth'. Did you mean 'math'?"),
        (
            {"reward": {"name": "math", "dedline": 1}},
            "reward: reward math has no setting 'dedline'. Did you mean 'deadline'?",
        ),
        ({"reward": {"name": "math", "deadline": -1}}, "reward: deadline must be a positive "),
        (
            {"data": {"world": "shape-grid"}},
            "data: unknown world 'shape-grid'. Did you mean 'shape_grid'?",
        ),
        (
            {"data__settings": {"givn": 2}},
            "data: world derived_variables has no setting 'givn'. Did you ",
        ),
        ({"data__settings": {"modulus": 1}}, "data: modulus must be a whole number, between 2 and"),
        ({"data__settings": {"needed": 3}}, "data: "),
        ({"save__trackers": ["wnadb"]}, "save.trackers: expected names of wandb, trackio, mlflow;"),
        ({"save__trackers": ["tensorboard"]}, "save.trackers: expected names of wandb, "),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_unknown_names_and_settings(changes: Any, expected: str) -> None:
    assert the_error_of(**changes).startswith(expected)


def test_arithmetic_that_does_not_add_up() -> None:
    lines = error_of(
        changed(
            update__minibatches=9,
            algorithm="grpo",
            model={"tiny": "qwen2"},
            data={"train": ["rows.jsonl"]},
        )
    )
    assert lines == [
        "update.minibatches is 9, but a step has only 8 responses (rollout.prompts × "
        "rollout.samples)",
        "model.tiny takes its vocabulary from a world: set data.world, or model.path",
        "grpo compares the responses to one prompt, so rollout.samples must be at least 2; got 1",
        "stages.2: grpo has no critic to pretrain: remove the stage",
    ]
    assert the_error_of(stages=[{"kind": "optimize", "steps": 1}]).startswith(
        "a tiny model has random weights: begin with a warm_start"
    )
    few = [{"kind": "pretrain_critic", "steps": 1, "prompts": 1}, {"kind": "optimize", "steps": 1}]
    assert the_error_of(stages=[{"kind": "warm_start", "steps": 1}, *few]) == (
        "stages.1.prompts 1 is too few for update.minibatches 2"
    )
    few[0] = {"kind": "pretrain_critic", "steps": 1, "minibatches": 9}
    assert the_error_of(stages=[{"kind": "warm_start", "steps": 1}, *few]) == (
        "rollout.prompts 8 is too few for stages.1.minibatches 9"
    )
    held = {"kind": "warm_start", "steps": 4, "schedule": "constant", "hold": 0.5}
    assert the_error_of(stages=[held, {"kind": "optimize", "steps": 1}]).startswith(
        "stages.0.hold is 0.5, but a constant learning rate does not decay: remove it"
    )
    parse_recipe(changed(update__minibatches=8))


def test_all_mistakes_are_told_at_once() -> None:
    lines = error_of(
        changed(
            sed=1,
            optimizer={"lr": "fast", "schedul": "linear"},
            stages=[{"kind": "warm_start", "step": 3}, {"kind": "wam_start", "steps": 1}],
            algorithm="sappo",
            reward="mth",
            data={"world": "shape"},
            evaluation={"top_p": 2},
        )
    )
    where = [line.partition(":")[0] for line in lines]
    assert sorted(where) == [
        "algorithm",
        "data",
        "evaluation.top_p",
        "optimizer.lr",
        "optimizer.schedul",
        "reward",
        "sed",
        "stages.0.step",
        "stages.0.steps",
        "stages.1.kind",
    ]


def test_what_came_is_quoted_briefly_and_safely() -> None:
    line = the_error_of(optimizer__lr="\x1b[31m" + "x" * 10_000)
    assert len(line) < 300
    assert "\x1b" not in line
    assert len(the_error_of(rollout=list(range(10_000)))) < 300


@each(
    ("text", "expected"),
    [
        ("model: [", "not YAML: "),
        ("- a\n- b", "expected a mapping of settings; got list."),
        ("", "expected a mapping of settings; got NoneType."),
        ("[" * 5000, "not YAML: "),
        ("when: 2001-99-99", "not YAML: month must be in 1..12"),
        ("seed: 1\nname: a\nseed: 2", "not YAML: duplicate key 'seed' on line 1"),
        ("optimizer:\n  lr: 1\n  lr: 2", "not YAML: duplicate key 'lr' on line 2"),
        (
            "a: !!python/object/apply:os.system [echo]",
            "not YAML: could not determine a constructor",
        ),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert str(error.value).startswith(f"{path}: {expected}")
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(RecipeError, match="not YAML: 'utf-8' codec can't decode"):
        load_recipe(str(path))


def test_recipes_by_name() -> None:
    assert load_recipe("demo").name == "demo"
    with pytest.raises(RecipeError, match=r"no recipe 'dmo': .* Did you mean 'demo'\?"):
        load_recipe("dmo")
    with pytest.raises(RecipeError, match=r"neither a YAML file nor one of .*demo"):
        load_recipe("/nowhere/at-all.yaml")


def test_a_run_is_no_recipe_but_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RecipeError, match=f"to resume the run, type: --resume {tmp_path}"):
        load_recipe(str(tmp_path))


def test_every_recipe_of_the_package_is_valid_and_complete() -> None:
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert parse_recipe(recipe.as_dict()) == recipe, name


def test_a_recipe_written_out_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = parse_recipe(changed(optimizer__lr=1e-7, algorithm={"name": "sapo", "clip": [0.1, 1]}))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(recipe.as_dict(), sort_keys=False))
    again = load_recipe(str(path))
    assert again == recipe
    assert repr(again.make_algorithm()) == repr(recipe.make_algorithm())
    assert set(Recipe.model_fields) == set(yaml.safe_load(path.read_text())), "nothing is left out"
    assert recipe.total_steps == 15


def test_every_setting_is_described_in_whole_phrases() -> None:
    """The descriptions are the reference of the settings."""
    kinds = [Settings, *Settings.__subclasses__()]
    assert len(kinds) > 12
    fields = {
        f"{kind.__name__}.{name}": field.description or ""
        for kind in kinds
        if kind.__module__ == Settings.__module__
        for name, field in kind.model_fields.items()
    }
    wrong = [key for key, x in fields.items() if len(x) < 10 or not x.endswith((".", "}"))]
    assert wrong == []
    assert [key for key, x in fields.items() if x.startswith(("Of ", "As ", "Who ", "What "))] == []


def test_dr_grpo_divides_by_the_runs_length_limit() -> None:
    """Unless the recipe sets the constant, it is rollout.max_tokens."""

    def constant(**changes: Any) -> float:
        made = parse_recipe(changed(stages=stages, **changes))
        return made.make_algorithm().reduce.length

    stages = [{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 1}]
    rollout = {"prompts": 8, "samples": 2}
    named = {"name": "dr_grpo", "kl": 0.1}
    assert constant(algorithm="dr_grpo", rollout=rollout | {"max_tokens": 12}) == 12
    assert constant(algorithm=named, rollout=rollout | {"max_tokens": 700}) == 700
    assert constant(algorithm=named, rollout=rollout) == 2048, "the default limit"
    assert constant(algorithm={**named, "max_tokens": 99}, rollout=rollout) == 99
    assert algorithms.dr_grpo().reduce.length == 3000
    with pytest.raises(RecipeError, match=r"rollout\.max_tokens: "):
        constant(algorithm="dr_grpo", rollout=rollout | {"max_tokens": "many"})
