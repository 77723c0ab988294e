"""A run's progress as events."""

from collections.abc import Callable

from segcredit.config import Recipe
from segcredit.evaluate import Evaluation


class Telling:
    """Watches a run, and tells how far it is."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell
        self._total = 0

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        self._total = recipe.total_steps
        self._tell("step", step=step, total=self._total)

    def stage(self, number: int, name: str, steps: int, done: int) -> None: ...

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        self._tell("step", step=step, total=self._total)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self._tell("evaluated", step=step, accuracy=evaluation.sampled, reward=evaluation.reward)

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...
