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
        return [self._at(position + i) for i in range(count)]

    def _at(self, place: int) -> Prompt:
        turn, rest = divmod(place, len(self.prompts))
        return self.prompts[self._order(turn)[rest] if self.shuffle else rest]

    def _order(self, turn: int) -> list[int]:
        orders = self.__dict__.setdefault("_orders", {})
        if turn not in orders:
            orders.clear()  # only the present pass is asked for again
            drawn = generator(self.seed, "order", turn)
            orders[turn] = torch.randperm(len(self.prompts), generator=drawn).tolist()
        return orders[turn]


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
