"""Reward functions of one's own, in TRL's signature: ``fn(prompts, completions, **columns)``.

The function gets keyword arguments, each a list with one entry per response: ``prompts`` and
``completions``; the row's answer as ``answer``, ``solution`` and ``ground_truth``; ``num_tokens``,
``truncated``; and every other column of the row by its name. Without ``**kwargs`` it gets those
that it names. It may be ``async``. It returns a finite number for each response. To report
correctness, it returns ``{"reward": 0.7, "correct": True, "reason": "…"}`` or a
:class:`segcredit.types.Reward`. Without ``correct`` there is no accuracy, only the mean reward.

Two rules where TRL leaves a choice:

- Prompts and completions are plain strings. A function written for TRL's conversational rows
  (``completion[0]["content"]``) is given lists of messages if ``conversational=True``.
- None, "not applicable" to TRL, which adds up several functions, is an error: one function grades
  every response here.
"""

import ast
import difflib
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

from segcredit.printable import printable
from segcredit.rewards.checks import RewardError, require_seconds, shown
from segcredit.rewards.pool import Failure, Pool
from segcredit.rewards.worker import call
from segcredit.types import Prompt, Response, Reward


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


_SEARCH = 2.0
"""Deadlines that may be spent on finding out which response a function hangs on."""
_REASON = 300
"""Maximum number of characters kept of a function's reason."""


@dataclass(frozen=True)
class CustomReward:
    """A user's function: ``"file.py:function"``, run in a process of its own, or a callable.

    The file's process is killed at the deadline. A callable runs in a thread, which cannot be
    killed; what needs the main thread (signals, as in math-verify's time limits) needs the file.
    """

    function: str | Callable[..., Any]
    deadline: float = 60.0
    """Seconds for one call, which grades a whole batch."""
    conversational: bool = False
    """Prompts and completions as TRL's lists of messages instead of strings."""

    def __post_init__(self) -> None:
        require_seconds("deadline", self.deadline)
        if not isinstance(self.conversational, bool):
            raise ValueError(f"conversational must be true or false; got {self.conversational!r}.")
        _ = self._caller  # mistakes in the name are found now, not after the first batch

    @cached_property
    def _caller(self) -> Caller:
        if isinstance(self.function, str):
            return FileCaller(*_file_and_name(self.function))
        if callable(self.function):
            return ThreadCaller(self.function)
        raise ValueError(
            f"a reward function is a callable or 'file.py:function'; got {self.function!r}."
        )

    @property
    def name(self) -> str:
        """What to call it in messages."""
        if isinstance(self.function, str):
            return Path(self.function).name
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        if not responses:
            return []
        answer = self._call(responses, self.deadline)
        if isinstance(answer, Failure) or "raised" in answer:
            self._find_culprit(responses, answer)
        if "unusable" in answer:
            raise RewardError(f"the reward function {self.name} {answer['unusable']}")
        return self._checked(answer["rewards"], responses)

    def check_signature(self, prompts: Sequence[Prompt]) -> None:
        """Raise RewardError unless the rows have a column for every required parameter.

        A function in a file is parsed, not run. If it is decorated, imported or assigned there, it
        is checked at its first call.
        """
        if isinstance(self.function, str):
            required = _required_in_file(*_file_and_name(self.function))
        else:
            required = _required(self.function)
        given = arguments([Response(p, "", 0, False, 0) for p in prompts], self.conversational)
        missing = [name for name in required if name not in given]
        if missing:
            columns = [name for name in given if name not in _ALWAYS]
            raise RewardError(
                f"the reward function {self.name} requires {_and(missing)}, but the rows have no "
                f"such column. It is called with {', '.join(_ALWAYS)}"
                f"{' and the columns ' + ', '.join(map(shown, columns)) if columns else ''}. "
                f"Rename the parameter, give it a default, or add the column to the data."
            )

    def close(self) -> None:
        """Stop the function's process."""
        self._caller.close()

    def __enter__(self) -> "CustomReward":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _call(self, responses: Sequence[Response], deadline: float) -> dict[str, Any] | Failure:
        return self._caller(arguments(responses, self.conversational), deadline)

    def _find_culprit(
        self, responses: Sequence[Response], answer: dict[str, Any] | Failure
    ) -> NoReturn:
        """Call again with one response at a time, and name the first that fails."""
        until = time.monotonic() + _SEARCH * self.deadline
        for response in responses:
            if time.monotonic() + self.deadline > until:  # no time for a fair trial
                break
            alone = self._call([response], self.deadline)
            if isinstance(alone, Failure) or "raised" in alone:
                self._fail(_what_happened(alone), response)
        raise RewardError(
            f"the reward function {self.name} {_what_happened(answer)} on {len(responses)} "
            f"responses together, from prompt {shown(responses[0].prompt.id)}, response "
            f"{shown(responses[0].text)} on; called with one at a time it did not. If it is "
            f"merely slow, raise its deadline (now {self.deadline:g} s)."
        )

    def _checked(self, rewards: Any, responses: Sequence[Response]) -> list[Reward]:
        if isinstance(rewards, dict):
            self._fail(
                f"must return a list with one number per response; it returned "
                f"{shown(rewards['not'])}",
                responses[0],
            )
        if len(rewards) != len(responses):
            self._fail(
                f"must return one number per response; it returned {len(rewards)} for "
                f"{len(responses)}, beginning",
                responses[0],
            )
        found = [self._reward(x, y) for x, y in zip(rewards, responses, strict=True)]
        known = [x.correct is not None for x in found]
        if any(known) and not all(known):
            self._fail(
                f"must say 'correct' for all responses or for none; it did for {sum(known)} of "
                f"{len(known)}, but not",
                responses[known.index(False)],
            )
        return found

    def _reward(self, grade: Any, response: Response) -> Reward:
        """Convert the function's return value for one response into a Reward."""
        fields = grade if isinstance(grade, dict) and "reward" in grade else {"reward": grade}
        value = fields["reward"]
        if value is None:
            self._fail(
                "returned None, which to TRL means 'not applicable'; here one function grades "
                "every response: return 0.0 for no reward. It was",
                response,
            )
        if isinstance(value, dict):
            wanted = value.get("expected", "numbers")
            self._fail(f"must return {wanted}; it returned {shown(value['not'])}", response)
        if not isfinite(value):
            self._fail(f"must return finite numbers; it returned {value}", response)
        verdict = fields.get("verdict", True)
        return Reward(
            value=value,
            reason=printable(fields.get("reason") or f"{self.name}: {value:g}", _REASON),
            correct=fields.get("correct") if verdict else False,
            verdict=verdict,
        )

    def _fail(self, what: str, response: Response) -> NoReturn:
        raise RewardError(
            f"the reward function {self.name} {what} on prompt {shown(response.prompt.id)}, "
            f"response {shown(response.text)}.{_hint(what)}"
        )


