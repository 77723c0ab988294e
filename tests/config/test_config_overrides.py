"""``key.path=value`` on the command line."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from tiny_runs import changed

from segcredit.config import Recipe, RecipeError, WarmStart, load_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(changed()))
    return path


def overridden(recipe: Path, *overrides: str) -> Recipe:
    return load_recipe(str(recipe), overrides)


@each(
    ("override", "place", "value"),
    [
        ("seed=7", "seed", 7),
        ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
        ("optimizer.lr=1E-5", "optimizer.lr", 1e-5),
        ("optimizer.lr=2.5e-5", "optimizer.lr", 2.5e-5),
        ("optimizer.lr=.5e+1", "optimizer.lr", 5.0),
        ("optimizer.weight_decay=0", "optimizer.weight_decay", 0.0),
        ("name=a=b", None, "name: String should match"),
        ("name=1e5x", "name", "1e5x"),
        ("name=nan", "name", "nan"),
        ("data.suffix='a = b'", "data.suffix", "a = b"),
        ("data.suffix=", "data.suffix", None),
        ("evaluation.greedy=false", "evaluation.greedy", False),
        ("threads=null", "threads", None),
        ("algorithm=ppo", "algorithm", "ppo"),
        ("algorithm={name: ppo, lam: 1e-1}", "algorithm", {"name": "ppo", "lam": 0.1}),
        ("algorithm.lam=0.9", "algorithm", {"name": "sapo", "kl": 0.01, "lam": 0.9}),
        (
            "algorithm.clip=[0.1, 0.3]",
            "algorithm",
            {"name": "sapo", "kl": 0.01, "clip": [0.1, 0.3]},
        ),
        (
            "algorithm.partition=newline",
            "algorithm",
            {"name": "sapo", "kl": 0.01, "partition": "newline"},
        ),
        (
            "algorithm.partition={name: fixed, size: 8}",
            "algorithm.partition",
            {"name": "fixed", "size": 8},
        ),
        ("algorithm.partition=newlin", None, "Did you mean 'newline'"),
        ("stages.0.steps=9", "stages.0.steps", 9),
        ("stages.3.steps=9", "stages.3.steps", 9),
        ("save.trackers=[]", "save.trackers", []),
        ("save.keep=5", "save.keep", 5),
    ],
)
def test_what_an_override_sets(recipe: Path, override: str, place: str | None, value: Any) -> None:
    if place is None:
        with pytest.raises(RecipeError, match=value):
            overridden(recipe, override)
        return
    found: Any = overridden(recipe, override).as_dict()
    for part in place.split("."):
        found = found[int(part) if part.isdigit() else part]
    assert found == value
    assert type(found) is type(value)


def test_settings_of_a_bare_name(recipe: Path) -> None:
    found = overridden(recipe, "algorithm=ppo", "algorithm.lam=0.9", "algorithm.kl=1e-3")
    assert found.algorithm == {"name": "ppo", "lam": 0.9, "kl": 1e-3}
    found = overridden(recipe, "reward=math", "reward.deadline=2")
    assert found.reward == {"name": "math", "deadline": 2}


def test_a_whole_stage_and_the_last_word_counts(recipe: Path) -> None:
    found = overridden(recipe, "stages.1={kind: warm_start, steps: 4}", "seed=1", "seed=2")
    assert isinstance(found.stages[1], WarmStart)
    assert (found.stages[1].steps, found.seed) == (4, 2)


def test_a_section_that_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    short = {k: x for k, x in changed().items() if k not in {"evaluation", "save"}}
    path.write_text(yaml.safe_dump(short | {"save": None}))
    found = load_recipe(str(path), ["evaluation.prompts=3", "save.keep=4"])
    assert (found.evaluation.prompts, found.save.keep) == (3, 4)


@each("text", ["1e-5", "1E5", "-2e+3", "1.e4", ".5e-1", "12e03"])
def test_numbers_of_a_file_need_no_dot(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads 1e-5 as text, which a method's settings would take for a name."""
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(changed(data__settings={"wrong": 0.5})))
    path.write_text(path.read_text().replace("kl: 0.01", f"kl: {text}"))
    if float(text) < 0:
        with pytest.raises(RecipeError, match="algorithm: "):
            load_recipe(str(path))
        return
    found = load_recipe(str(path)).algorithm
    assert isinstance(found, dict)
    assert found["kl"] == float(text)


@each(
    ("override", "expected"),
    [
        ("seed", "an override is key.path=value, such as optimizer.lr=1e-5; got 'seed'."),
        ("=3", "an override is key.path=value"),
        ("seed=[", "seed: the value '\\[' is not YAML."),
        ("seed={a: 1, a: 2}", "seed: the value .* is not YAML."),
        ("optimizer.lr.more=3", "optimizer.lr is 0.001, which has no settings below it."),
        ("stages.9.steps=3", "stages.9: a list of 4; expected an index from 0 to 3."),
        ("stages.-1.steps=3", "stages.-1: a list of 4; expected an index from 0 to 3."),
        ("stages.x=3", "stages.x: a list of 4; expected an index from 0 to 3."),
        ("optimizer.lrr=3", "optimizer.lrr: unknown key. Did you mean 'lr'?"),
        ("optimizer..lr=3", "optimizer.: unknown key"),
        ("stages.0.stepz=3", "stages.0.stepz: unknown key. Did you mean 'steps'?"),
        ("algorithm.lamb=3", "algorithm: method sapo has no setting 'lamb'. Did you mean 'lam'?"),
        ("algorithm=sapoo", "algorithm: unknown method 'sapoo'. Did you mean 'sapo'?"),
    ],
)
def test_overrides_that_cannot_be(recipe: Path, override: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected.replace("?", r"\?")):
        overridden(recipe, override)


def test_one_data_file_is_a_list_of_one(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    settings = changed(
        model={"path": "model"},
        data={"train": "a.jsonl", "test": "b.jsonl"},
        stages=[{"kind": "optimize", "steps": 1}],
    )
    path.write_text(yaml.safe_dump(settings))
    data = overridden(path).data
    assert (data.train, data.test) == (["a.jsonl"], ["b.jsonl"])
    chosen = overridden(path, "data.train=c.jsonl", "data.test=hub:openai/gsm8k/main:test")
    assert chosen.as_dict()["data"]["train"] == ["c.jsonl"], "which config.yaml records"
    assert chosen.as_dict()["data"]["test"] == ["hub:openai/gsm8k/main:test"]
    with pytest.raises(RecipeError, match=r"data\.train"):
        overridden(path, "data.train=3")
