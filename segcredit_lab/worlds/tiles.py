"""Image world: book amounts by rules that lettered tiles decide; long responses with traps."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, ClassVar

from PIL import Image, ImageDraw, ImageFont

from segcredit.data.worlds.base import (
    Demonstration,
    Split,
    check_pair,
    check_place,
    check_share,
    check_whole,
    draw,
    foreign,
)
from segcredit.data.worlds.drawing import (
    COLORS,
    PAPER,
    SHAPES,
    SMOOTH,
    Item,
    draw_shape,
    join_tiles,
)
from segcredit.types import Prompt
from segcredit_lab.worlds.bookings import (
    AUDIT,
    BOTH,
    OPENERS,
    SURE,
    TOTAL,
    UNSURE,
    VERBS,
    Bookings,
    Context,
    Entry,
    Kind,
    Puzzle,
    Slot,
    Word,
    plain,
)

if TYPE_CHECKING:
    import transformers

Tiles = tuple[tuple[str, Item], ...]
"""Letters and the items on their tiles, in reading order."""
GROUNDS = tuple(product((60, 150, 240), repeat=3))[1:]
"""Background color of each letter; a tiny model recognizes a tile by it before it can read."""
TAG_SIZE, TAG_AT, PLATE = 0.42, (0.06, -0.01), 0.62
"""Size and position of a letter, and side of the white plate under a shape, relative to a cell."""
LOOK = "look"
READ = 6
"""Number of tiles that a demonstration of phase "look" reads."""


@dataclass(frozen=True)
class TileTour(Bookings):
    r"""Questions such as "1 m 5 K ; 2 j 2 B ; total ?" about an image of lettered tiles.

    A response visits the tiles in that order, names each item, books the amount by the rule for its
    color, shape and code (m), and boxes the total, modulo a number::

        so 1 : m 5 K red star , twice , sure : 5 becomes 10 ; 0 + 10 = 10 ;
        now 2 : j 2 B blue circle , drop , hm : 2 gives 0 ; 10 + 0 = 10 ;
        \boxed{10}

    Naming the item and choosing the rule are decisions. The item directly follows its letter in a
    line, so a model finds it with one step of attention. A line has 24 tokens, the box 3. The
    held-out split has other images.
    """

    name: ClassVar[str] = "tile_tour"
    phases: ClassVar[tuple[str, ...]] = (LOOK, AUDIT, BOTH, "solve")
    """Warm-start phases: "look K B ?" reads tiles, "audit ?" has random rules and true remarks."""

    size: int = 4
    """Tiles per side; tiles that are not visited are distractors."""
    visited: tuple[int, int] = (7, 9)
    """Minimum and maximum tiles of a tour: the decisions that matter."""
    colors: int = 4
    shapes: int = 4
    codes: int = 8
    """Colors × shapes × codes is the number of contexts; more contexts take longer to learn."""
    pictures: int = 1000
    """Different images in each split, used in turn; every question is different."""
    misread: float = 0.01
    """Share of demonstration lines that name a wrong item."""
    cell: int = 28
    """Pixels per side of a tile: 28 is one image token of Qwen2.5-VL, 32 one of Qwen3-VL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("size", self.size, 2, 5, "Each tile has a letter of its own.")
        check_pair("visited", self.visited, 1)
        check_whole("colors", self.colors, 1, len(COLORS))
        check_whole("shapes", self.shapes, 1, len(SHAPES))
        check_whole("codes", self.codes, 1, len(ascii_lowercase))
        check_whole("pictures", self.pictures, 1)
        check_share("misread", self.misread)
        check_whole("cell", self.cell, 16, 256, "Qwen2.5-VL reads 28 pixels per token.")
        if self.visited[1] > self.size**2:
            raise ValueError(
                f"a tour visits each tile at most once, and there are {self.size**2}; got "
                f"visited={self.visited}. Choose a larger size, or fewer."
            )
        if self.colors * self.shapes < 2:
            raise ValueError(
                "with one color and one shape, all tiles look the same: increase colors or shapes."
            )

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        from segcredit.data.worlds.tokens import build_tokenizer

        numbers = [str(n) for n in range(max(self.modulus, self.visited[1] + 1))]
        shapes = SHAPES[: self.shapes]
        seen = [*list(COLORS)[: self.colors], *shapes]
        style = [*OPENERS[: self.openers], *VERBS[: self.verbs]]
        words = [*style, *self._rules, SURE, UNSURE, TOTAL, AUDIT, "look"]
        signs = [":", ",", ";", "+", "="]
        spaced = [*self._tags, *ascii_lowercase[: self.codes], *seen, *words, *signs, *numbers]
        # tokens include the space after them, except numbers in the box and ";" at a line's end
        return build_tokenizer([*(f"{x} " for x in spaced), *numbers, *shapes, ";", "?"])

    def read(self, prompt: Prompt) -> Puzzle:
        text = prompt.messages[-1]["content"].removeprefix("<image>")
        *stated, last = text.split(" ; ")
        visits = [found.groups() for x in stated if (found := _VISIT.fullmatch(x))]
        shown = dict(prompt.columns.get("tiles", ()))
        known = bool(visits) and all(visit[-1] in shown for visit in visits)
        asked = last.removesuffix(" ?")
        if asked not in (TOTAL, AUDIT) or len(visits) != len(stated) or not known:
            raise foreign(prompt, text)
        entries = [
            Entry(n, (shown[tag], code), int(amount), tag=tag) for n, code, amount, tag in visits
        ]
        tiles = [(tag, _item(words)) for tag, words in shown.items()]
        return Puzzle(tuple(entries), asks=asked, tiles=tuple(tiles))

    @cached_property
    def _tags(self) -> str:
        return ascii_uppercase[: self.size**2]

    @cached_property
    def _items(self) -> list[Item]:
        return list(product(list(COLORS)[: self.colors], SHAPES[: self.shapes]))

    @cached_property
    def _contexts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(map(" ".join, self._items)), tuple(ascii_lowercase[: self.codes])

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        seen: list[str] = [*COLORS, *SHAPES]
        return super()._kinds | dict.fromkeys(seen, "decision")

    def _draw_tiles(self, rng: random.Random) -> Tiles:
        tags, items = list(self._tags), self._items
        rng.shuffle(tags)
        return tuple((tag, rng.choice(items)) for tag in tags)

    def _puzzle(self, split: Split, index: int) -> Puzzle:
        check_place(split, index)
        shown = random.Random(f"{self.name}|{self.seed}|{split}|picture {index % self.pictures}")
        tiles = draw(shown, split, self._draw_tiles, _shown_in)
        rng = random.Random(f"{self.name}|{self.seed}|{split}|{index}")
        entries = [
            Entry(
                str(n),
                (" ".join(item), rng.choice(ascii_lowercase[: self.codes])),
                rng.randint(1, self.most),
                tag=tag,
            )
            for n, (tag, item) in enumerate(rng.sample(tiles, rng.randint(*self.visited)), 1)
        ]
        return Puzzle(tuple(entries), tiles=tiles)

    def _prompt(self, puzzle: Puzzle, split: Split, index: int, look: Sequence[str] = ()) -> Prompt:
        asked = " ".join(["look", *look, "?"]) if look else question(puzzle)
        return Prompt(
            id=f"{self.name}/{self.seed}/{split}/{index}{'/look' if look else ''}",
            messages=({"role": "user", "content": f"<image>{asked}"},),
            images=(draw_tagged(puzzle.tiles, self.size, self.cell),),
            answer=None if look else self._answer(puzzle),
            columns={
                "data_source": self.name,
                "split": split,
                "index": index,
                "tiles": [[tag, " ".join(item)] for tag, item in puzzle.tiles],
                "booked": len(puzzle.entries),
                "traps": self._num_traps(puzzle.entries),
            },
        )

    def _shown(self, puzzle: Puzzle, index: int, phase: str, rng: random.Random) -> Demonstration:
        if phase != LOOK:
            return super()._shown(puzzle, index, phase, rng)
        some = rng.sample(puzzle.tiles, min(READ, len(puzzle.tiles)))
        said = "\n".join(f"{tag} {' '.join(item)}" for tag, item in some)
        asked = self._prompt(puzzle, "train", index, look=[tag for tag, _ in some])
        return Demonstration(asked, said)

    def _head(self, entry: Entry, seen: Context) -> list[Slot]:
        item, code = seen
        looked_up = [Slot((word,), "decision") for word in item.split()]
        stated = plain(entry.place, ":", code, str(entry.amount), entry.tag)
        return [*stated, *looked_up, *plain(",")]

    def _see(self, entry: Entry, rng: random.Random) -> Context:
        if rng.random() >= self.misread:
            return entry.context
        item, code = entry.context
        return rng.choice([x for x in self._contexts[0] if x != item]), code

    def _books(self, entry: Entry, puzzle: Puzzle, rng: random.Random) -> bool:
        return True

    def _read_context(self, entry: Entry, words: Sequence[Word]) -> Context:
        written = " ".join(word.text for word in words[6:8])
        return (written if written in self._contexts[0] else entry.context[0]), entry.context[1]


