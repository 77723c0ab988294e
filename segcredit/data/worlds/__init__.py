"""Generated tasks that need no download. ``WORLDS`` names them for the command line."""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature

from segcredit.data.worlds.base import Demonstration, Split, World
from segcredit.data.worlds.chains import DerivedVariables
from segcredit.data.worlds.grid import ShapeGrid
from segcredit.data.worlds.ledger import Ledger
from segcredit.data.worlds.tiles import TileTour

WORLDS: dict[str, Callable[..., World]] = {
    ShapeGrid.name: ShapeGrid,
    DerivedVariables.name: DerivedVariables,
    Ledger.name: Ledger,
    TileTour.name: TileTour,
}


def make_world(name: str, **settings: object) -> World:
    """The world of that name, e.g. ``make_world("shape_grid", size=4)``; lists serve as tuples."""
    if name not in WORLDS:
        near = get_close_matches(str(name).lower().replace("-", "_"), WORLDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown world {name!r}.{hint} The worlds are: {', '.join(WORLDS)}.")
    known = list(signature(WORLDS[name]).parameters)
    for setting in settings:
        if setting not in known:
            near = get_close_matches(setting, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{name} has no setting {setting!r}.{hint} Its settings are: {', '.join(known)}."
            )
    made = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    return WORLDS[name](**made)


__all__ = [
    "WORLDS",
    "Demonstration",
    "DerivedVariables",
    "Ledger",
    "ShapeGrid",
    "Split",
    "TileTour",
    "World",
    "make_world",
]
