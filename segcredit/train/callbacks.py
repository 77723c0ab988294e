"""Callbacks: your own code at the events of a run, and a way to stop it."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcredit.config import Recipe
from segcredit.evaluate import Evaluation
from segcredit.printable import printable
from segcredit.train.loop import Observer

if TYPE_CHECKING:
    from segcredit.train.trainer import Result


class Callback:
    """Base class of callbacks: override the hooks you need.

    Hooks run in the training process, between steps, on rank 0 only. ``self.stop()`` in any hook
    ends training after the current step; the checkpoint of that step is saved, so the run can be
    resumed. If a hook raises an exception, the run is saved and stopped in the same way.
    """

    stop_reason: str | None = None
    """Why this callback asked to stop; None: it did not."""

    def stop(self, reason: str = "a callback asked to stop") -> None:
        """Stop training after the current step and save a checkpoint."""
        self.stop_reason = reason

    def on_train_begin(self, folder: Path, step: int) -> None:
        """Called before the first step; ``step`` is 0, or the step of the resumed checkpoint."""

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        """Called after each step of any stage, with the metrics of metrics.jsonl."""

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Called after each evaluation on held-out prompts."""

    def on_save(self, step: int, path: Path) -> None:
        """Called after each checkpoint; ``path/policy`` is a Hugging Face folder."""

    def on_train_end(self, result: "Result") -> None:
        """Called with the result, after the report was written."""


class CallbackError(RuntimeError):
    """A hook of a callback raised an exception; the run is saved."""


class CallbackObserver:
    """Observer that calls callbacks in addition to another observer."""

    def __init__(self, shown: Observer, callbacks: Sequence[Callback]) -> None:
        self.shown = shown
        self.callbacks = callbacks
        self.failed: tuple[str, Exception] | None = None
        """First failure: a sentence, and the exception."""

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        self.shown.begin(recipe, step, facts)
        for callback in self.callbacks:
            callback.stop_reason = None
        folder = Path(facts["run"])
        self._call("on_train_begin", "before the first step", lambda x: x(folder, step))
        self.raise_failure("Nothing was trained")

    def stage(self, number: int, name: str, steps: int, done: int) -> None:
        self.shown.stage(number, name, steps, done)

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        self.shown.stepped(step, stage, metrics)
        self._call("on_step_end", f"after step {step}", lambda x: x(step, dict(metrics)))

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.shown.evaluated(step, evaluation)
        when = f"at step {step}"
        self._call("on_evaluate", when, lambda x: x(step, dict(evaluation.metrics())))

    def saved(self, step: int, path: Path) -> None:
        self.shown.saved(step, path)
        self._call("on_save", f"at step {step}", lambda x: x(step, path))

    def ended(self, result: "Result") -> None:
        """Call the hooks for the end of the run."""
        self._call("on_train_end", "after the run", lambda x: x(result))

    def stop_reason(self) -> str | None:
        if self.failed is not None:
            return self.failed[0]
        return next((x.stop_reason for x in self.callbacks if x.stop_reason is not None), None)

    def note(self, text: str) -> None:
        self.shown.note(text)

    def end(self) -> None:
        self.shown.end()

    def raise_failure(self, state: str) -> None:
        """Raise CallbackError if a hook has failed; ``state`` describes the state of the run."""
        if self.failed is not None:
            message, error = self.failed
            raise CallbackError(f"{message}. {state}.") from error

    def _call(self, hook: str, when: str, call: Callable[[Any], None]) -> None:
        """Call a hook of all callbacks; after a failure, none is called until the run stops."""
        for callback in self.callbacks:
            if self.failed is not None:
                return
            try:
                call(getattr(callback, hook))
            except Exception as error:  # any code of the user's
                why = printable(f"{type(error).__name__}: {error}", 300)
                name = type(callback).__qualname__
                self.failed = f"callback {name} failed in {hook} {when}: {why}", error


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as a list; raise TypeError for anything else."""
    advice = "Type callbacks=[MyCallback()], where MyCallback inherits from segcredit.Callback"
    if isinstance(callbacks, Callback | type) or not isinstance(callbacks, Iterable):
        kind = callbacks.__qualname__ if isinstance(callbacks, type) else type(callbacks).__name__
        raise TypeError(f"callbacks: expected a list of callbacks; got {kind}. {advice}")
    found = list(callbacks)
    for item in found:
        if isinstance(item, type):
            raise TypeError(
                f"callbacks: expected objects, not classes; got the class {item.__qualname__}. "
                f"Type {item.__qualname__}()"
            )
        if not isinstance(item, Callback):
            raise TypeError(
                f"callbacks: expected objects of segcredit.Callback; got {type(item).__name__}. "
                f"{advice}"
            )
    return found
