"""World of colored shapes in an image: a vision-language task for tiny models on a laptop."""

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import isqrt
from operator import mul
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from segcredit.data.worlds.base import (
    Demonstration,
    Split,
    World,
    check_flag,
    check_phase,
    check_place,
    check_seed,
    check_share,
    check_whole,
    draw,
    foreign,
)
from segcredit.data.worlds.drawing import COLORS, SHAPES, Item, draw_grid
from segcredit.types import Prompt

if TYPE_CHECKING:
    import transformers

OPERATIONS = ("plus", "minus", "times")
MOST = 4
"""Maximum number of shapes of one kind in a question."""
FEWEST_ANSWERS = 5
"""Minimum number of possible answers. All are equally likely, so a guess scores 1/5 at most."""
EMPTY = 0.25
"""Probability that a cell that is not asked for stays empty."""


class CountTerm(NamedTuple):
    """One summand of a question."""

    operation: str
    """Operation that joins it to the value so far; "plus" for the first."""
    factor: int
    """2 for "twice", else 1."""
    item: Item


class Numbers(NamedTuple):
    """Operations, factors and counts of a question; they are chosen before the shapes."""

    operations: tuple[str, ...]
    factors: tuple[int, ...]
    counts: tuple[int, ...]


class Scene(NamedTuple):
    """An image and a question about it."""

    cells: tuple[Item | None, ...]
    terms: tuple[CountTerm, ...]


