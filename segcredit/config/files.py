"""Read the settings of recipes: YAML files with their bases, and the recipes of the package.

A file in ``segcredit/recipes`` holds one recipe, or a collection of recipes: settings that all of
them share, parts to choose from (models, methods, …), and ``recipes``, the published combinations.
A recipe's name is the collection's name and the names of its parts, ``geo3k/qwen2.5-vl-3b-sapo``,
or ``real/smollm2-135m/sapo`` if the collection says ``join: /``; its settings are the shared ones
with each part merged on top, in the order of the name.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache, reduce
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from segcredit.printable import shown
from segcredit.registry import closest, nearest
from segcredit.runlog.folder import GIVEN_IN_PYTHON, resume_call
from segcredit.runlog.untrusted import PlainLoader, parse_yaml, read_yaml

BASE = "base"
"""Key in a recipe that names the recipes it starts from."""
NAMED = ("algorithm", "reward", "partition")
"""Settings that consist of a name and its own settings; another name discards the latter."""
FOLDER = Path(str(files("segcredit"))) / "recipes"
SUFFIXES = (".yaml", ".yml")


class RecipeError(ValueError):
    """A recipe that cannot run; the message lists every reason."""


class _Loader(PlainLoader):
    """YAML loader that reads 1e-5 as a number and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = next((key for key, count in keys.items() if key != "<<" and count > 1), None)
        if twice is not None:
            raise ValueError(f"duplicate key {shown(twice)} on line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    [*"-+.0123456789"],
)


def parse_value(text: str) -> Any:
    """Parse a YAML value of the command line; raise ValueError if it is not YAML."""
    return parse_yaml(text, _Loader)


def read_settings(path: Path) -> dict[str, Any]:
    """Read one YAML file as plain data, without its bases."""
    try:
        found = read_yaml(path, _Loader)
    except ValueError as error:
        raise RecipeError(f"{path}: not YAML: {error}") from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: expected a mapping of settings; got {type(found).__name__}.")
    if given := found.get(GIVEN_IN_PYTHON):
        names = ", ".join(given) if isinstance(given, dict) else str(given)
        raise RecipeError(
            f"{path}: {names} came from Python as objects, which no file can hold, so only Python "
            f"can resume this run, with the same objects: {resume_call(path.parent)}"
        )
    return found


