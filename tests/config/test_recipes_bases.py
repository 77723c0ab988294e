"""``base``: a recipe as a change of others, merged before anything is validated."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from tiny_runs import changed, write_recipe

from segcredit import __version__
from segcredit.config import Recipe, RecipeError, load_recipe, shipped_recipes
from segcredit.train.trainer import Trainer


def write(path: Path, **settings: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(settings))
    return path


def on_tiny(folder: Path, **settings: Any) -> Recipe:
    """What a few settings make of the tiny recipe beside them."""
    write_recipe(folder)
    return load_recipe(str(write(folder / "mine.yaml", base="recipe", **settings)))


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path), overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_settings_merge_deeply_and_lists_are_replaced(tmp_path: Path) -> None:
    found = on_tiny(
        tmp_path,
        name="mine",
        optimizer={"lr": 0.5},
        data={"settings": {"modulus": 5}},
        stages=[{"kind": "warm_start", "steps": 1}],
    )
    before = load_recipe(str(tmp_path / "recipe.yaml"))
    expected = changed(
        name="mine",
        optimizer__lr=0.5,
        data__settings__modulus=5,
        stages=[{"kind": "warm_start", "steps": 1}],
    )
    assert found == Recipe.model_validate(expected)
    assert before == Recipe.model_validate(changed()), "the base is as it was"


def test_null_is_a_value_and_adds_nothing_by_itself(tmp_path: Path) -> None:
    assert on_tiny(tmp_path, threads=None).threads is None
    assert on_tiny(tmp_path).threads == 1
    (tmp_path / "none.yaml").write_text((tmp_path / "recipe.yaml").read_text() + "base: null\n")
    assert load_recipe(str(tmp_path / "none.yaml")) == load_recipe(str(tmp_path / "recipe.yaml"))


@each(
    ("under", "over", "expected"),
    [
        ({"name": "sapo", "kl": 0.5}, {"lam": 0.5}, {"name": "sapo", "kl": 0.5, "lam": 0.5}),
        (
            {"name": "sapo", "kl": 0.5},
            {"name": "sapo", "lam": 0.5},
            {"name": "sapo", "kl": 0.5, "lam": 0.5},
        ),
        ({"name": "sapo", "fraction": 0.5}, {"name": "ppo", "lam": 1}, {"name": "ppo", "lam": 1}),
        ({"name": "sapo", "fraction": 0.5}, "ppo", "ppo"),
        ("sapo", {"lam": 0.5}, {"name": "sapo", "lam": 0.5}),
        ("sapo", {"name": "ppo", "lam": 0.5}, {"name": "ppo", "lam": 0.5}),
        (None, {"name": "ppo", "lam": 0.5}, {"name": "ppo", "lam": 0.5}),
    ],
)
def test_settings_of_a_method_stay_while_its_name_stays(
    tmp_path: Path, under: Any, over: Any, expected: Any
) -> None:
    given = {k: x for k, x in changed().items() if k != "algorithm"}
    write(tmp_path / "recipe.yaml", **given, **({} if under is None else {"algorithm": under}))
    path = write(tmp_path / "mine.yaml", base="recipe", algorithm=over)
    assert load_recipe(str(path)).algorithm == expected


def test_another_reward_comes_without_the_old_ones_settings(tmp_path: Path) -> None:
    write_recipe(tmp_path, reward={"name": "math", "deadline": 2.0, "accuracy": 0.5})
    path = write(tmp_path / "mine.yaml", base="recipe", reward={"name": "exact"})
    assert load_recipe(str(path)).reward == {"name": "exact"}
    path = write(tmp_path / "mine.yaml", base="recipe", reward={"deadline": 3.0})
    assert load_recipe(str(path)).reward == {"name": "math", "deadline": 3.0, "accuracy": 0.5}


@each(
    ("under", "over", "expected"),
    [
        ({"name": "entropy", "fraction": 0.1}, "newline", "newline"),
        ({"name": "entropy", "fraction": 0.1}, {"name": "step"}, {"name": "step"}),
        (
            {"name": "probability", "every": 3},
            {"threshold": 0.5},
            {"name": "probability", "every": 3, "threshold": 0.5},
        ),
        ("entropy", {"fraction": 0.1}, {"name": "entropy", "fraction": 0.1}),
        ("entropy", None, None),
    ],
)
def test_settings_of_a_partition_stay_while_its_name_stays(
    tmp_path: Path, under: Any, over: Any, expected: Any
) -> None:
    write_recipe(tmp_path, algorithm={"name": "sapo", "partition": under})
    path = write(tmp_path / "mine.yaml", base="recipe", algorithm={"partition": over})
    assert load_recipe(str(path)).algorithm == {"name": "sapo", "partition": expected}


def test_a_base_of_a_base_and_several_bases(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    write(tmp_path / "parts" / "_longer.yaml", rollout={"max_tokens": 99, "prompts": 99})
    write(tmp_path / "parts" / "_fewer.yaml", rollout={"prompts": 4}, seed=5)
    write(tmp_path / "parts" / "both.yaml", base=["../recipe", "_longer", "_fewer.yaml"], seed=6)
    path = write(tmp_path / "mine.yaml", base="parts/both", rollout={"samples": 2})
    found = load_recipe(str(path))
    rollout = found.rollout
    assert (rollout.max_tokens, rollout.prompts, rollout.samples, found.seed) == (99, 4, 2, 6)
    assert found.name == "tiny"


def test_one_part_may_come_by_two_ways(tmp_path: Path) -> None:
    """A diamond is no circle."""
    write_recipe(tmp_path)
    write(tmp_path / "one.yaml", base="recipe", seed=1)
    write(tmp_path / "two.yaml", base="recipe", name="two")
    found = load_recipe(str(write(tmp_path / "mine.yaml", base=["one", "two"])))
    assert (found.seed, found.name) == (1, "two")


def test_bases_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = load_recipe("demo")
    path = write(tmp_path / "deep" / "mine.yaml", base="demo", seed=9)
    assert load_recipe(str(path)) == demo.model_copy(update={"seed": 9})
    write_recipe(tmp_path / "deep")
    absolute = str(tmp_path / "deep" / "recipe.yaml")
    write(tmp_path / "other.yaml", base=absolute, seed=3)
    monkeypatch.chdir(tmp_path)  # a base is relative to its file, not to the current directory
    assert load_recipe("other.yaml").seed == 3
    write(tmp_path / "deep" / "here.yaml", base="recipe", seed=4)
    assert load_recipe("deep/here.yaml").seed == 4
    write(tmp_path / "deep" / "demo.yaml", base="recipe", name="nearer")
    assert load_recipe(str(path)).name == "nearer", "the file beside it goes before the package's"


def test_overrides_have_the_last_word(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    path = str(write(tmp_path / "mine.yaml", base="recipe", optimizer={"lr": 0.5}))
    found = load_recipe(path, ["optimizer.lr=0.25", "algorithm.lam=0.5", "stages.0.steps=7"])
    assert (found.optimizer.lr, found.optimizer.critic_lr) == (0.25, 1e-3)
    assert found.algorithm == {"name": "sapo", "kl": 0.01, "lam": 0.5}
    assert found.stages[0].steps == 7
    found = load_recipe(path, ["optimizer={lr: 0.75}", "algorithm=ppo"])
    assert (found.optimizer.lr, found.optimizer.critic_lr, found.algorithm) == (0.75, 2e-6, "ppo")


def test_the_runs_record_is_complete_and_names_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    path = write(
        tmp_path / "mine.yaml",
        base="recipe",
        reward="exact",
        stages=[{"kind": "warm_start", "steps": 1, "batch": 2}, {"kind": "optimize", "steps": 1}],
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(str(path), ["seed=3"])
    Trainer.from_recipe(recipe).train(tmp_path / "run")
    record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert set(record) == {*Recipe.model_fields, "version"}
    assert record["version"] == __version__
    (tmp_path / "recipe.yaml").unlink()
    assert load_recipe(str(tmp_path / "run" / "config.yaml")) == recipe


def test_circles(tmp_path: Path) -> None:
    alone = write(tmp_path / "alone.yaml", base="alone")
    message = error_of(alone)
    assert message.startswith(f"{alone}: a recipe cannot be its own base; got {alone} → ")
    first = write(tmp_path / "a.yaml", base=["../" + tmp_path.name + "/b.yaml"])
    write(tmp_path / "b.yaml", base="c")
    write(tmp_path / "c.yaml", base="a.yaml")
    message = error_of(first)
    assert message.startswith(f"{first}: a recipe cannot be its own base; got ")
    assert message.count(" → ") == 3


@each(
    ("base", "expected"),
    [
        ("recipee", "no base 'recipee': neither a YAML file relative to "),
        ("dmeo", "Did you mean 'demo'?"),
        ("recipee", "Did you mean 'recipe'?"),
        ("geo3k/qwen2.5-vl-3b-sap", "Did you mean 'geo3k/qwen2.5-vl-3b-sapo'?"),
        ("", "no base an empty text: "),
        (".", "no base '.': "),
        ("x" * 10_000, "no base 'xxxxxxxxxxxxxxxxx"),
        ("a\0b", "no base 'a␀b': "),
        (3, "base is a recipe or a list of them, as in base: demo; got 3."),
        ({"name": "demo"}, "base is a recipe or a list of them, as in base: demo; got an object"),
        (["recipe", 3], "base is a recipe or a list of them, as in base: demo; got a list of 2."),
        (True, "base is a recipe or a list of them, as in base: demo; got True."),
    ],
)
def test_bases_that_are_none(tmp_path: Path, base: Any, expected: str) -> None:
    write_recipe(tmp_path)
    path = write(tmp_path / "mine.yaml", base=base)
    message = error_of(path)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert len(message) < 700


def test_a_base_that_is_no_recipe_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", base="list")
    listed = tmp_path / "list.yaml"
    listed.write_text("- a\n")
    assert error_of(path) == f"{listed}: expected a mapping of settings; got list."
    listed.write_text("a: [\n")
    assert error_of(path).startswith(f"{listed}: not YAML: ")
    listed.write_text("given_in_python: {reward: mine}\n")
    assert error_of(path).startswith(f"{listed}: reward came from Python as objects, ")


def test_base_is_no_override(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    assert error_of(path, "base=demo").startswith(
        "base cannot be an override, only a key in a file"
    )


def test_names_with_a_folder() -> None:
    assert load_recipe("geo3k/qwen2.5-vl-3b-sapo").name == "geo3k-qwen2.5-vl-3b-sapo"
    for wrong, near in [
        ("geo3k/qwen2.5-vl-3b-spo", "geo3k/qwen2.5-vl-3b-sapo"),
        ("qwen2.5-vl-7b-grpo", "geo3k/qwen2.5-vl-7b-grpo"),
        ("gsm8k/rhomath-1b-rloo", "gsm8k/rhomath-1.1b-rloo"),
    ]:
        with pytest.raises(RecipeError, match=f"no recipe '{wrong}': .* Did you mean '{near}'"):
            load_recipe(wrong)


def test_an_unknown_name_lists_what_may_have_been_meant() -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("math")
    of_math = [name for name in shipped_recipes() if name.startswith("math/")]
    assert str(error.value).count("math/") == len(of_math) > 8
    assert "geo3k" not in str(error.value)
    with pytest.raises(
        RecipeError, match=r"one of demo, geo3k/… \(\d+\), gsm8k/… \(\d+\), math/… "
    ):
        load_recipe("nothing-of-the-kind")


def test_parts_are_no_recipes() -> None:
    assert not [name for name in shipped_recipes() if "_" in name.partition("/")[2][:1]]
    with pytest.raises(RecipeError, match="no recipe 'geo3k/_base'"):
        load_recipe("geo3k/_base")
