"""The World protocol, the split of contents into train and test, and checks of settings."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args, runtime_checkable

from segcredit.types import Prompt

if TYPE_CHECKING:
    import transformers

Split = Literal["train", "test"]

TEST_SHARE = 5
"""One in this many contents is held out for testing."""
ATTEMPTS = 1000
"""Maximum number of draws for the wanted split; each succeeds with probability 1/5 or more."""

Content = TypeVar("Content")


@dataclass(frozen=True)
class Demonstration:
    """A prompt and a response to imitate before reinforcement learning begins."""

    prompt: Prompt
    response: str
    """Response without the end token."""


@runtime_checkable
class World(Protocol):
    """A task whose prompts are generated from its settings and a seed."""

    @property
    def name(self) -> str:
        """Name of the world, as in ``WORLDS``."""
        ...

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases of imitation learning in order; the last is the task itself."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """Generate a prompt by number; no content of a test prompt occurs in training."""
        ...

    def demonstration(self, index: int, phase: str = "solve") -> Demonstration:
        """Generate a response to training prompt ``index``, with errors as configured."""
        ...

    def tokenizer(self) -> "transformers.PreTrainedTokenizerFast":
        """Make a tokenizer in which each word of this world is one token."""
        ...

    def oracle(self, prompt: Prompt) -> str:
        """Return a faultless response."""
        ...

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """Generate ``count`` prompts, from number ``start``."""
        check_whole("count", count, 0)
        return [self.prompt(split, index) for index in range(start, start + count)]


def draw(
    rng: random.Random,
    split: Split,
    make: Callable[[random.Random], Content],
    key: Callable[[Content], str],
) -> Content:
    """Draw contents until one belongs to the split.

    The hash of a content determines its split, so the splits are disjoint for all seeds.
    """
    for _ in range(ATTEMPTS):
        made = make(rng)
        if split_of(key(made)) == split:
            return made
    raise ValueError(
        f"no {split} prompt in {ATTEMPTS} draws: the settings allow too few different prompts to "
        f"keep training and test apart. Choose a larger world."
    )


def split_of(content: str) -> Split:
    """Return the split of a content."""
    digest = hashlib.sha256(content.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % TEST_SHARE == 0 else "train"


def check_place(split: str, index: int) -> None:
    """Raise ValueError unless split and index are valid."""
    if split not in get_args(Split):
        raise ValueError(f"split must be 'train' or 'test'; got {split!r}.")
    check_whole("index", index, 0)


def foreign(prompt: Prompt, text: str) -> ValueError:
    """Return the error for a prompt whose text is not of this world."""
    return ValueError(
        f"expected a prompt of this world; got prompt {prompt.id!r}: {text!r}. "
        f"Pass what world.prompt(split, index) returned."
    )


def check_phase(phase: str, phases: tuple[str, ...]) -> None:
    """Raise ValueError unless the world has that phase."""
    if phase not in phases:
        raise ValueError(f"phase must be one of {', '.join(map(repr, phases))}; got {phase!r}.")


def check_whole(name: str, x: int, least: int, most: int | None = None, why: str = "") -> None:
    """Raise ValueError unless x is a whole number in the range."""
    whole = isinstance(x, int) and not isinstance(x, bool)
    if not whole or x < least or (most is not None and x > most):
        expected = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(
            f"{name} must be a whole number, {expected}; got {x!r}.{why and f' {why}'}"
        )


def check_pair(
    name: str, pair: tuple[int, int], least: int, most_allowed: int = 40, limit: str = "40"
) -> None:
    """Raise ValueError unless this is an ordered pair of whole numbers within the limits."""
    whole = isinstance(pair, tuple) and len(pair) == 2
    if not whole or any(isinstance(x, bool) or not isinstance(x, int) for x in pair):
        raise ValueError(
            f"{name} must be a pair of whole numbers (minimum, maximum); got {pair!r}. "
            f"For exactly 3 pass (3, 3)."
        )
    fewest, most = pair
    if not least <= fewest <= most <= most_allowed:
        raise ValueError(f"{name} must satisfy {least} ≤ minimum ≤ maximum ≤ {limit}; got {pair}.")


def check_share(name: str, x: float) -> None:
    """Raise ValueError unless 0 ≤ x ≤ 1."""
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= 1:
        raise ValueError(f"{name} must be a share between 0 and 1; got {x!r}. For 4 % pass 0.04.")


def check_flag(name: str, x: bool) -> None:
    """Raise ValueError unless x is True or False."""
    if not isinstance(x, bool):
        raise ValueError(f"{name} must be true or false; got {x!r}.")


def check_seed(seed: int) -> None:
    """Raise ValueError unless the seed is a whole number, which may be negative."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number; got {seed!r}.")
