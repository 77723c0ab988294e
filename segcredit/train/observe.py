"""Who watches a run: nobody, or a person at a terminal."""

import warnings
from typing import Protocol, runtime_checkable

from segcredit.config import Recipe
from segcredit.evaluate import Evaluation


@runtime_checkable
class Observer(Protocol):
    """Told of everything worth showing."""

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        """The run starts, or goes on after ``step`` steps."""
        ...

    def stage(self, number: int, name: str, steps: int, done: int) -> None:
        """A stage begins, or goes on."""
        ...

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        """A step was made."""
        ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Held-out prompts were asked."""
        ...

    def note(self, text: str) -> None:
        """Something to read."""
        ...

    def end(self) -> None:
        """Nothing more will come."""
        ...


class Silent:
    """Observer without output; notes become Python warnings."""

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None: ...

    def stage(self, number: int, name: str, steps: int, done: int) -> None: ...

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...

    def note(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    def end(self) -> None: ...
