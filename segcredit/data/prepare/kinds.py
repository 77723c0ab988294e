"""The type of a column of extra_info, found while its rows pass by: rows may disagree."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "null"
TEXT = "string"
_LIST = "list of "


class Kinds:
    """One kind per column, wide enough for every value seen: at worst text."""

    def __init__(self) -> None:
        self.of = {"answer": TEXT}  # as in verl

    def see(self, values: Mapping[str, Any]) -> None:
        """Take a row's values into account."""
        for name, value in values.items():
            self.of[name] = _wider(self.of.get(name, NOTHING), _kind(value))

    def cast(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A row's values as their columns hold them; absent ones are None."""
        return {name: _as_kind(values.get(name), kind) for name, kind in self.of.items()}


def inner_kind(kind: str) -> str | None:
    """Of a list, what it holds; None: no list."""
    return kind.removeprefix(_LIST) if kind.startswith(_LIST) else None


def _kind(value: object) -> str:
    match value:
        case None:
            return NOTHING
        case bool():
            return "bool"
        case int() if -(2**63) <= value < 2**63:
            return "int64"
        case float():
            return "float64"
        case list():
            inner = NOTHING
            for part in value:
                inner = _wider(inner, _kind(part))
            return TEXT if inner.startswith(_LIST) else _LIST + inner
    return TEXT


def _wider(a: str, b: str) -> str:
    if a == b or b == NOTHING:
        return a
    if a == NOTHING:
        return b
    if {a, b} == {"int64", "float64"}:
        return "float64"
    inner_a, inner_b = inner_kind(a), inner_kind(b)
    if inner_a is not None and inner_b is not None:
        return _LIST + _wider(inner_a, inner_b)
    return TEXT


def _as_kind(value: Any, kind: str) -> Any:
    if value is None:
        return None
    inner = inner_kind(kind)
    if inner is not None and isinstance(value, Sequence):
        return [_as_kind(part, inner) for part in value]
    if kind in (TEXT, NOTHING):
        return value if isinstance(value, str) else _json(value)
    return float(value) if kind == "float64" else value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
