"""Text world: book the entries of a ledger by unstated rules; long responses with traps."""

import random
import re
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, ClassVar

from segcredit.data.worlds.base import (
    Split,
    check_pair,
    check_place,
    check_share,
    check_whole,
    draw,
    foreign,
)
from segcredit.types import Prompt
from segcredit_lab.worlds.bookings import (
    AUDIT,
    BOTH,
    OPENERS,
    PASS,
    SURE,
    TOTAL,
    UNSURE,
    VERBS,
    Bookings,
    Context,
    Entry,
    Puzzle,
    Slot,
    plain,
)

if TYPE_CHECKING:
    import transformers


OWNERS = ("ann", "bob", "cleo")


@dataclass(frozen=True)
class Ledger(Bookings):
    r"""Questions such as "1 c M 5 bob ; 2 a K 3 ann ; total bob ?": add up one owner's amounts.

    A response goes through the entries, one per line, books those of the asked owner by the rule
    for their kind (c) and region (M), and boxes the total, modulo a number::

        so 1 : c M 5 bob , twice , sure : 5 becomes 10 ; 0 + 10 = 10 ;
        now 2 : a K 3 ann , pass ;
        \boxed{10}

    A booked line has 23 tokens, a passed one 11, the box 3.
    """

    name: ClassVar[str] = "ledger"
    phases: ClassVar[tuple[str, ...]] = (AUDIT, BOTH, "solve")
    """Phases of the warm start: audits ("audit bob ?") with random rules, both, and attempts."""

    booked: tuple[int, int] = (7, 9)
    """Minimum and maximum entries of the asked owner: the decisions that matter."""
    foreign: tuple[int, int] = (2, 4)
    """Minimum and maximum entries of other owners: distractors."""
    kinds: int = 12
    regions: int = 12
    """Kinds × regions is the number of contexts; more contexts take longer to learn."""
    stray: float = 0.01
    """Share of other owners' entries that demonstrations book."""
    skipped: float = 0.004
    """Share of the asked owner's entries that demonstrations pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pair("booked", self.booked, 1)
        check_pair("foreign", self.foreign, 0)
        check_whole("kinds", self.kinds, 1, len(ascii_lowercase))
        check_whole("regions", self.regions, 1, len(ascii_uppercase))
        check_share("stray", self.stray)
        check_share("skipped", self.skipped)

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        from segcredit.data.worlds.tokens import build_tokenizer

        numbers = [str(n) for n in range(max(self.modulus, self._longest + 1))]
        signs = [":", ",", ";", "+", "="]
        style = [*OPENERS[: self.openers], *VERBS[: self.verbs], SURE, UNSURE]
        words = [*style, *self._rules, PASS, TOTAL, AUDIT]
        kinds, regions = self._contexts
        spaced = [*kinds, *regions, *OWNERS, *words, *signs, *numbers]
        # tokens include the space after them, except numbers in the box and ";" at a line's end
        return build_tokenizer([*(f"{x} " for x in spaced), *numbers, ";", "?"])

    def read(self, prompt: Prompt) -> Puzzle:
        text = prompt.messages[-1]["content"]
        *stated, last = text.split(" ; ")
        asked = re.fullmatch(rf"({TOTAL}|{AUDIT}) (\w+) \?", last)
        entries = [found.groups() for x in stated if (found := _ENTRY.fullmatch(x))]
        if asked is None or not entries or len(entries) != len(stated):
            raise foreign(prompt, text)
        made = [Entry(n, (kind, region), int(x), whose) for n, kind, region, x, whose in entries]
        return Puzzle(tuple(made), asked[2], asked[1])

    @property
    def _longest(self) -> int:
        return self.booked[1] + self.foreign[1]

    @cached_property
    def _contexts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(ascii_lowercase[: self.kinds]), tuple(ascii_uppercase[: self.regions])

    def _puzzle(self, split: Split, index: int) -> Puzzle:
        check_place(split, index)
        rng = random.Random(f"{self.name}|{self.seed}|{split}|{index}")
        return draw(rng, split, self._draw_puzzle, question)

    def _draw_puzzle(self, rng: random.Random) -> Puzzle:
        kinds, regions = self._contexts
        asked = rng.choice(OWNERS)
        owners = [asked] * rng.randint(*self.booked)
        others = [x for x in OWNERS if x != asked]
        owners += [rng.choice(others) for _ in range(rng.randint(*self.foreign))]
        rng.shuffle(owners)
        entries = [
            Entry(
                str(n), (rng.choice(kinds), rng.choice(regions)), rng.randint(1, self.most), owner
            )
            for n, owner in enumerate(owners, 1)
        ]
        return Puzzle(tuple(entries), asked)

    def _prompt(self, puzzle: Puzzle, split: Split, index: int) -> Prompt:
        own = [x for x in puzzle.entries if x.owner == puzzle.owner]
        return Prompt(
            id=f"{self.name}/{self.seed}/{split}/{index}",
            messages=({"role": "user", "content": question(puzzle)},),
            answer=self._answer(puzzle),
            columns={
                "data_source": self.name,
                "split": split,
                "index": index,
                "booked": len(own),
                "traps": self._num_traps(own),
            },
        )

    def _head(self, entry: Entry, seen: Context) -> list[Slot]:
        kind, region = seen
        return plain(entry.place, ":", kind, region, str(entry.amount), entry.owner, ",")

    def _see(self, entry: Entry, rng: random.Random) -> Context:
        return entry.context

    def _books(self, entry: Entry, puzzle: Puzzle, rng: random.Random) -> bool:
        if entry.owner == puzzle.owner:
            return rng.random() >= self.skipped
        return rng.random() < self.stray


_ENTRY = re.compile(r"(\d+) (\w) (\w) (\d+) (\w+)")


def question(puzzle: Puzzle) -> str:
    """Write a puzzle as a question."""
    entries = [f"{x.place} {' '.join(x.context)} {x.amount} {x.owner}" for x in puzzle.entries]
    return " ; ".join([*entries, f"{puzzle.asks} {puzzle.owner} ?"])