@dataclass(frozen=True)
class ShapeGrid(World):
    r"""Questions such as "count twice red circle plus blue square ?" about a grid of shapes.

    A response handles one term per line, in one of two styles, from left to right::

        glance twice red circle = 4
        check blue square 1 0 2 = 3
        total = 7
        \boxed{7}

    "glance" is short, and off by one in a share of the demonstrations; "check" counts row by row
    (in steps of two for "twice") and is correct. So imitation alone gives moderate accuracy, and
    reinforcement learning can replace glances by checks. No image of the test split occurs in
    training.
    """

    name: ClassVar[str] = "shape_grid"
    phases: ClassVar[tuple[str, ...]] = ("look", "solve")
    """The phase "look" lists the counts of all kinds; without it a tiny model stays at chance."""

    size: int = 3
    """Number of cells per side."""
    colors: int = 3
    shapes: int = 3
    terms: int = 2
    operations: tuple[str, ...] = ("plus",)
    twice: bool = True
    """Whether terms may be doubled."""
    cell: int = 28
    """Pixels per side of a cell: one image token is 28 for Qwen2.5-VL, 32 for Qwen3-VL."""
    glance_error: float = 0.5
    """Share of glances in demonstrations that are wrong."""
    careful: float = 0.5
    """Share of terms in demonstrations that are checked row by row."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("size", self.size, 2, 8)
        check_whole("colors", self.colors, 1, len(COLORS))
        check_whole("shapes", self.shapes, 1, len(SHAPES))
        check_whole("terms", self.terms, 1, 3)
        check_whole("cell", self.cell, 8, 256, "Qwen2.5-VL reads 28 pixels per token, Qwen3-VL 32.")
        check_flag("twice", self.twice)
        check_share("glance_error", self.glance_error)
        check_share("careful", self.careful)
        check_seed(self.seed)
        _check_operations(self.operations)
        if self.colors * self.shapes < self.terms:
            raise ValueError(
                f"each term asks about a different kind, so {self.terms} terms need at least "
                f"{self.terms} kinds (colors × shapes); got {self.colors} × {self.shapes}."
            )
        if len(self._by_answer) < FEWEST_ANSWERS:
            raise ValueError(
                f"these settings leave {len(self._by_answer)} possible answers, too easy to guess; "
                f"at least {FEWEST_ANSWERS} are needed. Set twice=True or a larger size."
            )

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._prompt(self._scene(split, index), split, index, "solve")

    def demonstration(self, index: int, phase: str = "solve") -> Demonstration:
        check_phase(phase, self.phases)
        scene = self._scene("train", index)
        rng = random.Random(f"{self.name}|{self.seed}|{phase}|{index}")
        shown = listing(scene.cells, rng) if phase == "look" else self._attempt(scene, rng)
        return Demonstration(self._prompt(scene, "train", index, phase), shown)

    def oracle(self, prompt: Prompt) -> str:
        scene = read_scene(prompt)
        return response([check_line(x, scene.cells) for x in scene.terms], right_answer(scene))

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        from segcredit.data.worlds.tokens import build_tokenizer

        numbers = [str(n) for n in range(max(self._largest, self.size**2) + 1)]
        kinds = [*list(COLORS)[: self.colors], *SHAPES[: self.shapes]]
        plain = ["count", "list", "twice", *OPERATIONS, *kinds, "glance", "check", "total", "="]
        # tokens include the space after them, except a number in the box or at a line's end
        return build_tokenizer([*(f"{x} " for x in [*plain, *numbers]), *numbers, "?", "none"])

    @property
    def _most(self) -> int:
        """Maximum count of one kind that leaves cells for the other terms."""
        return min(MOST, self.size**2 // self.terms)

    @property
    def _largest(self) -> int:
        """Largest total that a demonstration can write: every count is one too high."""
        return 2 * self.terms * (self._most + 1)

    @property
    def _by_answer(self) -> dict[int, list[Numbers]]:
        return numbers_by_answer(self._most, self.terms, self.operations, self.twice, self._largest)

    def _scene(self, split: Split, index: int) -> Scene:
        check_place(split, index)
        rng = random.Random(f"{self.name}|{self.seed}|{split}|{index}")
        return draw(rng, split, self._draw_scene, lambda scene: "|".join(names(scene.cells)))

    def _draw_scene(self, rng: random.Random) -> Scene:
        """Draw the answer, then numbers that lead to it, then an image with those counts."""
        by_answer = self._by_answer
        numbers = rng.choice(by_answer[rng.choice(list(by_answer))])
        items = list(product(list(COLORS)[: self.colors], SHAPES[: self.shapes]))
        rng.shuffle(items)
        asked, others = items[: self.terms], items[self.terms :]
        cells: list[Item | None] = []
        for item, count in zip(asked, numbers.counts, strict=True):
            cells += [item] * count
        while len(cells) < self.size**2:
            cells.append(rng.choice(others) if others and rng.random() >= EMPTY else None)
        rng.shuffle(cells)
        terms = map(CountTerm, numbers.operations, numbers.factors, asked)
        return Scene(tuple(cells), tuple(terms))

    def _prompt(self, scene: Scene, split: Split, index: int, phase: str) -> Prompt:
        look = phase == "look"
        asked = "list ?" if look else question(scene.terms)
        return Prompt(
            id=f"{self.name}/{self.seed}/{split}/{index}{'/look' if look else ''}",
            messages=({"role": "user", "content": f"<image>{asked}"},),
            images=(draw_grid(scene.cells, self.size, self.cell),),
            answer=None if look else str(right_answer(scene)),
            columns={
                "data_source": self.name,
                "split": split,
                "index": index,
                "cells": names(scene.cells),
            },
        )

    def _attempt(self, scene: Scene, rng: random.Random) -> str:
        """Write each term in a random style with random errors; the total is the sum of the lines.

        The total is clamped to the range of the vocabulary.
        """
        lines, values = [], []
        for term in scene.terms:
            count = scene.cells.count(term.item)
            if rng.random() < self.careful:
                lines.append(check_line(term, scene.cells))
            else:
                if rng.random() < self.glance_error:
                    count += rng.choice((-1, 1)) if count else 1
                lines.append(glance_line(term, count))
            values.append(term.factor * count)
        total = combine([term.operation for term in scene.terms], values)
        return response(lines, min(max(total, 0), self._largest))


@lru_cache(maxsize=64)
def numbers_by_answer(
    most: int, terms: int, operations: tuple[str, ...], twice: bool, largest: int
) -> dict[int, list[Numbers]]:
    """Return all choices of numbers whose answer is between 0 and ``largest``, by answer."""
    found: dict[int, list[Numbers]] = defaultdict(list)
    joined = [("plus", *later) for later in product(operations, repeat=terms - 1)]
    factors = list(product((1, 2) if twice else (1,), repeat=terms))
    counts = list(product(range(most + 1), repeat=terms))
    for numbers in map(Numbers._make, product(joined, factors, counts)):
        answer = combine(numbers.operations, list(map(mul, numbers.factors, numbers.counts)))
        if 0 <= answer <= largest:
            found[answer].append(numbers)
    return {answer: found[answer] for answer in sorted(found)}


def combine(operations: Sequence[str], values: Sequence[int]) -> int:
    """Compute the value of a question from left to right."""
    total = 0
    for operation, value in zip(operations, values, strict=True):
        if operation == "times":
            total *= value
        else:
            total += value if operation == "plus" else -value
    return total


def right_answer(scene: Scene) -> int:
    """Compute the answer from the image's cells."""
    values = [term.factor * scene.cells.count(term.item) for term in scene.terms]
    return combine([term.operation for term in scene.terms], values)


