"""Validate recipes: overrides as ``key.path=value``, and error messages that name the key."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from segcredit import __version__
from segcredit.config.files import (
    BASE,
    NAMED,
    RecipeError,
    parse_value,
    recipe_settings,
)
from segcredit.config.recipe import KINDS, Recipe
from segcredit.config.synonyms import SYNONYMS, synonym
from segcredit.printable import shown
from segcredit.registry import nearest, resolve_files
from segcredit.runlog import RunFolder, resume_command
from segcredit.runlog.folder import GIVEN_IN_PYTHON, INITIAL, require_run
from segcredit.runlog.untrusted import require_trust
from segcredit.types import Algorithm

VERSION = "version"
"""Key in config.yaml for the version of segcredit that wrote it."""


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load and validate a recipe by file or name, with its bases and ``key.path=value`` applied."""
    return parse_recipe(apply_overrides(recipe_settings(name), overrides), name)


def load_run_recipe(
    folder: str | Path, overrides: Sequence[str] = (), trust_run: bool = False
) -> Recipe:
    """Load the recipe of a run to resume it; refuse a run that names its own code.

    Args:
        overrides: ``key.path=value``; code named here is allowed.
        trust_run: Also allow the code that the run's config.yaml names (``--trust-run``).
    """
    path = Path(folder).expanduser()
    require_run(RunFolder(path))
    config = str(path / "config.yaml")
    settings = apply_overrides(recipe_settings(config), overrides)
    if not trust_run:  # before parse_recipe, which imports the code that the settings name
        typed = [override.partition("=")[0] for override in overrides]
        require_trust(settings, path, resume_command(path), typed)
    return parse_recipe(resolve_files(_with_own_model(settings, path), path), config)


def _with_own_model(settings: dict[str, Any], run: Path) -> dict[str, Any]:
    """If the run was moved, let model.path name the model in its own ``checkpoints/initial``."""
    model, own = settings.get("model"), RunFolder(run).checkpoints / INITIAL
    written = model.get("path") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(written, str):
        return settings
    moved = Path(written).parts[-2:] == own.parts[-2:] and not Path(written).exists()
    return settings | {"model": model | {"path": str(own)}} if moved and own.is_dir() else settings


def apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set each ``key.path=value`` in place and return the settings."""
    for override in overrides:
        _override(settings, override)
    return settings


def parse_recipe(
    settings: Mapping[str, Any], source: str = "recipe", algorithm: Algorithm | None = None
) -> Recipe:
    """Validate plain data as a recipe; one RecipeError lists every mistake.

    Args:
        settings: Settings, or the content of a run's config.yaml with its notes.
        source: File or name that the message begins with.
        algorithm: Object that replaces the method that the settings name.
    """
    notes = {key: settings.get(key) for key in (VERSION, GIVEN_IN_PYTHON)}
    given = notes[GIVEN_IN_PYTHON]
    lost = isinstance(given, dict | list) and "algorithm" in given  # an object of a past run
    context = {"algorithm": algorithm} if lost or algorithm is not None else None
    try:
        return Recipe.model_validate(
            {key: x for key, x in settings.items() if key not in notes}, context=context
        )
    except ValidationError as error:
        mistakes = [line for problem in error.errors() for line in _explain(problem).splitlines()]
        title = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        if _numbers(notes[VERSION]) > _numbers(__version__):
            title = (
                f"written by version {shown(notes[VERSION])} of segcredit; this is version "
                f"{__version__}: upgrade segcredit. Settings unknown to this version:"
            )
        raise RecipeError("\n  ".join([f"{source}: {title}", *mistakes])) from None


def _numbers(version: Any) -> tuple[int, ...]:
    """Return major, minor and patch number, to compare versions; empty if there are none."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", str(version))
    return tuple(int(x or 0) for x in found.groups()) if found else ()


def _override(settings: dict[str, Any], override: str) -> None:
    """Set ``key.path=value``; values are YAML, and list items are chosen by number."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise RecipeError(
            f"an override is key.path=value, such as optimizer.lr=1e-5; got {override!r}."
        )
    if key == BASE:
        raise RecipeError(f"base cannot be an override, only a key in a file; got {override!r}.")
    try:
        value = parse_value(text)
    except ValueError:
        raise RecipeError(f"{key}: the value {shown(text)} is not YAML.") from None
    place: Any = settings
    *path, last = key.split(".")
    for depth, name in enumerate(path):
        place = _enter(place, name, ".".join(path[: depth + 1]))
    if isinstance(place, list):
        place[_index(place, last, key)] = value
    else:
        place[last] = value


def _enter(place: Any, name: str, path: str) -> Any:
    """Return the mapping or list under a key; create a mapping if the key is missing."""
    if isinstance(place, list):
        number = _index(place, name, path)
        if isinstance(place[number], str) and path.partition(".")[0] in NAMED:
            place[number] = {"name": place[number]}
        return place[number]
    inner = place.get(name)
    if inner is None:
        inner = place[name] = {}
    if isinstance(inner, str) and name in NAMED:
        inner = place[name] = {"name": inner}  # the override adds a setting to a bare name
    if not isinstance(inner, dict | list):
        raise RecipeError(f"{path} is {inner!r}, which has no settings below it.")
    return inner


def _index(place: list[Any], name: str, path: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise RecipeError(
            f"{path}: a list of {len(place)}; expected an index from 0 to {len(place) - 1}."
        )
    return int(name)


def _explain(problem: Any) -> str:
    """Describe one validation error of pydantic: key, what was expected, what was given."""
    location = [str(part) for part in problem["loc"] if part not in KINDS]
    where = ".".join(location) or "recipe"
    if problem["type"] == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1])
        name, meant = str(problem["loc"][-1]), synonym(location)
        hint = nearest(name, known) if meant is None else f" Did you mean {meant!r}?"
        if not hint and (elsewhere := SYNONYMS.get(name)):
            hint = f" Did you mean {elsewhere!r}?"
        hint = hint or f" Known keys: {', '.join(known)}."
        return f"{where}: unknown key.{hint}"
    if problem["type"] == "missing":
        return f"{where}: missing"
    if problem["type"] == "union_tag_not_found":
        return f"{where}: a stage needs its kind: {', '.join(KINDS)}"
    if problem["type"] == "union_tag_invalid":
        kind = str(problem["ctx"]["tag"])
        hint = nearest(kind, KINDS)
        return f"{where}.kind: expected {', '.join(KINDS)}; got {shown(kind)}.{hint}"
    given = shown(problem["input"])
    if problem["type"] == "model_type":
        first = _known_keys(problem["loc"])[0]
        return f"{where}: expected settings, such as {{{first}: …}}; got {given}"
    if problem["type"] == "model_attributes_type":
        return f"{where}: expected a stage, such as {{kind: optimize, steps: 100}}; got {given}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message if where == "recipe" else f"{where}: {message}"
    return f"{where}: {message}; got {given}"


def _known_keys(location: Sequence[str | int]) -> list[str]:
    """Return the keys that are allowed at a location of the recipe."""
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
    """Yield the settings classes inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType | Union.__class__):
        for part in get_args(annotation):
            yield from _models(part)
