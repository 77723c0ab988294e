"""Reading recipes: YAML files, overrides as ``key.path=value``, and errors that name the key."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from segcredit.config.recipe import KINDS, Recipe
from segcredit.printable import shown

GIVEN_IN_PYTHON = "given_in_python"
"""Where config.yaml says what was an object and not a setting."""


class RecipeError(ValueError):
    """A recipe that cannot run, with every reason at once."""


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-5 is a number, and a key that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if key != "<<" and keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(f"{shown(twice)} stands twice, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    [*"-+.0123456789"],
)


def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # a safe loader: plain data only


def recipe_path(name: str) -> Path:
    """A file, or one of the recipes that come with the package."""
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in _shipped()}
    if name in shipped:
        return shipped[name]
    near = get_close_matches(name, shipped, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if (Path(name) / "config.yaml").is_file():
        hint = f" It is a run; to go on with it: --resume {name}"
    raise RecipeError(
        f"no recipe {name!r}: neither a YAML file nor one of {', '.join(sorted(shipped))}.{hint}"
    )


def _shipped() -> Iterator[Path]:
    folder = Path(str(files("segcredit"))) / "recipes"
    return folder.rglob("*.yaml")


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by file or name, with ``key.path=value`` applied, validated whole."""
    path = recipe_path(name)
    try:
        found = _parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of settings; got {type(found).__name__}.")
    if given := found.get(GIVEN_IN_PYTHON):
        raise RecipeError(_only_in_python(path, given))
    for override in overrides:
        _override(found, override)
    return parse_recipe(found, str(path))


def parse_recipe(found: dict[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from plain data; every mistake in one message."""
    try:
        return Recipe.model_validate(found)
    except ValidationError as error:
        found_out = [line for problem in error.errors() for line in _explain(problem).splitlines()]
        lines = [f"  {line}" for line in found_out]
        count = "one mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise RecipeError(f"{source}: {count}\n" + "\n".join(lines)) from None


def _only_in_python(path: Path, given: Any) -> str:
    """What to do with a run whose parts no file can hold."""
    names = ", ".join(given) if isinstance(given, dict) else str(given)
    return (
        f"{path}: {names} came from Python as objects, which no file can hold, so only Python can "
        f"go on with this run, with the same objects: "
        f"Trainer(…).train(folder={str(path.parent)!r}, resume=True)"
    )


def _override(found: dict[str, Any], override: str) -> None:
    """Set ``key.path=value``; values are YAML, list places are numbers."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise RecipeError(
            f"an override is key.path=value, such as optimizer.lr=1e-5; got {override!r}."
        )
    try:
        value = _parse(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RecipeError(f"{key}: the value {shown(text)} is not YAML.") from None
    place: Any = found
    *path, last = key.split(".")
    for depth, name in enumerate(path):
        place = _enter(place, name, ".".join(path[: depth + 1]))
    if isinstance(place, list):
        place[_index(place, last, key)] = value
    else:
        place[last] = value


def _enter(place: Any, name: str, path: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, name, path)]
    inner = place.get(name)
    if inner is None:
        inner = place[name] = {}
    if isinstance(inner, str) and name in {"algorithm", "reward"}:
        inner = place[name] = {"name": inner}  # a bare name takes settings
    if not isinstance(inner, dict | list):
        raise RecipeError(f"{path} is {inner!r}, which has no settings below it.")
    return inner


def _index(place: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise RecipeError(
            f"{path}: a list of {len(place)}; choose a place from 0 to {len(place) - 1}."
        )
    return int(name)


def _explain(problem: Any) -> str:
    """One line: which key, what was expected, what came."""
    location = [str(part) for part in problem["loc"] if part not in KINDS]
    where = ".".join(location) or "recipe"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1])
        near = get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
        return f"{where}: unknown key.{hint}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    if problem["type"] == "union_tag_not_found":
        return f"{where}: a stage needs its kind: {', '.join(KINDS)}"
    if problem["type"] == "union_tag_invalid":
        kind = str(problem["ctx"]["tag"])
        near = get_close_matches(kind, KINDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{where}.kind: expected {', '.join(KINDS)}; got {shown(kind)}.{hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message if where == "recipe" else f"{where}: {message}"
    return f"{where}: {message}; got {shown(problem['input'])}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """The keys of the settings at a place of the recipe."""
    kinds: list[Any] = [Recipe]
    for part in location:
        if isinstance(part, int):
            continue
        inner: list[Any] = []
        for kind in kinds:
            if part in kind.model_fields:
                inner += list(_models(kind.model_fields[part].annotation))
            elif _tag(kind) == part:
                inner.append(kind)
        kinds = inner or kinds
    return sorted({name for kind in kinds for name in kind.model_fields})


def _tag(kind: type[BaseModel]) -> str | None:
    return str(kind.model_fields["kind"].default) if "kind" in kind.model_fields else None


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Settings classes inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType | Union.__class__):
        for part in get_args(annotation):
            yield from _models(part)
