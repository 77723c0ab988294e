"""The recipes' files: short, nothing said twice, and every number with its source."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from segcredit.config.read import _base_path, _folder, _merged, _read, _with_bases, shipped_recipes

FILES = sorted(path for path in _folder().rglob("*.yaml") if path.parent != _folder())
LEAVES = [path for name, path in shipped_recipes().items() if "/" in name]
SOURCE = re.compile(
    r"(paper, (Table \d|Figure \d|Appendix [A-F]|Algorithm 1|§\d(\.\d)*)"
    r"|authors' code: \S|VinePPO[:;] \S|SPO: \S|ours: \S|departs: \S)"
)
NO_SETTINGS = ("base", "name", "stages.kind")
"""Which recipe, which run, which stage: no hyperparameters."""

each_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)


def scalars(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Every plain value: its key, and its line."""
    if isinstance(node, yaml.ScalarNode):
        yield ".".join(path), node.start_mark.line
    elif isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            yield from scalars(inner, path)
    elif isinstance(node, yaml.MappingNode):
        for key, inner in node.value:
            yield from scalars(inner, (*path, key.value))


def unsourced(text: str) -> list[str]:
    """Keys of values beside which no source stands."""
    lines = text.splitlines()
    found = []
    for key, line in scalars(yaml.compose(text, Loader=yaml.SafeLoader)):
        comment = lines[line].partition("  # ")[2]
        known = SOURCE.match(comment) and ("departs:" not in comment or "because" in comment)
        if key not in NO_SETTINGS and not known:
            found.append(key)
    return found


@each_file
def test_every_number_has_its_source(path: Path) -> None:
    assert unsourced(path.read_text()) == []


@pytest.mark.parametrize(
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
        ("base: x\nname: y", False),
    ],
)
def test_the_test_of_sources_can_fail(line: str, flagged: bool) -> None:
    assert bool(unsourced(line)) == flagged


def restated(own: dict[str, Any], under: dict[str, Any], path: str = "") -> list[str]:
    """Settings that were so already."""
    found = []
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            found += restated(value, under[key], f"{path}{key}.")
        elif key in under and under[key] == value:
            found.append(path + key)
    return found


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_states_only_what_differs(path: Path) -> None:
    """Its own lines change its bases, and each base changes those before it."""
    own = _read(path)
    names = own.pop("base")
    under: dict[str, Any] = {}
    for name in names:
        part = _with_bases(_base_path(path, name))
        assert restated(part, under) == [], f"{name} repeats what stands before it"
        under = _merged(under, part)
    assert restated(own, under) == []
    assert list(own) == ["name"], "what two runs share stands in a part"
    assert len(path.read_text().splitlines()) <= 5


@each_file
def test_files_that_name_a_base_do_not_repeat_it(path: Path) -> None:
    own = _read(path)
    base = own.pop("base", None)
    if isinstance(base, str):
        assert restated(own, _with_bases(_base_path(path, base))) == []


def test_every_part_is_used() -> None:
    used: set[Path] = set()

    def visit(path: Path) -> None:
        used.add(path.resolve())
        base = _read(path).get("base") or []
        for name in [base] if isinstance(base, str) else base:
            visit(_base_path(path, name))

    for path in LEAVES:
        visit(path)
    assert {path.resolve() for path in FILES} == used


@each_file
def test_lines_are_short_and_begin_with_a_sentence(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    if not path.name.startswith("_"):
        assert lines[0].startswith("# ")
