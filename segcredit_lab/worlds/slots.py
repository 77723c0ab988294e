"""Check a response word by word: the words allowed at each position, and the first wrong one."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from string import ascii_uppercase
from typing import Literal, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from segcredit.data.worlds.drawing import COLOURS, PAPER, SMOOTH, Item, draw_shape, encode_png

Kind = Literal["plain", "style", "decision"]
BOX_OPENS, BOX_CLOSES = "\\boxed{", "}"


class Slot(NamedTuple):
    """One word position in a line."""

    right: tuple[str, ...]
    """Words allowed here."""
    kind: Kind = "plain"
    """style: any of several words is right; decision: the rest depends on this word."""


class Word(NamedTuple):
    """One word of a text and its position."""

    text: str
    start: int


class Mark(NamedTuple):
    """A word of a text that is a decision or style."""

    kind: Kind
    start: int
    end: int


_WORD = re.compile(r"\\boxed\{|\}|\n|[^\s{}\\]+|\\")


def plain(*words: str) -> list[Slot]:
    """Make slots with one allowed word each."""
    return [Slot((word,)) for word in words]


def lines_of(text: str) -> list[list[Word]]:
    """Split a text into lines of words; after a final line break there is an empty line."""
    lines: list[list[Word]] = [[]]
    for found in _WORD.finditer(text):
        if found[0] == "\n":
            lines.append([])
        else:
            lines[-1].append(Word(found[0], found.start()))
    return lines


def differs_at(words: Sequence[Word], slots: Sequence[Slot]) -> int | None:
    """Return the index of the first wrong word; words that are not written yet are not wrong."""
    for place, word in enumerate(words):
        if place >= len(slots) or word.text not in slots[place].right:
            return place
    return None


INK = "#000000"
GROUNDS = tuple(product((60, 150, 240), repeat=3))[1:]
"""Background color of each letter; a tiny model recognizes a tile by it before it can read."""
TAG_SIZE, TAG_AT, PLATE = 0.42, (0.06, -0.01), 0.62
"""Size and position of a letter, and side of the white plate under a shape, relative to a cell."""


@lru_cache(maxsize=4096)
def draw_tagged(tiles: tuple[tuple[str, Item], ...], size: int, cell: int) -> bytes:
    """Draw a grid in which every cell has a letter in its upper left corner."""
    image = Image.new("RGB", (size * cell, size * cell))
    for number, (tag, item) in enumerate(tiles):
        row, column = divmod(number, size)
        image.paste(_tagged_tile(tag, item, cell), (column * cell, row * cell))
    return encode_png(image)


@lru_cache(maxsize=1024)
def _tagged_tile(tag: str, item: Item, cell: int) -> Image.Image:
    """Draw a letter and a shape on the letter's own background color."""
    side = cell * SMOOTH
    tile = Image.new("RGB", (side, side), GROUNDS[ascii_uppercase.index(tag)])
    pen = ImageDraw.Draw(tile)
    within = round(PLATE * side)
    plate = Image.new("RGB", (within, within), PAPER)
    draw_shape(ImageDraw.Draw(plate), item[1], COLOURS[item[0]], within)
    room = side - within - SMOOTH
    tile.paste(plate, (room, room))
    font = ImageFont.load_default(size=TAG_SIZE * side)
    place = (TAG_AT[0] * side, TAG_AT[1] * side)
    pen.text(place, tag, fill=INK, font=font, stroke_width=SMOOTH // 2, stroke_fill=PAPER)
    return tile.resize((cell, cell), Image.Resampling.LANCZOS)