def names(cells: Sequence[Item | None]) -> tuple[str, ...]:
    """Describe each cell in words; an empty cell is ''."""
    return tuple("" if item is None else " ".join(item) for item in cells)


def _phrase(term: CountTerm) -> str:
    return ("twice " if term.factor == 2 else "") + " ".join(term.item)


def question(terms: Sequence[CountTerm]) -> str:
    """Write the question."""
    first, *later = terms
    return " ".join(["count", _phrase(first), *(f"{x.operation} {_phrase(x)}" for x in later), "?"])


def glance_line(term: CountTerm, count: int) -> str:
    """Write a count without showing how it was obtained."""
    return f"glance {_phrase(term)} = {term.factor * count}"


def check_line(term: CountTerm, cells: Sequence[Item | None]) -> str:
    """Write the count of each row of the image, then the sum."""
    side = isqrt(len(cells))
    rows = [
        term.factor * cells[first : first + side].count(term.item)
        for first in range(0, len(cells), side)
    ]
    return f"check {_phrase(term)} {' '.join(map(str, rows))} = {sum(rows)}"


def response(lines: Sequence[str], total: int) -> str:
    """Write the response: its lines, the total and the boxed answer."""
    return "\n".join([*lines, f"total = {total}", f"\\boxed{{{total}}}"])


def listing(cells: Sequence[Item | None], rng: random.Random) -> str:
    """Write all kinds in the image with their counts, in random order."""
    kinds = sorted({item for item in cells if item is not None})
    rng.shuffle(kinds)
    return "\n".join(f"{' '.join(item)} = {cells.count(item)}" for item in kinds) or "none"


_TERM = re.compile(r"(?:(plus|minus|times) )?(twice )?(\w+) (\w+)")


def read_scene(prompt: Prompt) -> Scene:
    """Recover the scene from a prompt of this world."""
    text = prompt.messages[-1]["content"].removeprefix("<image>")
    if "cells" not in prompt.columns or not re.fullmatch(rf"count {_TERM.pattern}.* \?", text):
        raise foreign(prompt, text)
    terms = [
        CountTerm(operation or "plus", 2 if twice else 1, (color, shape))
        for operation, twice, color, shape in _TERM.findall(text.removeprefix("count "))
    ]
    cells: list[Item | None] = []
    for words in prompt.columns["cells"]:
        color, _, shape = words.partition(" ")
        cells.append((color, shape) if words else None)
    return Scene(tuple(cells), tuple(terms))


def _check_operations(operations: tuple[str, ...]) -> None:
    known = ", ".join(map(repr, OPERATIONS))
    whole = isinstance(operations, tuple) and len(operations) == len(set(map(str, operations)))
    if not whole or not operations or any(x not in OPERATIONS for x in operations):
        raise ValueError(
            f"operations must be one or more of {known}, each once, as a tuple; got {operations!r}."
        )
