"""Draws a grid of coloured shapes as a PNG, smooth at the edges."""

import io
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from string import ascii_uppercase

from PIL import Image, ImageDraw, ImageFont

COLOURS = {
    "red": "#d93a3a",
    "green": "#2fa45a",
    "blue": "#2f6fde",
    "yellow": "#f0b90b",
    "purple": "#8a4fd3",
    "black": "#2b2f36",
}
SHAPES = ("circle", "square", "triangle", "star", "diamond", "cross")

SMOOTH = 4
"""Drawn so many times larger, then scaled down."""
PAPER, LINE, INK = "#ffffff", "#dfe3e8", "#000000"
GROUNDS = tuple(product((60, 150, 240), repeat=3))[1:]
"""A background for each letter: a tiny model knows a tile by it long before it reads."""
TAG_SIZE, TAG_AT, PLATE = 0.42, (0.06, -0.01), 0.62
"""Of a cell: a letter's size and place, and the side of the white plate that a shape is on."""

Item = tuple[str, str]
"""Colour and shape."""


def draw_grid(cells: Sequence[Item | None], size: int, cell: int) -> bytes:
    """A picture of ``size`` × ``size`` cells of ``cell`` pixels, in reading order; None: empty."""
    picture = Image.new("RGB", (size * cell, size * cell))
    for number, item in enumerate(cells):
        row, column = divmod(number, size)
        picture.paste(_tile(item, cell), (column * cell, row * cell))
    return _png(picture)


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=1)  # time matters more than bytes here
    return buffer.getvalue()


@lru_cache(maxsize=4096)
def draw_tagged(tiles: tuple[tuple[str, Item], ...], size: int, cell: int) -> bytes:
    """The same, every cell with a letter in its upper left corner by which it is called."""
    picture = Image.new("RGB", (size * cell, size * cell))
    for number, (tag, item) in enumerate(tiles):
        row, column = divmod(number, size)
        picture.paste(_tagged_tile(tag, item, cell), (column * cell, row * cell))
    return _png(picture)


@lru_cache(maxsize=1024)
def _tagged_tile(tag: str, item: Item, cell: int) -> Image.Image:
    """Letter and shape on a background that only this letter has."""
    side = cell * SMOOTH
    tile = Image.new("RGB", (side, side), GROUNDS[ascii_uppercase.index(tag)])
    pen = ImageDraw.Draw(tile)
    within = round(PLATE * side)
    plate = Image.new("RGB", (within, within), PAPER)
    _draw_shape(ImageDraw.Draw(plate), item[1], COLOURS[item[0]], within)
    room = side - within - SMOOTH
    tile.paste(plate, (room, room))
    font = ImageFont.load_default(size=TAG_SIZE * side)
    place = (TAG_AT[0] * side, TAG_AT[1] * side)
    pen.text(place, tag, fill=INK, font=font, stroke_width=SMOOTH // 2, stroke_fill=PAPER)
    return tile.resize((cell, cell), Image.Resampling.LANCZOS)


@lru_cache(maxsize=256)
def _tile(item: Item | None, cell: int) -> Image.Image:
    """One cell with its frame, the same wherever it stands."""
    side = cell * SMOOTH
    tile = Image.new("RGB", (side, side), PAPER)
    pen = ImageDraw.Draw(tile)
    pen.rectangle((0, 0, side - 1, side - 1), outline=LINE, width=max(1, SMOOTH // 2))
    if item is not None:
        colour, shape = item
        _draw_shape(pen, shape, COLOURS[colour], side)
    return tile.resize((cell, cell), Image.Resampling.LANCZOS)


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, colour: str, side: int) -> None:
    middle, reach = (side - 1) / 2, 0.36 * side
    if shape == "circle":
        pen.ellipse((middle - reach, middle - reach, middle + reach, middle + reach), fill=colour)
        return
    corners = [(middle + reach * x, middle + reach * y) for x, y in OUTLINES[shape]]
    pen.polygon(corners, fill=colour)


def _star() -> list[tuple[float, float]]:
    """Ten corners, far and near in turn."""
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
"""Corners in units of the reach, x to the right and y down; shapes look about equally large."""
