"""The recipes of the package: the same settings as ever, each with its source, none said twice."""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from each import each

from segcredit.config import (
    load_recipe,
    merge_settings,
    parse_recipe,
    recipe_settings,
    shipped_recipes,
)
from segcredit.config.files import FOLDER, _shipped, read_settings

COLLECTIONS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "demo"}
DIGESTS = json.loads(Path(__file__).with_name("recipe_digests.json").read_text())
"""SHA-256 of each recipe's settings before defaults, recorded when every recipe was a file."""
SOURCE = re.compile(
    r"(paper, (Table \d|Figure \d|Appendix [A-F]|Algorithm 1|§\d(\.\d)*)"
    r"|authors' code: \S|VinePPO[:;] \S|SPO: \S|ours: \S|departs: \S)"
)
NO_SETTINGS = re.compile(r"(recipes|join|(.*\.)?base|(.*\.)?stages\.kind)")
"""Keys that choose recipes, parts and stages: no hyperparameters."""


def test_every_published_name_has_the_settings_it_always_had() -> None:
    found = {}
    for name in shipped_recipes():
        text = json.dumps(recipe_settings(name), sort_keys=True)
        found[name] = hashlib.sha256(text.encode()).hexdigest()
    assert found == DIGESTS


def test_settings_that_differ_from_the_defaults_make_the_same_recipe() -> None:
    for name in shipped_recipes():
        made = load_recipe(name)
        short = made.changed_settings()
        assert parse_recipe(short) == made
        assert len(json.dumps(short)) < 0.6 * len(json.dumps(made.as_dict()))


def test_a_caller_may_change_the_settings_it_gets() -> None:
    recipe_settings("demo")["stages"].clear()
    assert load_recipe("demo", ["stages.0.steps=7"]).stages[0].steps == 7
    assert load_recipe("demo").stages[0].steps == 300


def scalars(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Yield the key and the line of every plain value."""
    if isinstance(node, yaml.ScalarNode):
        yield ".".join(path), node.start_mark.line
    elif isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            yield from scalars(inner, path)
    elif isinstance(node, yaml.MappingNode):
        for key, inner in node.value:
            yield from scalars(inner, (*path, key.value))


def unsourced(text: str) -> list[str]:
    """Return the keys of values whose line names no source."""
    lines = text.splitlines()
    found = []
    for key, line in scalars(yaml.compose(text, Loader=yaml.SafeLoader)):
        comment = lines[line].partition("  # ")[2]
        known = SOURCE.match(comment) and ("departs:" not in comment or "because" in comment)
        if not NO_SETTINGS.fullmatch(key) and not known:
            found.append(key)
    return found


def test_every_number_has_its_source() -> None:
    assert {x: unsourced(path.read_text()) for x, path in COLLECTIONS.items()} == {
        x: [] for x in COLLECTIONS
    }


@each(
    ("line", "flagged"),
    [
        ("a: 1", True),
        ("a: 1  # I like it", True),
        ("a: [1, 2]", True),
        ("a: text", True),
        ("a: {b: 1}", True),
        ("a:\n  # paper, Table 7\n  b: 1", True),
        ("a: 1  # departs: another number", True),
        ("a: 1  # ours:", True),
        ("a: 1  # paper", True),
        ("algorithm:\n  name: sapo", True),
        ("a: 1  # paper, Table 7", False),
        ("a: [1, 2]  # authors' code: verl's default", False),
        ("a: 1  # departs: another number, because it is nicer", False),
        ("base: x\nrecipes: [y]", False),
    ],
)
def test_the_test_of_sources_can_fail(line: str, flagged: bool) -> None:
    assert bool(unsourced(line)) == flagged


def restated(own: dict[str, Any], under: dict[str, Any], path: str = "") -> list[str]:
    """Return the settings of ``own`` that ``under`` has already."""
    found = []
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            found += restated(value, under[key], f"{path}{key}.")
        elif key in under and under[key] == value:
            found.append(path + key)
    return found


def combinations(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the parts of each recipe of a collection."""
    for line in read_settings(COLLECTIONS[name])["recipes"]:
        yield from product(*([x] if isinstance(x, str) else x for x in line))


def test_a_part_states_only_what_differs() -> None:
    """A part repeats nothing that the parts before it in a recipe, or its bases, have set."""
    found = []
    for name in COLLECTIONS:
        for chosen in combinations(name):
            under = _shipped()[f"{name}/_base"]
            for part in chosen:
                settings = _shipped()[f"{name}/_{part}"]
                found += [f"{name}/{part}: {x}" for x in restated(settings, under)]
                under = merge_settings(under, settings)
        content = read_settings(COLLECTIONS[name])
        below = content.get("base")
        for part, own in content["parts"].items():
            bases = [f"{below}/_{part}", f"{name}/_{own.pop('base', None)}"]
            for base in bases:
                found += [f"{name}/{part}: {x}" for x in restated(own, _shipped().get(base, {}))]
    assert found == []


def test_every_part_is_used() -> None:
    used, defined = set(), set()
    for name, path in COLLECTIONS.items():
        content = read_settings(path)
        defined |= {f"{name}/{part}" for part in content["parts"]}
        bases = [x["base"] for x in content["parts"].values() if "base" in x]
        for part in {*bases, *(part for chosen in combinations(name) for part in chosen)}:
            used |= {f"{name}/{part}", f"{content.get('base')}/{part}"}
    assert defined <= used


def test_recipes_are_their_parts_in_any_order_of_model_and_method(tmp_path: Path) -> None:
    """A file may list the parts itself; older recipes did, with the method before the model."""
    path = tmp_path / "mine.yaml"
    for name in ("geo3k", "gsm8k", "math"):
        for chosen in combinations(name):
            model, *others = chosen
            recipe = f"{name}/{'-'.join(chosen)}"
            adapter = [x for x in others if x == "lora"]
            method = [x for x in others if x != "lora"]
            parts = [f"{name}/_{part}" for part in ("base", *method, model, *adapter)]
            path.write_text(yaml.safe_dump({"base": parts, "name": recipe.replace("/", "-")}))
            assert load_recipe(str(path)) == load_recipe(recipe), recipe


def test_lines_are_short_and_files_begin_with_a_sentence() -> None:
    for path in COLLECTIONS.values():
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# "), path
        assert [line for line in lines if len(line) > 100] == [], path
