"""What two worlds share: amounts booked one by one, each by a rule that its context decides."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

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
from segcredit_lab.worlds.slots import (
    BOX_CLOSES,
    BOX_OPENS,
    Kind,
    Mark,
    Slot,
    Word,
    differs_at,
    lines_of,
    plain,
)

RULES = {"keep": 1, "twice": 2, "back": -1, "drop": 0, "thrice": 3}
"""What an amount is multiplied by."""

Context = tuple[str, str]
"""What the right rule depends on, and nothing else."""


class Guideline(NamedTuple):
    """What to do in one context, and what is done."""

    right: str
    tempting: str
    """What is done instead."""
    rate: float
    """Share of the demonstrations that are right here."""


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
    """A guideline for each context, drawn once: the right rules are equally frequent."""
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
    """What the rule makes of an amount."""
    return RULES[rule] * amount % modulus


def ambiguous(rules: Sequence[str], most: int, modulus: int) -> tuple[str, str, int] | None:
    """Two rules and an amount of which they make the same, if there are any."""
    for amount in range(1, most + 1):
        made: dict[int, str] = {}
        for rule in rules:
            other = made.setdefault(effect(rule, amount, modulus), rule)
            if other != rule:
                return other, rule, amount
    return None


PASS = "pass"
"""Written where an entry is not to be booked."""
OPENERS = ("so", "now", "next", "then", "well", "here")
VERBS = ("becomes", "gives", "makes", "counts")
SURE, UNSURE = "sure", "hm"
"""What is remarked of a line; the total does not depend on it."""
AUDIT, TOTAL = "audit", "total"
"""What a question asks for: any rules, each with the truth about it, or the right total."""
BOTH = "both"
"""The phase in which half of the demonstrations are of either: what is right is known beside what
is done, and neither is forgotten over the other."""


class Entry(NamedTuple):
    """One amount, and what decides how it is booked."""

    place: str
    """How it is called."""
    context: Context
    amount: int
    owner: str = ""
    """Whose it is; only entries of the one who is asked about are booked."""
    tag: str = ""
    """The letter of its tile, in a world of pictures."""


class Puzzle(NamedTuple):
    """What a prompt asks."""

    entries: tuple[Entry, ...]
    owner: str = ""
    """Whose entries count."""
    asks: str = TOTAL
    tiles: tuple[tuple[str, Item], ...] = ()
    """What a picture shows, in reading order."""


class Booking(NamedTuple):
    """What a line says of its entry."""

    seen: Context
    rule: str
    before: int
    """The total so far."""
    after: int
    remarks: tuple[str, ...] = (SURE, UNSURE)
    """Of these one is made."""
    openers: tuple[str, ...] = ()
    """With one of these the line opens; none: with any."""


@dataclass(frozen=True)
class Bookings(World):
    """Entries booked one after the other, each by a rule that its context decides.

    The rule is a decision; all else in a line follows from it or is style. Which rule is right in
    which context stands nowhere: demonstrations show it, and these are wrong in some contexts more
    often than right ("traps"). One wrong decision spoils the total. It can be seen at once by who
    knows the handbook, so the state of a prefix tells how likely it is to succeed.
    """

    rules: int = 4
    """Ways to book an amount."""
    most: int = 5
    """The largest amount."""
    modulus: int = 19
    """Totals start again at 0 here."""
    traps: float = 0.12
    """Share of the contexts in which demonstrations are mostly wrong."""
    trap_right: float = 0.15
    """Share of right rules in the demonstrations, there."""
    plain_right: float = 0.975
    """Share of right rules in the demonstrations, elsewhere."""
    wrong: float = 0.004
    """Share of the demonstrations' lines with a wrong total."""
    candour: float = 0.98
    """Share of the demonstrations' remarks that are true: "sure" of a line that is right so far,
    "hm" of one that is not. Who predicts them knows the handbook; 0.5: they say nothing."""
    openers: int = 6
    """Words with which a line may open: demonstrations take one of the first half, and once a line
    was doubted ("hm"), one of the others. The total does not depend on them."""
    verbs: int = 4
    """Words for what becomes of an amount: they mean the same."""
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
                f"modulo {self.modulus}, {one!r} and {other!r} make the same of {amount}, so a "
                f"wrong rule would not show. Choose a prime modulus above most ({self.most})."
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
            " ".join(slot.right[0] for slot in self._line(entry, booking, puzzle))
            for entry, booking in zip(puzzle.entries, bookings, strict=True)
        ]
        return response(lines, bookings[-1].after)

    def guideline(self, context: Context) -> Guideline:
        """The right rule, and how often demonstrations follow it."""
        return self._handbook[context]

    def first_error(self, prompt: Prompt, text: str) -> int | None:
        """Where the first wrong word of a response begins; None: there is none so far."""
        found = self.errors(prompt, text)
        return found[0] if found else None

    def errors(self, prompt: Prompt, text: str) -> list[int]:
        """Where each wrong word begins; what follows from an earlier error is not another one.

        A line is read up to its first word that is no decision and cannot be explained.
        """
        puzzle = self.read(prompt)
        total, found = 0, list[int]()
        lines = lines_of(text)
        for entry, words in zip(puzzle.entries, lines, strict=False):
            written = self._read_line(entry, words, total, puzzle)
            right = self._right(entry, total, puzzle)
            own = [slot.kind == "decision" for slot in self._line(entry, written, puzzle)]
            wrong = differs_at(words, self._line(entry, written, puzzle))
            read = words if wrong is None else words[:wrong]
            whole = self._line(entry, right, puzzle)
            for place, word in enumerate(read):
                if own[place] and word.text not in whole[place].right:
                    found.append(word.start)
            if wrong is not None:
                found.append(words[wrong].start)
            total = self._claimed(words, written)
        for words in lines[len(puzzle.entries) :]:
            wrong = differs_at(words, [*plain(BOX_OPENS, str(total), BOX_CLOSES)])
            found += [] if wrong is None else [words[wrong].start]
        return sorted(found)

    def marks(self, text: str) -> list[Mark]:
        """The decisions of a response, and its mere style; no other word serves as either."""
        kinds = self._kinds
        return [
            Mark(kinds[word.text], word.start, word.start + len(word.text))
            for words in lines_of(text)
            for word in words
            if word.text in kinds
        ]

    @abstractmethod
    def read(self, prompt: Prompt) -> Puzzle:
        """The puzzle that a prompt of this world states."""

    @abstractmethod
    def _puzzle(self, split: Split, index: int) -> Puzzle:
        """The puzzle of that number."""

    @abstractmethod
    def _prompt(self, puzzle: Puzzle, split: Split, index: int) -> Prompt: ...

    @abstractmethod
    def _head(self, entry: Entry, seen: Context) -> list[Slot]:
        """How a line begins, its opener left out."""

    @abstractmethod
    def _see(self, entry: Entry, rng: random.Random) -> Context:
        """The context as a demonstration takes it to be."""

    @abstractmethod
    def _books(self, entry: Entry, puzzle: Puzzle, rng: random.Random) -> bool:
        """Whether a demonstration books the entry."""

    @property
    @abstractmethod
    def _contexts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The two parts of contexts, all of each."""

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
        write = self._audit if puzzle.asks == AUDIT else self._attempt
        return Demonstration(self._prompt(puzzle, "train", index), write(puzzle, rng))

    def _audit(self, puzzle: Puzzle, rng: random.Random) -> str:
        """Any rule anywhere, and of each the truth: what is right is known, though not done."""
        total, doubted, lines = 0, False, list[str]()
        for entry in puzzle.entries:
            booking = right = self._right(entry, total, puzzle)
            if right.rule != PASS:
                booking = self._booking(entry, entry.context, rng.choice(self._rules), total)
            booking = self._remarked(booking, booking == right, doubted)
            slots = self._line(entry, booking, puzzle)
            lines.append(" ".join(rng.choice(slot.right) for slot in slots))
            total, doubted = booking.after, doubted or _is_doubted(booking)
        return response(lines, total)

    def _attempt(self, puzzle: Puzzle, rng: random.Random) -> str:
        """The chain as somebody writes it who believes some wrong rules."""
        total, doubted, lines = 0, False, list[str]()
        for entry in puzzle.entries:
            seen, rule = self._see(entry, rng), PASS
            if self._books(entry, puzzle, rng):
                known = self.guideline(seen)
                rule = known.right if rng.random() < known.rate else known.tempting
            booking = self._booking(entry, seen, rule, total)
            well = booking == self._right(entry, total, puzzle)
            true = rng.random() < self.candour
            booking = self._remarked(booking, well == true, doubted)
            if rule != PASS and rng.random() < self.wrong:
                off = rng.randrange(1, self.modulus)
                booking = booking._replace(after=(booking.after + off) % self.modulus)
            slots = self._line(entry, booking, puzzle)
            lines.append(" ".join(rng.choice(slot.right) for slot in slots))
            total, doubted = booking.after, doubted or _is_doubted(booking)
        return response(lines, total)

    def _remarked(self, booking: Booking, sure: bool, doubted: bool) -> Booking:
        """With what is thought of the line, and of those before it."""
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

    def _answer(self, puzzle: Puzzle) -> str:
        return str(self._right_bookings(puzzle)[-1].after)

    def _line(self, entry: Entry, booking: Booking, puzzle: Puzzle) -> list[Slot]:
        """The words of a line, given its decisions."""
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
        """The decisions as written; where none can be read, the right ones."""
        booking = self._right(entry, before, puzzle)
        seen = self._read_context(entry, words)
        known = [*self._rules, PASS]
        place = 1 + len(self._head(entry, seen))
        rule = words[place].text if len(words) > place else ""
        return self._booking(entry, seen, rule if rule in known else booking.rule, before)

    def _read_context(self, entry: Entry, words: Sequence[Word]) -> Context:
        """The context as written; a world in which it is given has nothing to read."""
        return entry.context

    def _claimed(self, words: Sequence[Word], written: Booking) -> int:
        """The total with which the next line should go on."""
        if written.rule != PASS and len(words) > 1 and words[-1].text == ";":
            last = words[-2].text
            if last.isdecimal() and int(last) < self.modulus:
                return int(last)
        return written.after


def response(lines: Sequence[str], total: int) -> str:
    """The whole chain of thought, with the answer in its box."""
    return "\n".join([*lines, f"{BOX_OPENS}{total}{BOX_CLOSES}"])


def _is_doubted(booking: Booking) -> bool:
    """Whether the line says so; one that books nothing has no remark."""
    return booking.rule != PASS and booking.remarks == (UNSURE,)
