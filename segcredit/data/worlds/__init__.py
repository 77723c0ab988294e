"""Worlds: generated tasks that need no download, for demos, tests and studies."""

from collections.abc import Callable

from segcredit.data.worlds.base import Demonstration, Split, World
from segcredit.data.worlds.grid import ShapeGrid
from segcredit.registry import Registry

WORLDS: Registry[Callable[..., World]] = Registry(
    "world",
    {
        "shape_grid": ShapeGrid,
        "derived_variables": "segcredit_lab.worlds.chains:DerivedVariables",
        "ledger": "segcredit_lab.worlds.ledger:Ledger",
        "tile_tour": "segcredit_lab.worlds.tiles:TileTour",
    },
)


def make_world(name: str, **settings: object) -> World:
    """Make a world by name or ``file.py:Name``, with its settings; lists become tuples."""
    given = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    world = WORLDS.make(name, given)
    if not isinstance(world, World):
        required = ("name", "phases", "prompt", "demonstration", "tokenizer", "oracle", "prompts")
        missing = [x for x in required if not hasattr(world, x)]
        raise ValueError(
            f"world {name} must be a class that implements World (segcredit/data/worlds/base.py); "
            f"it has no {', '.join(missing)}. Make it a subclass: class Mine(World)."
        )
    return world


__all__ = [
    "WORLDS",
    "Demonstration",
    "ShapeGrid",
    "Split",
    "World",
    "make_world",
]
