"""Draw a grid of colored shapes as a PNG image with smooth edges."""

import io
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

from PIL import Image, ImageDraw

COLORS = {
    "red": "#d93a3a",
    "green": "#2fa45a",
    "blue": "#2f6fde",
    "yellow": "#f0b90b",
    "purple": "#8a4fd3",
    "black": "#2b2f36",
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")

SMOOTH = 4
"""Factor by which tiles are drawn larger and then scaled down."""
PAPER, LINE = "#ffffff", "#dfe3e8"
Item = tuple[str, str]
"""Color and shape."""


def draw_grid(cells: Sequence[Item | None], size: int, cell: int) -> bytes:
    """Draw ``size`` × ``size`` cells of ``cell`` pixels in reading order; None is an empty cell."""
    return join_tiles((_tile(item, cell) for item in cells), size, cell)


def join_tiles(tiles: Iterable[Image.Image], size: int, cell: int) -> bytes:
    """Join ``size`` × ``size`` tiles of ``cell`` pixels in reading order to one PNG image."""
    image = Image.new("RGB", (size * cell, size * cell))
    for number, tile in enumerate(tiles):
        row, column = divmod(number, size)
        image.paste(tile, (column * cell, row * cell))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)  # time matters more than size here
    return buffer.getvalue()


@lru_cache(maxsize=256)
def _tile(item: Item | None, cell: int) -> Image.Image:
    """Draw one cell with its frame."""
    side = cell * SMOOTH
    tile = Image.new("RGB", (side, side), PAPER)
    pen = ImageDraw.Draw(tile)
    pen.rectangle((0, 0, side - 1, side - 1), outline=LINE, width=max(1, SMOOTH // 2))
    if item is not None:
        color, shape = item
        draw_shape(pen, shape, COLORS[color], side)
    return tile.resize((cell, cell), Image.Resampling.LANCZOS)


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, color: str, side: int) -> None:
    """Draw a shape in the middle of a square."""
    middle, reach = (side - 1) / 2, 0.36 * side
    if shape == "circle":
        pen.ellipse((middle - reach, middle - reach, middle + reach, middle + reach), fill=color)
        return
    corners = [(middle + reach * x, middle + reach * y) for x, y in OUTLINES[shape]]
    pen.polygon(corners, fill=color)


def _star() -> list[tuple[float, float]]:
    """Return the corners of a star, alternately far and near."""
    far, near = 1.1, 0.46
    turns = [(n * math.pi / 5, near if n % 2 else far) for n in range(10)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle, radius in turns]


_ARM = 0.36
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0.0, -1.0), (1.05, 0.85), (-1.05, 0.85)],
    "star": _star(),
    "diamond": [(0.0, -1.1), (0.85, 0.0), (0.0, 1.1), (-0.85, 0.0)],
    "cross": [
        *[(-_ARM, -1.0), (_ARM, -1.0), (_ARM, -_ARM), (1.0, -_ARM), (1.0, _ARM), (_ARM, _ARM)],
        *[(_ARM, 1.0), (-_ARM, 1.0), (-_ARM, _ARM), (-1.0, _ARM), (-1.0, -_ARM), (-_ARM, -_ARM)],
    ],
}
"""Corners relative to the radius, x to the right and y down; shapes look about equally large."""
