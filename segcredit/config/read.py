"""Reading recipes: files on their bases, overrides as ``key.path=value``, errors with the key."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from segcredit.config.recipe import KINDS, Recipe
from segcredit.printable import shown
from segcredit.runlog import RunFolder, resume_command
from segcredit.runlog.folder import require_run
from segcredit.runlog.untrusted import PlainLoader, parse_yaml, read_yaml, require_trust
from segcredit.version import __version__

GIVEN_IN_PYTHON = "given_in_python"
"""Where config.yaml says what was an object and not a setting."""
VERSION = "version"
"""Key in config.yaml for the version of segcredit that wrote it."""
BASE = "base"
"""The key under which a recipe names what it is a change of."""
NAMED = ("algorithm", "reward", "partition")
"""Settings that belong to a name, and say nothing under another."""


class RecipeError(ValueError):
    """A recipe that cannot run, with every reason at once."""


class _Loader(PlainLoader):
    """YAML in which 1e-5 is a number, and a key that stands twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, count in keys.items() if key != "<<" and count > 1), None)
        if twice is not None:
            raise ValueError(f"{shown(twice)} stands twice, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    [*"-+.0123456789"],
)


def recipe_path(name: str) -> Path:
    """A file, or one of the recipes that come with the package."""
    if _is_file(Path(name)):
        return Path(name)
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    near = get_close_matches(name, shipped, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if _is_file(Path(name) / "config.yaml"):
        hint = f" It is a run; to go on with it: --resume {name}"
    raise RecipeError(
        f"no recipe {shown(name)}: neither a YAML file nor one of {_listed(name, shipped)}.{hint}"
    )


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name: ``demo``, ``geo3k/qwen2.5-vl-3b-sapo``."""
    return {name: path for name, path in _by_name().items() if not path.name.startswith("_")}


def _by_name() -> dict[str, Path]:
    """Recipes, and the parts that they are made of, whose files begin with an underscore."""
    folder = _folder()
    found = sorted(_shipped("**/*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def _shipped(pattern: str = "*.yaml") -> Iterator[Path]:
    return _folder().glob(pattern)


def _folder() -> Path:
    return Path(str(files("segcredit"))) / "recipes"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _listed(name: str, shipped: Iterable[str]) -> str:
    """All names of the folder that was meant, else those in no folder and how many are in each."""
    folder = name.partition("/")[0] + "/"
    if inside := [x for x in shipped if x.startswith(folder)]:
        return ", ".join(inside)
    count = Counter(x.partition("/")[0] + "/…" if "/" in x else x for x in shipped)
    return ", ".join(f"{x} ({n})" if x.endswith("…") else x for x, n in sorted(count.items()))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by file or name, on its bases, with ``key.path=value`` applied, validated whole."""
    return parse_recipe(apply_overrides(recipe_settings(name), overrides), str(recipe_path(name)))


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
    recipe = load_recipe(str(path / "config.yaml"), overrides)
    if not trust_run:
        typed = [override.partition("=")[0] for override in overrides]
        require_trust(recipe.as_dict(), path, resume_command(path), typed)
    return recipe


def recipe_settings(name: str) -> dict[str, Any]:
    """What a recipe and its bases say, as plain data, not yet validated: to build on."""
    return _with_bases(recipe_path(name))


def read_settings(path: Path) -> dict[str, Any]:
    """One file of settings as plain data, in the YAML of recipes."""
    return _read(path)


def merge_settings(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Some settings on top of others, as a recipe stands on its base; neither is changed."""
    return _merged(under, over)


def apply_overrides(found: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The same settings with each ``key.path=value`` set in place."""
    for override in overrides:
        _override(found, override)
    return found


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's settings merged into those of its bases, and these into those of theirs."""
    if path.resolve() in [x.resolve() for x in above]:
        circle = " → ".join(str(x) for x in (*above, path))
        raise RecipeError(f"{above[0]}: a recipe cannot be its own base; got {circle}.")
    own = _read(path)
    merged: dict[str, Any] = {}
    for name in _base_names(path, own.pop(BASE, None)):
        merged = _merged(merged, _with_bases(_base_path(path, name), (*above, path)))
    return _merged(merged, own)


def _read(path: Path) -> dict[str, Any]:
    """One file as it is."""
    try:
        found = read_yaml(path, _Loader)
    except ValueError as error:
        raise RecipeError(f"{path}: not YAML: {error}") from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: expected a mapping of settings; got {type(found).__name__}.")
    if given := found.get(GIVEN_IN_PYTHON):
        raise RecipeError(_only_in_python(path, given))
    return found


def _base_names(path: Path, base: Any) -> list[str]:
    """What stands under ``base``: a name, or several, of which a later one has the last word."""
    names = [] if base is None else base if isinstance(base, list) else [base]
    for name in names:
        if not isinstance(name, str):
            raise RecipeError(
                f"{path}: base is a recipe or a list of them, as in base: demo; got {shown(base)}."
            )
    return names


def _base_path(path: Path, name: str) -> Path:
    """The base's file: relative to the file that names it, or by a name of the package's own."""
    for beside in (path.parent / name, path.parent / f"{name}.yaml"):
        if _is_file(beside):
            return beside
    known = _by_name()
    if name in known:
        return known[name]
    others = [x.stem for x in path.parent.glob("*.yaml") if x.name != path.name]
    near = get_close_matches(name, [*others, *known], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(
        f"{path}: no base {shown(name)}: neither a YAML file, as seen from {path.parent}, nor a "
        f"recipe that comes along.{hint}"
    )


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``under``: mappings key by key; everything else, lists too, is replaced.

    Another method, reward or partition comes without the old one's settings.
    """
    merged = dict(under)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(value, dict) and key in NAMED:
            before = _of_one_name(before, value)
        if isinstance(before, dict) and isinstance(value, dict):
            value = _merged(before, value)
        merged[key] = value
    return merged


def _of_one_name(before: Any, value: dict[str, Any]) -> Any:
    """What stays of the settings before; those without a name belong to the name that is there."""
    if isinstance(before, str):
        before = {"name": before}
    if not isinstance(before, dict) or value.get("name", before.get("name")) != before.get("name"):
        return None
    return before


def parse_recipe(found: dict[str, Any], source: str = "recipe") -> Recipe:
    """A recipe from plain data; every mistake in one message."""
    settings = {key: x for key, x in found.items() if key != VERSION}
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        found_out = [line for problem in error.errors() for line in _explain(problem).splitlines()]
        lines = [f"  {line}" for line in found_out]
        count = "one mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        if _numbers(found.get(VERSION)) > _numbers(__version__):
            count = (
                f"written by version {shown(found[VERSION])} of segcredit; this is version "
                f"{__version__}: upgrade segcredit. Settings unknown to this version:"
            )
        raise RecipeError(f"{source}: {count}\n" + "\n".join(lines)) from None


def _numbers(version: Any) -> tuple[int, ...]:
    """Major, minor and patch number, to compare versions; empty if the text is not a version."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", str(version))
    return tuple(int(x or 0) for x in found.groups()) if found else ()


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
    if key == BASE:
        raise RecipeError(f"base stands in a file and is no override; got {override!r}.")
    try:
        value = parse_yaml(text, _Loader)
    except ValueError:
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
    if isinstance(inner, str) and name in NAMED:
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
