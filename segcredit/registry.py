"""One registry per kind of component, and ``file.py:Name`` for components of your own.

Algorithms, partitions, columns, rewards, worlds, engines and model families are each named in one
:class:`Registry`. A recipe, a command or a study names a built-in component by its registry name
(``entropy``), or one of your own by the file and the name in it (``my_partitions.py:EntropyAbove``)
or by a module that can be imported (``my_package.cuts:EntropyAbove``).

>>> SHAPES = Registry("shape", {"circle": dict, "square": "builtins:list"})
>>> SHAPES["square"]
<class 'list'>
>>> nearest("circel", SHAPES)
" Did you mean 'circle'?"
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

USER_MODULES = "segcredit_user_"
"""Prefix of the module names under which users' files are loaded."""
_OWN = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to a mistyped one, or None."""
    by_spelling = {_spelling(x): x for x in known}
    near = get_close_matches(_spelling(name), by_spelling, n=1, cutoff=cutoff)
    return by_spelling[near[0]] if near else None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to a mistyped one, else ``""``."""
    near = closest(name, known, cutoff)
    return "" if near is None else f" Did you mean {near!r}?"


def _spelling(name: str) -> str:
    return str(name).lower().replace("-", "_").replace(" ", "_")


def names_code(text: object) -> bool:
    """Whether a setting is written as ``file.py:Name`` or ``package.module:Name``."""
    return isinstance(text, str) and _OWN.fullmatch(text) is not None


NOT_CODE = {
    *("name", "version", "model.path", "model.critic"),
    *("data.train", "data.test", "data.suffix", "data.system", "data.template", "rollout.stop"),
    *("reward.url", "reward.prompt", "reward.model", "reward.label"),
}
"""Keys of settings that never name code, whatever their value looks like."""


def code_settings(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every setting that names code.

    An item of a list has the list's key.
    """
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from code_settings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from code_settings(value, key)
    elif key not in NOT_CODE and names_code(settings):
        yield key, settings


def file_digests(settings: Any) -> list[str]:
    """Hash each file that the settings name as ``file.py:Name``; "" for one that cannot be read."""
    found = []
    for _, spec in code_settings(settings):
        place = spec.rpartition(":")[0]
        if place.endswith(".py"):
            try:
                content = Path(place).expanduser().read_bytes()
            except OSError:
                found.append("")
            else:
                found.append(hashlib.sha256(content).hexdigest())
    return found


def resolve_files(settings: Any, run: Path, key: str = "") -> Any:
    """Copy a run's settings, with absolute paths for every ``file.py:Name`` whose file exists.

    A relative path starts at the current directory, as when the run was started. If that file does
    not exist, the directories above the run directory are searched, nearest first. So a run in
    ``project/runs`` can be resumed from any directory.
    """
    if isinstance(settings, Mapping):
        items = settings.items()
        return {x: resolve_files(y, run, f"{key}.{x}" if key else str(x)) for x, y in items}
    if isinstance(settings, list | tuple):
        return [resolve_files(value, run, key) for value in settings]
    if key in NOT_CODE or not names_code(settings):
        return settings
    place, _, name = settings.rpartition(":")
    if not place.endswith(".py"):
        return settings
    path = Path(place).expanduser()
    tried = [path.absolute(), *(folder / path for folder in run.absolute().parents)]
    found = next((x for x in tried if x.is_file()), None)
    return settings if found is None else f"{found}:{name}"


def keep_written(settings: Any, written: Any, run: Path, key: str = "") -> Any:
    """Undo :func:`resolve_files` wherever a path is still the one that config.yaml names.

    So the config.yaml of a run that was started with relative paths keeps them.
    """
    if isinstance(settings, Mapping) and isinstance(written, Mapping):
        return {
            x: keep_written(y, written.get(x), run, f"{key}.{x}" if key else str(x))
            for x, y in settings.items()
        }
    same = isinstance(written, str) and resolve_files(written, run, key) == settings
    return written if same else settings


def load_object(spec: str, kind: str) -> Any:
    """Import the object that ``file.py:Name`` or ``package.module:Name`` names.

    A relative file path starts at the current directory. The file's folder becomes importable, as
    if the file had been run. Each file is executed once per process.
    """
    place, _, name = spec.rpartition(":")
    module = _load_file(place, spec) if place.endswith(".py") else _import(place, spec)
    if not hasattr(module, name):
        there = [x for x in vars(module) if not x.startswith("_")]
        raise ValueError(f"{place} has no {kind} {name!r}.{nearest(name, there)}")
    return getattr(module, name)


def _load_file(place: str, spec: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(
            f"there is no file {path} (from {spec!r}). Relative paths start at {Path.cwd()}."
        )
    name = USER_MODULES + re.sub(r"\W", "_", str(path.with_suffix("")))
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _import(place: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ValueError(
            f"cannot import {place!r} (from {spec!r}): {error}. Install it, or name a file: "
            f"'path/to/file.py:Name'."
        ) from error


RENAMED = {"colours": "colors", "normalise": "normalize"}
"""Earlier name of a setting, which the config.yaml of an older run may have → its name now."""


class Registry(Mapping[str, T], Generic[T]):
    """Components of one kind by name; a value ``"package.module:Name"`` is imported when used."""

    def __init__(self, kind: str, entries: Mapping[str, T | str], plural: str = "") -> None:
        self.kind = kind
        self.plural = plural or f"{kind}s"
        self._entries: dict[str, T | str] = dict(entries)

    def __getitem__(self, name: str) -> T:
        """Look up a built-in name, or load ``file.py:Name``; an unknown name is a ValueError."""
        if name in self._entries:
            entry = self._entries[name]
            if isinstance(entry, str):
                entry = self._entries[name] = load_object(entry, self.kind)
            return entry
        return load_object(self.check_name(name), self.kind)

    def check_name(self, name: str) -> str:
        """Return the name if it is built in or names code, without loading it; else ValueError."""
        if name in self._entries or names_code(name):
            return name
        raise ValueError(
            f"unknown {self.kind} {name!r}.{nearest(name, self._entries)} The {self.plural} are: "
            f"{', '.join(self._entries)}. Write your own as 'file.py:Name'."
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, name: str, settings: Mapping[str, Any]) -> Any:
        """Call the component of that name with its settings; an unknown setting is an error."""
        entry: Any = self[name]
        if not callable(entry):
            raise ValueError(f"{self.kind} {name!r} must be a class or a function; got {entry!r}.")
        settings = _with_new_names(settings, entry)
        require_settings(f"{self.kind} {name}", settings, entry)
        return entry(**settings)


def _with_new_names(settings: Mapping[str, Any], of: Callable[..., Any]) -> dict[str, Any]:
    """Rename settings of an older version that a component knows by their new names only."""
    if not RENAMED.keys() & settings.keys():
        return dict(settings)
    known = signature(of).parameters
    renamed = {x: new for x, new in RENAMED.items() if x not in known and new in known}
    return {renamed.get(x, x): value for x, value in settings.items()}


def require_settings(
    owner: str, settings: Iterable[str], of: Callable[..., Any] | Iterable[str]
) -> None:
    """Raise ValueError for the first setting that a class, function or list does not know."""
    known = list(signature(of).parameters if callable(of) else of)
    for setting in settings:
        if setting not in known:
            its = f"Its settings are: {', '.join(known)}." if known else "It has no settings."
            raise ValueError(f"{owner} has no setting {setting!r}.{nearest(setting, known)} {its}")
