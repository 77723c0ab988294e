"""Reading recipes: YAML files, overrides as ``key.path=value``, and errors that name the key."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from segcredit.config.recipe import Recipe


class RecipeError(ValueError):
    """A recipe that cannot run, with every reason at once."""


def recipe_path(name: str) -> Path:
    """A file, or one of the recipes that come with the package."""
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for path in _shipped()}
    if name in shipped:
        return shipped[name]
    near = get_close_matches(name, shipped, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
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
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of settings; got {type(found).__name__}.")
    for override in overrides:
        _override(found, override)
    return parse_recipe(found, str(path))


def parse_recipe(found: dict[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from plain data; every mistake in one message."""
    try:
        return Recipe.model_validate(found)
    except ValidationError as error:
        lines = [f"  {_explain(problem)}" for problem in error.errors()]
        count = "one mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise RecipeError(f"{source}: {count}\n" + "\n".join(lines)) from None


def _override(found: dict[str, Any], override: str) -> None:
    """Set ``key.path=value``; values are YAML, list places are numbers."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise RecipeError(
            f"an override is key.path=value, such as optimizer.lr=1e-5; got {override!r}."
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RecipeError(f"{key}: the value {text!r} is not YAML.") from None
    if isinstance(value, str):  # YAML reads 1e-5 as text, since it lacks a dot
        with suppress(ValueError):
            value = float(value)
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
    location = [
        str(part)
        for part in problem["loc"]
        if part not in {"warm_start", "optimize", "pretrain_critic"}
    ]
    where = ".".join(location) or "recipe"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1])
        near = get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
        return f"{where}: unknown key.{hint}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message if where == "recipe" else f"{where}: {message}"
    return f"{where}: {message}; got {problem['input']!r}"


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
