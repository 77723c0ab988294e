"""Draws a grid of coloured shapes as a PNG, smooth at the edges."""

import io
import math
from collections.abc import Sequence
from functools import lru_cache

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
PAPER, LINE, INK, GREY = "#ffffff", "#dfe3e8", "#5b564e", "#7b756b"
"""Grey is 0 once a model's processor has normalised it: only what is drawn on it counts."""
TAG_SIZE, TAG_AT, TAG_ROOM = 0.44, (0.05, -0.02), 0.3
"""Of a cell: a letter's size and place, and the margin above and left of the shape beside it."""

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
    """A smaller shape makes room for the letter."""
    side = cell * SMOOTH
    tile = Image.new("RGB", (side, side), GREY)
    pen = ImageDraw.Draw(tile)
    pen.rectangle((0, 0, side - 1, side - 1), outline=INK, width=max(1, SMOOTH // 2))
    within = round((1 - TAG_ROOM) * side)
    shape = Image.new("RGB", (within, within), GREY)
    _draw_shape(ImageDraw.Draw(shape), item[1], COLOURS[item[0]], within)
    room = side - within - SMOOTH
    tile.paste(shape, (room, room))
    font = ImageFont.load_default(size=TAG_SIZE * side)
    pen.text(
        (TAG_AT[0] * side, TAG_AT[1] * side), tag, fill=PAPER, font=font, stroke_width=SMOOTH // 4
    )
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