def arguments(responses: Sequence[Response], conversational: bool = False) -> dict[str, list[Any]]:
    """What a function in TRL's signature is called with."""
    prompts = [response.prompt for response in responses]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for prompt in prompts for name in prompt.columns):
        columns[name] = [prompt.columns.get(name) for prompt in prompts]
    for name in ("answer", "solution", "ground_truth"):
        columns.setdefault(name, [prompt.answer for prompt in prompts])
    columns["num_tokens"] = [response.num_tokens for response in responses]
    columns["truncated"] = [response.truncated for response in responses]
    if conversational:
        columns["prompts"] = [[dict(message) for message in p.messages] for p in prompts]
        columns["completions"] = [[{"role": "assistant", "content": r.text}] for r in responses]
    else:
        columns["prompts"] = ["\n\n".join(m["content"] for m in p.messages) for p in prompts]
        columns["completions"] = [response.text for response in responses]
    return columns


_ALWAYS = (
    *("prompts", "completions", "answer", "solution", "ground_truth", "num_tokens", "truncated"),
)
"""Arguments that every function gets."""


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of required parameters; empty if a function in C does not reveal its signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]


def _required_in_file(path: Path, name: str) -> list[str]:
    """Names of required parameters of a function in a file, which is parsed but not run."""
    found = [
        s
        for s in ast.parse(path.read_bytes(), str(path)).body
        if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef) and s.name == name
    ]
    if not found or found[-1].decorator_list:
        return []
    given = found[-1].args
    positional = [*given.posonlyargs, *given.args]
    plain = positional[: len(positional) - len(given.defaults)][len(given.posonlyargs) :]
    by_name = [
        x for x, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
    ]
    return [x.arg for x in (*plain, *by_name)]


def _and(names: Sequence[str]) -> str:
    return " and ".join(map(shown, names))


def _what_happened(answer: Mapping[str, Any] | Failure) -> str:
    if isinstance(answer, Failure):
        return answer.reason
    return f"raised {shown(answer['raised'], 300)[1:-1]}"


def _hint(what: str) -> str:
    if "string indices must be integers" in what:
        return " If it reads completion[0]['content'], set conversational=True."
    if "main thread" in what:
        return " Pass it as 'file.py:function': there it runs in the main thread of a process."
    return ""


def _file_and_name(spec: str) -> tuple[Path, str]:
    """The two halves of ``file.py:function``, checked without running the file."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(
            f"a reward function in a file is written 'file.py:function'; got {spec!r}."
        )
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path} (from {spec!r}). Paths begin at {Path.cwd()}.")
    _require_name(path, name)
    return path, name


def _require_name(path: Path, name: str) -> None:
    """Check that a file defines a function of that name; the file is parsed, not run."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"{path} is not a Python file that can be read: {error}.") from None
    found: dict[str, bool] = {}
    for bound, callable_ in _module_names([tree]):
        found[bound] = callable_ or found.get(bound, False)
    if found.get(name) or "*" in found:
        return
    functions = [s.name for s in tree.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
    close = difflib.get_close_matches(name, functions, 1)
    there = f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(functions) or 'none'}."
    if name in found:
        raise ValueError(f"{path}: expected a function; got {name!r}, which is not one. {there}")
    raise ValueError(f"{path} has no function {name!r}. {there}")


def _module_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield the names that a module binds, and whether each may be a function."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, True
                yield from (
                    (x, True) for n in ast.walk(node) if isinstance(n, ast.Global) for x in n.names
                )
            case ast.ImportFrom():
                yield from ((x.asname or x.name, True) for x in node.names)
            case ast.Import():
                yield from ((x.asname or x.name.partition(".")[0], False) for x in node.names)
            case ast.Assign(
                value=ast.Constant() | ast.List() | ast.Tuple() | ast.Dict() | ast.Set()
            ):
                yield from ((x.id, False) for x in node.targets if isinstance(x, ast.Name))
            case ast.Name(ctx=ast.Store()):
                yield node.id, True
            case _:
                yield from _module_names(ast.iter_child_nodes(node))