def merge_settings(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into a copy of ``under``: mappings key by key; other values are replaced.

    Lists are replaced, too. If ``over`` names another method, reward or partition, the settings of
    the earlier one are discarded.
    """
    merged = dict(under)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(value, dict) and key in NAMED:
            before = _settings_of_name(before, value)
        if isinstance(before, dict) and isinstance(value, dict):
            value = merge_settings(before, value)
        merged[key] = value
    return merged


def _settings_of_name(before: Any, value: dict[str, Any]) -> Any:
    """Return ``before`` if ``value`` has the same name or no name, otherwise None."""
    if isinstance(before, str):
        before = {"name": before}
    if not isinstance(before, dict) or value.get("name", before.get("name")) != before.get("name"):
        return None
    return before


def recipe_settings(name: str) -> dict[str, Any]:
    """Return the settings of a recipe file or a shipped recipe, merged with its bases.

    The settings are plain data, not yet validated, and belong to the caller.
    """
    if _is_file(Path(name)):
        return _with_bases(Path(name))
    shipped = shipped_recipes()
    if name in shipped:
        return copy.deepcopy(_shipped()[name])
    hint = _similar_file(Path(name)) or nearest(name, shipped)
    if _is_file(Path(name) / "config.yaml"):
        hint = f" It is a run directory; to resume the run, type: --resume {name}"
    raise RecipeError(
        f"no recipe {shown(name)}: neither a YAML file nor one of {_listed(name, shipped)}.{hint}"
    )


def _similar_file(path: Path) -> str:
    """Return a hint at a recipe file with a similar name, such as own.yaml for own.yml."""
    try:
        found = [x.name for x in path.parent.iterdir() if x.suffix in SUFFIXES]
    except (OSError, ValueError):  # no such folder, or an impossible name
        return ""
    same = [x for x in found if Path(x).stem in (path.name, path.stem)]
    if not same and path.suffix in SUFFIXES:
        near = closest(path.name, found)
        same = [] if near is None else [near]
    return f" Did you mean {str(path.parent / same[0])!r}?" if same else ""


def _listed(name: str, shipped: Iterable[str]) -> str:
    """List the recipes of the named collection, or all collections with their sizes."""
    collection = name.partition("/")[0] + "/"
    if inside := [x for x in shipped if x.startswith(collection)]:
        return ", ".join(inside)
    count = Counter(x.partition("/")[0] + "/…" if "/" in x else x for x in shipped)
    return ", ".join(f"{x} ({n})" if x.endswith("…") else x for x, n in sorted(count.items()))


def _with_bases(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merge a file's settings into those of its bases, recursively."""
    if path.resolve() in [x.resolve() for x in above]:
        circle = " → ".join(str(x) for x in (*above, path))
        raise RecipeError(f"{above[0]}: a recipe cannot be its own base; got {circle}.")
    own = read_settings(path)
    merged: dict[str, Any] = {}
    for name in _base_names(path, own.pop(BASE, None)):
        merged = merge_settings(merged, _base_settings(path, name, (*above, path)))
    return merge_settings(merged, own)


def _base_names(path: Path, base: Any) -> list[str]:
    """Return the bases of a file; if two bases set the same key, the later one applies."""
    names = [] if base is None else base if isinstance(base, list) else [base]
    for name in names:
        if not isinstance(name, str):
            raise RecipeError(
                f"{path}: base is a recipe or a list of them, as in base: demo; got {shown(base)}."
            )
    return names


def _base_settings(path: Path, name: str, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return the settings of a base: a file relative to ``path``, or a shipped recipe or part."""
    for beside in (path.parent / name, path.parent / f"{name}.yaml"):
        if _is_file(beside):
            return _with_bases(beside, above)
    if name in _shipped():
        return copy.deepcopy(_shipped()[name])
    others = [x.stem for x in path.parent.glob("*.yaml") if x.name != path.name]
    hint = nearest(name, [*others, *_shipped()])
    raise RecipeError(
        f"{path}: no base {shown(name)}: neither a YAML file relative to {path.parent} nor a "
        f"recipe of the package.{hint}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def shipped_recipes() -> list[str]:
    """Return the names of the package's recipes, such as ``geo3k/qwen2.5-vl-3b-sapo``."""
    return [name for name in _shipped() if "/_" not in name]


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """Return the settings of all recipes of the package, and of all parts (``geo3k/_sapo``)."""
    found = {path.stem: read_settings(path) for path in sorted(FOLDER.glob("*.yaml"))}
    shipped: dict[str, dict[str, Any]] = {}
    for name, content in found.items():
        if "recipes" not in content:
            shipped[name] = content
            continue
        shared, parts = _collection(content, found)
        for line in content["recipes"]:
            for chosen in product(*([x] if isinstance(x, str) else x for x in line)):
                recipe = f"{name}/{content.get('join', '-').join(chosen)}"
                settings = [shared, *(parts[part] for part in chosen)]
                shipped[recipe] = reduce(
                    merge_settings, settings, {"name": recipe.replace("/", "-")}
                )
        shipped[f"{name}/_base"] = shared
        shipped |= {f"{name}/_{part}": settings for part, settings in parts.items()}
    return shipped


def _collection(
    content: dict[str, Any], others: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the shared settings and the parts of a collection, merged into those of its base."""
    shared: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    if BASE in content:
        shared, parts = _collection(others[content[BASE]], others)
    for part, settings in content["parts"].items():
        own = dict(settings)
        below = [parts.get(part, {}), parts[own.pop(BASE)] if BASE in own else {}]
        parts[part] = reduce(merge_settings, [*below, own])
    return merge_settings(shared, content["shared"]), parts
