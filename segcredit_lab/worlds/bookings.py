"""Common base of the ledger and tile worlds: amounts booked by rules that depend on context.

A response is checked word by word: a line consists of slots, each with the words allowed there.
"""

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal, NamedTuple

from segcredit.data.worlds.base import (
    Demonstration,
    Split,
    World,
    check_phase,
    check_seed,
    check_share,
    check_whole,
)
from segcredit.data.worlds.drawing import Item
from segcredit.types import Prompt

RULES = {"keep": 1, "twice": 2, "back": -1, "drop": 0, "thrice": 3}
"""Factor that each rule multiplies an amount by."""
PASS = "pass"
"""Written for an entry that is not booked."""
OPENERS = ("so", "now", "next", "then", "well", "here")
VERBS = ("becomes", "gives", "makes", "counts")
SURE, UNSURE = "sure", "hm"
"""Remarks on a line; they do not affect the total."""
AUDIT, TOTAL = "audit", "total"
"""Kinds of questions: any rules with true remarks (audit), or the right total."""
BOTH = "both"
"""Warm-start phase with half audits and half attempts, so that neither is forgotten."""

Context = tuple[str, str]
"""The two features of an entry that decide which rule is right."""


class Guideline(NamedTuple):
    """The right rule for one context, and the wrong rule that some demonstrations use."""

    right: str
    tempting: str
    """The rule that wrong demonstrations use."""
    rate: float
    """Share of right demonstrations in this context."""


@lru_cache(maxsize=64)
def handbook(
    seed: str,
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    rules: tuple[str, ...],
    traps: float,
    plain_right: float,
    trap_right: float,
) -> dict[Context, Guideline]:
    """Sample a guideline for each context; all rules are right equally often."""
    rng = random.Random(f"handbook|{seed}")
    contexts = list(product(rows, columns))
    rng.shuffle(contexts)
    number = round(traps * len(contexts))
    made = {}
    for place, context in enumerate(contexts):
        right = rules[place % len(rules)]
        tempting = rng.choice([rule for rule in rules if rule != right])
        made[context] = Guideline(right, tempting, trap_right if place < number else plain_right)
    return made


def effect(rule: str, amount: int, modulus: int) -> int:
    """Apply a rule to an amount."""
    return RULES[rule] * amount % modulus


def ambiguous(rules: Sequence[str], most: int, modulus: int) -> tuple[str, str, int] | None:
    """Find two rules that give the same result for an amount, if there are any."""
    for amount in range(1, most + 1):
        made: dict[int, str] = {}
        for rule in rules:
            other = made.setdefault(effect(rule, amount, modulus), rule)
            if other != rule:
                return other, rule, amount
    return None


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


class Entry(NamedTuple):
    """One amount and the context that decides how it is booked."""

    place: str
    """Its number in the question."""
    context: Context
    amount: int
    owner: str = ""
    """Owner; only entries of the asked owner are booked."""
    tag: str = ""
    """Letter of its tile, in an image world."""


class Puzzle(NamedTuple):
    """Entries and question of one prompt."""

    entries: tuple[Entry, ...]
    owner: str = ""
    """Owner whose entries count."""
    asks: str = TOTAL
    tiles: tuple[tuple[str, Item], ...] = ()
    """Tiles of the image, in reading order."""


class Booking(NamedTuple):
    """Decisions and values written in one line."""

    seen: Context
    rule: str
    before: int
    """Total before this line."""
    after: int
    remarks: tuple[str, ...] = (SURE, UNSURE)
    """Possible remarks, of which one is written."""
    openers: tuple[str, ...] = ()
    """Possible first words; empty: any."""