def _shown_in(tiles: Tiles) -> str:
    return "|".join(f"{tag} {' '.join(item)}" for tag, item in tiles)


_VISIT = re.compile(r"(\d+) (\w) (\d+) (\w)")


def question(puzzle: Puzzle) -> str:
    """Write a puzzle as a question."""
    visits = [f"{x.place} {x.context[1]} {x.amount} {x.tag}" for x in puzzle.entries]
    return " ; ".join([*visits, f"{puzzle.asks} ?"])


def _item(words: str) -> Item:
    color, _, shape = words.partition(" ")
    return color, shape


@lru_cache(maxsize=4096)
def draw_tagged(tiles: Tiles, size: int, cell: int) -> bytes:
    """Draw a grid in which every cell has a letter in its upper left corner."""
    return join_tiles((_tagged_tile(tag, item, cell) for tag, item in tiles), size, cell)


@lru_cache(maxsize=1024)
def _tagged_tile(tag: str, item: Item, cell: int) -> Image.Image:
    """Draw a letter and a shape on the letter's own background color."""
    side = cell * SMOOTH
    tile = Image.new("RGB", (side, side), GROUNDS[ascii_uppercase.index(tag)])
    pen = ImageDraw.Draw(tile)
    within = round(PLATE * side)
    plate = Image.new("RGB", (within, within), PAPER)
    draw_shape(ImageDraw.Draw(plate), item[1], COLORS[item[0]], within)
    room = side - within - SMOOTH
    tile.paste(plate, (room, room))
    font = ImageFont.load_default(size=TAG_SIZE * side)
    place = (TAG_AT[0] * side, TAG_AT[1] * side)
    pen.text(place, tag, fill="#000000", font=font, stroke_width=SMOOTH // 2, stroke_fill=PAPER)
    return tile.resize((cell, cell), Image.Resampling.LANCZOS)
