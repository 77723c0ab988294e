"""Generated tasks that need no download. ``WORLDS`` names them for the command line."""

from collections.abc import Callable

from segcredit.data.worlds.base import Demonstration, Split, World
from segcredit.data.worlds.chains import DerivedVariables
from segcredit.data.worlds.grid import ShapeGrid
from segcredit.registry import Registry

WORLDS: Registry[Callable[..., World]] = Registry(
    "world",
    {
        "shape_grid": ShapeGrid,
        "derived_variables": DerivedVariables,
        "ledger": "segcredit_lab.worlds.ledger:Ledger",
        "tile_tour": "segcredit_lab.worlds.tiles:TileTour",
    },
)


def make_world(name: str, **settings: object) -> World:
    """Make a world by name, e.g. ``make_world("shape_grid", size=4)``; lists become tuples."""
    made = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    return WORLDS.make(name, made)


__all__ = [
    "WORLDS",
    "Demonstration",
    "DerivedVariables",
    "ShapeGrid",
    "Split",
    "World",
    "make_world",
]
