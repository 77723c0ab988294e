"""Calling somebody's function within a deadline: in a process of its own, or in a thread."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from segcredit.rewards.pool import Failure, Pool
from segcredit.rewards.worker import call


@runtime_checkable
class Caller(Protocol):
    """Calls one function with keyword arguments, each a list with one entry per response.

    Answers with the worker's message: ``{"rewards": …}``, ``{"raised": …}``, ``{"unusable": …}``,
    or with a Failure.
    """

    def __call__(self, arguments: Mapping[str, Any], deadline: float) -> dict[str, Any] | Failure:
        """Call it."""
        ...

    def close(self) -> None:
        """Stop whatever processes it holds."""
        ...


class FileCaller:
    """A function in a file, loaded and run in a process that is killed at the deadline."""

    def __init__(self, path: Path, name: str) -> None:
        self.pool = Pool(["function", str(path), name], role=f"reward function {path.name}:{name}")

    def __call__(self, arguments: Mapping[str, Any], deadline: float) -> dict[str, Any] | Failure:
        sendable, unsendable = {}, {}
        for name, column in arguments.items():
            kind = _what_json_lacks(column)
            if kind is None:
                sendable[name] = column
            else:
                unsendable[name] = kind
        request = {"arguments": sendable, "unsendable": unsendable}
        (answer,) = self.pool.ask([request], deadline)
        return answer

    def close(self) -> None:
        self.pool.close()


class ThreadCaller:
    """A function of this process, run in a thread; past its deadline the thread is left behind."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, arguments: Mapping[str, Any], deadline: float) -> dict[str, Any] | Failure:
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: answers.append(call(self.function, arguments, {})),
            name="segcredit reward function",
            daemon=True,  # a function that hangs must not keep the interpreter from ending
        )
        thread.start()
        thread.join(deadline)
        return answers[0] if answers else Failure("late", f"did not return within {deadline:g} s")

    def close(self) -> None:
        """Nothing to stop: a thread cannot be."""


def _what_json_lacks(column: list[Any]) -> str | None:
    """The type that keeps a column out of JSON; None: it fits."""
    try:
        json.dumps(column)
    except (TypeError, ValueError, RecursionError):
        kinds = {type(x).__name__ for x in column if x is not None}
        return " and ".join(sorted(kinds))
    return None
