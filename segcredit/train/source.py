"""Where prompts come from: a position in, prompts out, so that resuming needs one number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from segcredit.data.worlds import World
from segcredit.train.seeds import generator
from segcredit.types import Prompt


@runtime_checkable
class PromptSource(Protocol):
    """An endless sequence of prompts."""

    @property
    def size(self) -> int | None:
        """How many different prompts there are; None: no end."""
        ...

    def take(self, position: int, count: int) -> list[Prompt]:
        """The prompts at position … position + count − 1 of the sequence."""
        ...


@dataclass(frozen=True)
class Listed:
    """A list of prompts, shuffled anew in every pass."""

    prompts: Sequence[Prompt]
    seed: int = 0
    shuffle: bool = True

    @property
    def size(self) -> int:
        return len(self.prompts)

    def take(self, position: int, count: int) -> list[Prompt]:
        """Return the prompts of one step; all are distinct if the data has enough.

        Every step has ``count`` prompts, so ``position`` determines the step in which a pass over
        the data ends. The next pass begins with prompts that this step does not contain yet.
        """
        size = len(self.prompts)
        places = [divmod(position + i, size) for i in range(count)]
        if not self.shuffle:
            return [self.prompts[rest] for _, rest in places]
        orders = {turn: self._order(turn, count, position % count) for turn, _ in places}
        return [self.prompts[orders[turn][rest]] for turn, rest in places]

    def _order(self, turn: int, count: int, start: int) -> list[int]:
        """Compute the order of one pass, which depends on all earlier passes."""
        size = len(self.prompts)
        kept = self.__dict__.setdefault("_orders", {})
        known = [x for x in kept if x[1:] == (count, start) and x[0] <= turn]
        last = max(known, default=(-1, count, start))
        order: list[int] = kept.get(last, [])
        for number in range(last[0] + 1, turn + 1):
            drawn = generator(self.seed, "order", number)
            shuffled = torch.randperm(size, generator=drawn).tolist()
            before = (
                number * size - start
            ) % count  # prompts that the step already has when a pass ends
            taken = set(order[-before:]) if number and before and count <= size else set()
            first = [x for x in shuffled if x not in taken][: count - before]
            later = set(shuffled).difference(first)
            order = first + [x for x in shuffled if x in later]
        for old in [x for x in kept if x[1:] != (count, start) or x[0] < turn - 1]:
            del kept[old]  # only the current and the next pass are needed again
        kept[turn, count, start] = order
        return order


@dataclass(frozen=True)
class Generated:
    """A world's prompts, never the same twice."""

    world: World
    split: Literal["train", "test"]

    @property
    def size(self) -> None:
        return None

    def take(self, position: int, count: int) -> list[Prompt]:
        return self.world.prompts(self.split, position, count)