@dataclass(frozen=True)
class Bookings(World):
    """Entries booked one after the other, each by a rule that its context decides.

    The rule is a decision; everything else in a line follows from it or is style. No prompt states
    which rule is right in a context: demonstrations show it, and in some contexts ("traps") they
    are mostly wrong. One wrong decision makes the total wrong. A model that knows the handbook
    detects it at once, so the state after a prefix predicts success.
    """

    rules: int = 4
    """Number of rules."""
    most: int = 5
    """Largest amount."""
    modulus: int = 19
    """Totals are computed modulo this number."""
    traps: float = 0.12
    """Share of the contexts in which demonstrations are mostly wrong."""
    trap_right: float = 0.15
    """Share of right rules in demonstrations of traps."""
    plain_right: float = 0.975
    """Share of right rules in demonstrations of other contexts."""
    wrong: float = 0.004
    """Share of the demonstrations' lines with a wrong total."""
    candour: float = 0.98
    """Share of true remarks in demonstrations: "sure" for a line that is right so far, "hm" for one
    that is not. Predicting them requires the handbook; at 0.5 they carry no information."""
    openers: int = 6
    """Number of possible first words of a line: demonstrations use the first half, and after a
    doubted line ("hm") the second half. They do not affect the total."""
    verbs: int = 4
    """Number of verbs, which all mean the same."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("rules", self.rules, 2, len(RULES))
        check_whole("most", self.most, 1, 9)
        check_whole("modulus", self.modulus, 5, 97)
        for name in ("traps", "trap_right", "plain_right", "wrong", "candour"):
            check_share(name, getattr(self, name))
        check_whole("openers", self.openers, 1, len(OPENERS))
        check_whole("verbs", self.verbs, 1, len(VERBS))
        check_seed(self.seed)
        if (same := ambiguous(self._rules, self.most, self.modulus)) is not None:
            one, other, amount = same
            raise ValueError(
                f"modulo {self.modulus}, {one!r} and {other!r} give the same result for {amount}, "
                f"so a wrong rule would not show. Choose a prime modulus above most ({self.most})."
            )

    def demonstration(self, index: int, phase: str = "solve") -> Demonstration:
        check_phase(phase, self.phases)
        puzzle = self._puzzle("train", index)
        rng = random.Random(f"{self.name}|{self.seed}|{phase}|{index}")
        return self._shown(puzzle, index, phase, rng)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._prompt(self._puzzle(split, index), split, index)

    def oracle(self, prompt: Prompt) -> str:
        puzzle = self.read(prompt)
        bookings = self._right_bookings(puzzle)
        lines = [
            " ".join(slot.right[0] for slot in self._line(entry, booking))
            for entry, booking in zip(puzzle.entries, bookings, strict=True)
        ]
        return response(lines, bookings[-1].after)

    def guideline(self, context: Context) -> Guideline:
        """Return the right rule, and how often demonstrations follow it."""
        return self._handbook[context]

    def first_error(self, prompt: Prompt, text: str) -> int | None:
        """Find the position of a response's first wrong word; None if there is none."""
        found = self.errors(prompt, text)
        return found[0] if found else None

    def errors(self, prompt: Prompt, text: str) -> list[int]:
        """Find all wrong words, except those that only follow from earlier errors.

        Each line is parsed until a word breaks its format; wrong decisions do not stop the parser.
        """
        puzzle = self.read(prompt)
        total, found = 0, list[int]()
        lines = lines_of(text)
        for entry, words in zip(puzzle.entries, lines, strict=False):
            written = self._read_line(entry, words, total, puzzle)
            own = self._line(entry, written)
            right = self._line(entry, self._right(entry, total, puzzle))
            wrong = differs_at(words, own)
            for word, slot, expected in zip(words[:wrong], own, right, strict=False):
                if slot.kind == "decision" and word.text not in expected.right:
                    found.append(word.start)
            if wrong is not None:
                found.append(words[wrong].start)
            total = self._claimed(words, written)
        for words in lines[len(puzzle.entries) :]:
            wrong = differs_at(words, plain(BOX_OPENS, str(total), BOX_CLOSES))
            found += [] if wrong is None else [words[wrong].start]
        return sorted(found)

    def marks(self, text: str) -> list[Mark]:
        """Mark the decisions and the style words of a response."""
        kinds = self._kinds
        return [
            Mark(kinds[word.text], word.start, word.start + len(word.text))
            for words in lines_of(text)
            for word in words
            if word.text in kinds
        ]

    @abstractmethod
    def read(self, prompt: Prompt) -> Puzzle:
        """Parse the puzzle of a prompt."""

    @abstractmethod
    def _puzzle(self, split: Split, index: int) -> Puzzle:
        """Sample the puzzle of this index."""

    @abstractmethod
    def _prompt(self, puzzle: Puzzle, split: Split, index: int) -> Prompt: ...

    @abstractmethod
    def _head(self, entry: Entry, seen: Context) -> list[Slot]:
        """Start of a line, without its first word."""

    @abstractmethod
    def _see(self, entry: Entry, rng: random.Random) -> Context:
        """Return the context as a demonstration states it, possibly with a perception error."""

    @abstractmethod
    def _books(self, entry: Entry, puzzle: Puzzle, rng: random.Random) -> bool:
        """Whether a demonstration adds the entry to the total, possibly in error."""

    @property
    @abstractmethod
    def _contexts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """All values of the two parts of a context."""

    @cached_property
    def _rules(self) -> tuple[str, ...]:
        return tuple(RULES)[: self.rules]

    @cached_property
    def _handbook(self) -> dict[Context, Guideline]:
        shares = (self.traps, self.plain_right, self.trap_right)
        return handbook(f"{self.name}|{self.seed}", *self._contexts, self._rules, *shares)

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        harmless = (*OPENERS[: self.openers], *VERBS[: self.verbs], SURE, UNSURE)
        style = dict.fromkeys(harmless, "style")
        return style | dict.fromkeys((*self._rules, PASS), "decision")  # type: ignore[return-value]

    def _shown(self, puzzle: Puzzle, index: int, phase: str, rng: random.Random) -> Demonstration:
        if phase == AUDIT or (phase == BOTH and rng.random() < 0.5):
            puzzle = puzzle._replace(asks=AUDIT)
        shown = self._written(puzzle, rng)
        return Demonstration(self._prompt(puzzle, "train", index), shown)

    def _written(self, puzzle: Puzzle, rng: random.Random) -> str:
        """Write a response line by line; each line's first word depends on earlier remarks."""
        decide = self._audited if puzzle.asks == AUDIT else self._attempted
        total, doubted, lines = 0, False, list[str]()
        for entry in puzzle.entries:
            booking, sure = decide(entry, total, puzzle, rng)
            booking = self._remarked(booking, sure, doubted)
            lines.append(" ".join(rng.choice(slot.right) for slot in self._line(entry, booking)))
            total, doubted = booking.after, doubted or _is_doubted(booking)
        return response(lines, total)

    def _audited(
        self, entry: Entry, total: int, puzzle: Puzzle, rng: random.Random
    ) -> tuple[Booking, bool]:
        """Book by a random rule; return the booking and a true remark: whether it is right."""
        booking = right = self._right(entry, total, puzzle)
        if right.rule != PASS:
            booking = self._booking(entry, entry.context, rng.choice(self._rules), total)
        return booking, booking == right

    def _attempted(
        self, entry: Entry, total: int, puzzle: Puzzle, rng: random.Random
    ) -> tuple[Booking, bool]:
        """Book by a wrong rule in most traps; return the booking and whether to remark "sure"."""
        seen, rule = self._see(entry, rng), PASS
        if self._books(entry, puzzle, rng):
            known = self.guideline(seen)
            rule = known.right if rng.random() < known.rate else known.tempting
        booking = self._booking(entry, seen, rule, total)
        well = booking == self._right(entry, total, puzzle)
        true = rng.random() < self.candour
        if rule != PASS and rng.random() < self.wrong:
            off = rng.randrange(1, self.modulus)
            booking = booking._replace(after=(booking.after + off) % self.modulus)
        return booking, well == true

    def _remarked(self, booking: Booking, sure: bool, doubted: bool) -> Booking:
        """Set the remark of a line, and its first word, which depends on earlier remarks "hm"."""
        words = OPENERS[: self.openers]
        half = (len(words) + 1) // 2
        openers = (words[half:] or words) if doubted else words[:half]
        return booking._replace(remarks=(SURE if sure else UNSURE,), openers=openers)

    def _booking(self, entry: Entry, seen: Context, rule: str, before: int) -> Booking:
        added = 0 if rule == PASS else effect(rule, entry.amount, self.modulus)
        return Booking(seen, rule, before, (before + added) % self.modulus)

    def _right(self, entry: Entry, before: int, puzzle: Puzzle) -> Booking:
        rule = self.guideline(entry.context).right if entry.owner == puzzle.owner else PASS
        return self._booking(entry, entry.context, rule, before)

    def _right_bookings(self, puzzle: Puzzle) -> list[Booking]:
        total, made = 0, list[Booking]()
        for entry in puzzle.entries:
            made.append(self._right(entry, total, puzzle))
            total = made[-1].after
        return made

    def _num_traps(self, entries: Sequence[Entry]) -> int:
        return sum(self.guideline(x.context).rate < 0.5 for x in entries)

    def _answer(self, puzzle: Puzzle) -> str:
        return str(self._right_bookings(puzzle)[-1].after)

    def _line(self, entry: Entry, booking: Booking) -> list[Slot]:
        """Return the words of a line, given its decisions."""
        begun = [
            Slot(booking.openers or OPENERS[: self.openers], "style"),
            *self._head(entry, booking.seen),
            Slot((booking.rule,), "decision"),
        ]
        if booking.rule == PASS:
            return [*begun, *plain(";")]
        added = str(effect(booking.rule, entry.amount, self.modulus))
        return [
            *begun,
            *plain(","),
            Slot(booking.remarks, "style"),
            *plain(":", str(entry.amount)),
            Slot(VERBS[: self.verbs], "style"),
            *plain(added, ";", str(booking.before), "+", added, "=", str(booking.after), ";"),
        ]

    def _read_line(
        self, entry: Entry, words: Sequence[Word], before: int, puzzle: Puzzle
    ) -> Booking:
        """Read the decisions of a line; a decision that cannot be read counts as right."""
        booking = self._right(entry, before, puzzle)
        seen = self._read_context(entry, words)
        known = [*self._rules, PASS]
        place = 1 + len(self._head(entry, seen))
        rule = words[place].text if len(words) > place else ""
        return self._booking(entry, seen, rule if rule in known else booking.rule, before)

    def _read_context(self, entry: Entry, words: Sequence[Word]) -> Context:
        """Read the context from a line; here it is given by the prompt."""
        return entry.context

    def _claimed(self, words: Sequence[Word], written: Booking) -> int:
        """Return the total that the next line should continue from."""
        if written.rule != PASS and len(words) > 1 and words[-1].text == ";":
            last = words[-2].text
            if last.isdecimal() and int(last) < self.modulus:
                return int(last)
        return written.after


def response(lines: Sequence[str], total: int) -> str:
    """Join the lines of a response and box the answer."""
    return "\n".join([*lines, f"{BOX_OPENS}{total}{BOX_CLOSES}"])


def _is_doubted(booking: Booking) -> bool:
    """Whether the line has the remark "hm"; a passed line has no remark."""
    return booking.rule != PASS and booking.remarks == (UNSURE,)
