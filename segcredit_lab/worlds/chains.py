"""World of variables derived from others, modulo a number: long chains of small steps."""

import operator
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from segcredit.data.worlds.base import (
    Demonstration,
    Split,
    World,
    check_flag,
    check_pair,
    check_phase,
    check_place,
    check_seed,
    check_share,
    check_whole,
    draw,
    foreign,
)
from segcredit.types import Prompt

if TYPE_CHECKING:
    import transformers

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Rule(NamedTuple):
    """Rule that derives a variable, e.g. x = a + b."""

    name: str
    left: str
    operation: str
    right: str


class Puzzle(NamedTuple):
    """Given values, rules and asked variable of one prompt."""

    given: dict[str, int]
    rules: tuple[Rule, ...]
    """Rules in the order of the prompt."""
    asked: str


@dataclass(frozen=True)
class DerivedVariables(World):
    r"""Questions such as "a = 5 ; b = 9 ; x = a + b ; y = x * a ; x ?", modulo a number.

    A response derives the needed variables, one per line, then boxes the answer::

        x = a + b = 5 + 9 > x 14 ;
        \boxed{14}

    Demonstrations have faults: wrong results (which later lines then use), skipped lines, lazy
    lines without the numbers ("x = a + b > x 14 ;"), and superfluous lines. A line has 14 tokens
    and the box 3, so a faultless chain has 115 to 171 by default, 17 or 31 with ``given=2,
    derived=3, needed=(1, 2), modulus=7``, and 283 to 395 with ``derived=40, needed=(20, 28)``. No
    test puzzle is a training puzzle with other letters.
    """

    name: ClassVar[str] = "derived_variables"
    phases: ClassVar[tuple[str, ...]] = ("solve",)

    given: int = 4
    """Number of variables whose value is given."""
    derived: int = 16
    """Number of variables computed from two others, needed or not."""
    needed: tuple[int, int] = (8, 12)
    """Minimum and maximum number of derivations for the answer, including the last."""
    modulus: int = 23
    operations: str = "+-*"
    shuffled: bool = False
    """Whether a rule may precede the rules it depends on."""
    wrong: float = 0.04
    """Share of lines in demonstrations with a wrong result."""
    skipped: float = 0.02
    """Share of needed lines in demonstrations, except the last, that are missing."""
    lazy: float = 0.05
    """Share of lines in demonstrations that omit the numbers."""
    superfluous: float = 0.03
    """Probability of a superfluous line before each needed one."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("given", self.given, 2, 26)
        check_whole("derived", self.derived, 1, len(ascii_letters) - self.given)
        check_whole("modulus", self.modulus, 2, 1000)
        check_flag("shuffled", self.shuffled)
        for name in ("wrong", "skipped", "lazy", "superfluous"):
            check_share(name, getattr(self, name))
        check_seed(self.seed)
        check_pair("needed", self.needed, 1, self.derived, f"derived ({self.derived})")
        _check_operations(self.operations)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._prompt(self._puzzle(split, index), split, index)

    def _prompt(self, puzzle: Puzzle, split: Split, index: int) -> Prompt:
        return Prompt(
            id=f"{self.name}/{self.seed}/{split}/{index}",
            messages=({"role": "user", "content": question(puzzle)},),
            answer=str(solve(puzzle, self.modulus)[puzzle.asked]),
            columns={
                "data_source": self.name,
                "split": split,
                "index": index,
                "needed": len(needed_rules(puzzle)),
            },
        )

    def demonstration(self, index: int, phase: str = "solve") -> Demonstration:
        check_phase(phase, self.phases)
        puzzle = self._puzzle("train", index)
        rng = random.Random(f"{self.name}|{self.seed}|{phase}|{index}")
        return Demonstration(self._prompt(puzzle, "train", index), self._attempt(puzzle, rng))

    def oracle(self, prompt: Prompt) -> str:
        puzzle = read_puzzle(prompt)
        values = solve(puzzle, self.modulus)
        return response([line(rule, values) for rule in needed_rules(puzzle)], values[puzzle.asked])

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        from segcredit.data.worlds.tokens import build_tokenizer

        numbers = [str(n) for n in range(self.modulus)]
        plain = [*self._letters, *OPERATIONS, "=", ">", ";", *numbers]
        # tokens include the space after them, except a number in the box and ";" at a line's end
        return build_tokenizer([*(f"{x} " for x in plain), *numbers, ";", "?"])

    @property
    def _letters(self) -> str:
        """Variable names; only as many as needed, so that a tiny model sees each name often."""
        return ascii_letters[: self.given + self.derived]

    def _puzzle(self, split: Split, index: int) -> Puzzle:
        check_place(split, index)
        rng = random.Random(f"{self.name}|{self.seed}|{split}|{index}")
        plain = draw(rng, split, self._draw_puzzle, question)
        letters = rng.sample(self._letters, self.given + self.derived)
        return renamed(plain, {str(n): letter for n, letter in enumerate(letters)})

    def _draw_puzzle(self, rng: random.Random) -> Puzzle:
        """Draw a puzzle with variables named 0, 1, 2, … in the order of the prompt."""
        given = [f"given {n}" for n in range(self.given)]
        number = rng.randint(*self.needed)
        is_needed = [True] * number + [False] * (self.derived - number)
        rng.shuffle(is_needed)
        rules: list[Rule] = []
        useful, unused = list(given), list[str]()
        for n, needed in enumerate(is_needed):
            if needed:
                # a line can use two unused results and adds one; one must be left at the end
                number -= 1
                must = min(2, max(0, len(unused) - number))
                first = rng.sample(unused, must)
                operands = first + rng.sample([x for x in useful if x not in first], 2 - must)
                unused = [x for x in unused if x not in operands] + [f"derived {n}"]
                useful.append(f"derived {n}")
            else:
                operands = rng.sample([*given, *(rule.name for rule in rules)], 2)
            rng.shuffle(operands)
            left, right = operands
            rules.append(Rule(f"derived {n}", left, rng.choice(self.operations), right))
        if self.shuffled:
            rng.shuffle(rules)
        values = {name: rng.randrange(1, self.modulus) for name in given}
        order = [*given, *(rule.name for rule in rules)]
        puzzle = Puzzle(values, tuple(rules), asked=unused[0])
        return renamed(puzzle, {name: str(n) for n, name in enumerate(order)})

    def _attempt(self, puzzle: Puzzle, rng: random.Random) -> str:
        """Write a chain with random mistakes; later lines use the values written before."""
        steps = needed_rules(puzzle)
        others = [rule for rule in in_order(puzzle) if rule not in steps]
        claimed, written, lines = dict(puzzle.given), set(puzzle.given), list[str]()
        for rule in steps:
            if rng.random() < self.superfluous:
                ready = [
                    x for x in others if x.name not in written and {x.left, x.right} <= written
                ]
                if ready:
                    self._write(rng.choice(ready), rng, claimed, written, lines)
            if rule.name != puzzle.asked and rng.random() < self.skipped:
                claimed[rule.name] = compute(rule, claimed, self.modulus)
            else:
                self._write(rule, rng, claimed, written, lines)
        return response(lines, claimed[puzzle.asked])

    def _write(
        self,
        rule: Rule,
        rng: random.Random,
        claimed: dict[str, int],
        written: set[str],
        lines: list[str],
    ) -> None:
        """Write one line, correct or not."""
        claimed[rule.name] = compute(rule, claimed, self.modulus)
        if rng.random() < self.wrong:
            claimed[rule.name] += rng.randrange(1, self.modulus)
            claimed[rule.name] %= self.modulus
        written.add(rule.name)
        lines.append(line(rule, claimed, lazy=rng.random() < self.lazy))


def compute(rule: Rule, values: dict[str, int], modulus: int) -> int:
    """Compute the result of a rule."""
    return OPERATIONS[rule.operation](values[rule.left], values[rule.right]) % modulus


def in_order(puzzle: Puzzle) -> list[Rule]:
    """Sort the rules so that each follows those it depends on."""
    waiting, known, order = list(puzzle.rules), set(puzzle.given), list[Rule]()
    while waiting:
        ready = next(rule for rule in waiting if {rule.left, rule.right} <= known)
        waiting.remove(ready)
        known.add(ready.name)
        order.append(ready)
    return order


def needed_rules(puzzle: Puzzle) -> list[Rule]:
    """Return the rules that the answer depends on, in order of derivation."""
    needed, steps = {puzzle.asked}, list[Rule]()
    for rule in reversed(in_order(puzzle)):
        if rule.name in needed:
            needed |= {rule.left, rule.right}
            steps.append(rule)
    return steps[::-1]


def solve(puzzle: Puzzle, modulus: int) -> dict[str, int]:
    """Compute the values of all variables."""
    values = dict(puzzle.given)
    for rule in in_order(puzzle):
        values[rule.name] = compute(rule, values, modulus)
    return values


def renamed(puzzle: Puzzle, names: dict[str, str]) -> Puzzle:
    """Rename the variables of a puzzle."""
    return Puzzle(
        {names[name]: value for name, value in puzzle.given.items()},
        tuple(
            Rule(names[x.name], names[x.left], x.operation, names[x.right]) for x in puzzle.rules
        ),
        names[puzzle.asked],
    )


def question(puzzle: Puzzle) -> str:
    """Write the puzzle as the text of a prompt."""
    given = [f"{name} = {value}" for name, value in puzzle.given.items()]
    rules = [f"{x.name} = {x.left} {x.operation} {x.right}" for x in puzzle.rules]
    return " ; ".join([*given, *rules, f"{puzzle.asked} ?"])


def line(rule: Rule, values: dict[str, int], lazy: bool = False) -> str:
    """Write one step: the rule, its numbers, the result."""
    name, left, sign, right = rule
    numbers = "" if lazy else f"= {values[left]} {sign} {values[right]} "
    return f"{name} = {left} {sign} {right} {numbers}> {name} {values[name]} ;"


def response(lines: Sequence[str], answer: int) -> str:
    """Write the response: its lines and the boxed answer."""
    return "\n".join([*lines, f"\\boxed{{{answer}}}"])


_GIVEN = re.compile(r"(\w) = (\d+)")
_RULE = re.compile(r"(\w) = (\w) ([-+*]) (\w)")
_ASKED = re.compile(r"(\w) \?")


def read_puzzle(prompt: Prompt) -> Puzzle:
    """Parse the puzzle from a prompt of this world."""
    text = prompt.messages[-1]["content"]
    *stated, last = text.split(" ; ")
    given = [found.groups() for x in stated if (found := _GIVEN.fullmatch(x))]
    rules = [Rule(*found.groups()) for x in stated if (found := _RULE.fullmatch(x))]
    asked = _ASKED.fullmatch(last)
    if asked is None or not rules or len(given) + len(rules) != len(stated):
        raise foreign(prompt, text)
    return Puzzle({name: int(value) for name, value in given}, tuple(rules), asked[1])


def _check_operations(operations: str) -> None:
    known = "".join(OPERATIONS)
    letters = list(operations) if isinstance(operations, str) else []
    if not letters or len(set(letters)) < len(letters) or not set(letters) <= set(known):
        raise ValueError(
            f"operations must be one or more of the signs {known}, each once, as in '+-'; "
            f"got {operations!r}."
        )
