"""Reward functions of your own, in TRL's signature: ``fn(prompts, completions, **columns)``.

The function gets keyword arguments, each a list with one entry per response: ``prompts`` and
``completions``; the row's answer as ``answer``, ``solution`` and ``ground_truth``; ``num_tokens``,
``truncated``; and every other column of the row by its name. Without ``**kwargs`` it gets only the
arguments that it names. It may be ``async``. It returns a finite number for each response. To
report correctness, it returns ``{"reward": 0.7, "correct": True, "reason": "…"}`` or a
``segcredit.types.Reward``. Without ``correct`` there is no accuracy, only the mean reward.

Two rules where TRL leaves a choice:

- Prompts and completions are plain strings. A function written for TRL's conversational rows
  (``completion[0]["content"]``) is given lists of messages if ``conversational=True``.
- None is an error. In TRL it means "not applicable" in a sum of several functions; here each
  function grades every response.
"""

import ast
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from segcredit.printable import printable
from segcredit.registry import names_code, nearest
from segcredit.rewards.checks import FINITE, INSTEAD, RewardError, quoted, require_seconds
from segcredit.rewards.pool import Failure, Pool
from segcredit.rewards.worker import call
from segcredit.types import Prompt, Response, Reward

Answer = dict[str, Any] | Failure
"""The worker's reply: ``{"rewards": …}``, ``{"raised": …}``, ``{"unusable": …}``, or a Failure."""


class ProcessCaller:
    """Calls a named function in a worker process, which is killed at the deadline."""

    def __init__(self, spec: str) -> None:
        place, _, name = spec.rpartition(":")
        file = place.endswith(".py")
        self.pool = Pool(
            ["function", str(Path(place).expanduser().resolve()) if file else place, name],
            role=f"reward function {Path(spec).name}",
            environment={} if file else {"PYTHONPATH": _search_path()},
        )

    def __call__(self, arguments: Mapping[str, Any], deadline: float) -> Answer:
        unsendable = {name: _unsendable(column) for name, column in arguments.items()}
        request = {
            "arguments": {name: x for name, x in arguments.items() if not unsendable[name]},
            "unsendable": {name: kind for name, kind in unsendable.items() if kind},
        }
        (answer,) = self.pool.ask([request], deadline)
        return answer

    def close(self) -> None:
        self.pool.close()


class ThreadCaller:
    """Calls a function of this process in a thread, which is abandoned at the deadline."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, arguments: Mapping[str, Any], deadline: float) -> Answer:
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: answers.append(call(self.function, arguments, {})),
            name="segcredit reward function",
            daemon=True,  # a function that hangs must not keep the interpreter from exiting
        )
        thread.start()
        thread.join(deadline)
        return answers[0] if answers else Failure("late", f"did not return within {deadline:g} s")

    def close(self) -> None:
        """Do nothing: a thread cannot be stopped."""


def _unsendable(column: list[Any]) -> str:
    """Name the types in a column that cannot be sent as JSON; "" if it can be sent."""
    try:
        json.dumps(column)
    except (TypeError, ValueError, RecursionError):
        return " and ".join(sorted({type(x).__name__ for x in column if x is not None}))
    return ""


def can_be_json(column: list[Any]) -> bool:
    """Whether a column can be sent as JSON."""
    return not _unsendable(column)


def _search_path() -> str:
    """Return this process's module search path, so that a worker can import the same modules."""
    return os.pathsep.join(place or os.getcwd() for place in sys.path)


LIST, ONE_EACH = "must return a list", "must return one number per response"
"""Requirements of what a function returns, for messages."""
_SEARCH = 2.0
"""Maximum time, in deadlines, for finding the response on which a function hangs."""
_REASON = 300
"""Maximum number of characters kept of a function's reason."""
TRIAL = (
    "This was a trial before the model is loaded: two responses to the first training row. Correct "
    "the function, then start again."
)
"""End of the message about a function that fails its trial."""


@dataclass(frozen=True)
class CustomReward:
    """A reward function of your own: named, or a Python callable.

    A named function (``file.py:function`` or ``package.module:function``) runs in a process that is
    killed at the deadline. A callable runs in a thread, which cannot be killed. Name the function
    if it needs the main thread (signals, as in math-verify's time limits).
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
        if isinstance(self.function, str):
            _parse(self.function)  # reports mistakes in the name now, not after the first batch
            _ = self._caller  # resolves a relative path now
        elif not callable(self.function):
            raise ValueError(
                f"a reward function is a callable or 'file.py:function'; got {self.function!r}."
            )

    @cached_property
    def _caller(self) -> ProcessCaller | ThreadCaller:
        if isinstance(self.function, str):
            return ProcessCaller(self.function)
        return ThreadCaller(self.function)

    @property
    def name(self) -> str:
        """Name of the function for messages."""
        if isinstance(self.function, str):
            return Path(self.function).name
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def __call__(self, responses: Sequence[Response]) -> list[Reward]:
        if not responses:
            return []
        answer = self._call(responses)
        if isinstance(answer, Failure) or "raised" in answer:
            self._find_culprit(responses, answer)
        return self._read(answer, responses)

    def try_once(self, prompt: Prompt, max_tokens: int) -> None:
        """Grade two trial responses to a prompt; raise RewardError if the function fails.

        Both contain the row's answer, once boxed and once as text. There are two, so that a
        function that returns one number for the whole batch fails, too.
        """
        text = "0" if prompt.answer is None else prompt.answer
        responses = [
            Response(prompt, x, min(len(x.split()) + 1, max_tokens), False, max_tokens)
            for x in (f"\\boxed{{{text}}}", text)
        ]
        try:
            answer = self._call(responses)
            if isinstance(answer, Failure) or "raised" in answer:
                self._fail(_what_happened(answer), responses[0])
            self._read(answer, responses)
        except RewardError as error:
            self.close()
            raise RewardError(f"{error} {TRIAL}") from None

    def check_signature(self, prompts: Sequence[Prompt]) -> None:
        """Raise RewardError unless the rows have a column for every required parameter.

        A named function is parsed, not run. If it is decorated, imported or assigned in its file,
        it is checked at its first call.
        """
        if isinstance(self.function, str):
            required = _required_in_source(self.function)
        else:
            required = _required(self.function)
        given = arguments([Response(p, "", 0, False, 0) for p in prompts], self.conversational)
        missing = [name for name in required if name not in given]
        if missing:
            columns = [name for name in given if name not in _ALWAYS]
            raise RewardError(
                f"the reward function {self.name} requires {_and(missing)}, but the rows have no "
                f"such column. It is called with {', '.join(_ALWAYS)}"
                f"{' and the columns ' + ', '.join(map(quoted, columns)) if columns else ''}. "
                f"Rename the parameter, give it a default, or add the column to the data."
            )

    def close(self) -> None:
        """Stop the function's process."""
        self._caller.close()

    def __enter__(self) -> "CustomReward":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self, answer: dict[str, Any], responses: Sequence[Response]) -> list[Reward]:
        who = f"the reward function {self.name}"
        if "unusable" in answer:
            raise RewardError(f"{who} {answer['unusable']}")
        return read_grades(who, self.name, answer["rewards"], responses)

    def _call(self, responses: Sequence[Response]) -> Answer:
        return self._caller(arguments(responses, self.conversational), self.deadline)

    def _find_culprit(self, responses: Sequence[Response], answer: Answer) -> NoReturn:
        """Call the function again with one response at a time, and report the first that fails."""
        until = time.monotonic() + _SEARCH * self.deadline
        for response in responses:
            if time.monotonic() + self.deadline > until:
                break
            alone = self._call([response])
            if isinstance(alone, Failure) or "raised" in alone:
                self._fail(_what_happened(alone), response)
        raise RewardError(
            f"the reward function {self.name} {_what_happened(answer)} on {len(responses)} "
            f"responses together, starting with prompt {quoted(responses[0].prompt.id)}, response "
            f"{quoted(responses[0].text)}; called with one response at a time it did not. If it is "
            f"only slow, raise its deadline (now {self.deadline:g} s)."
        )

    def _fail(self, what: str, response: Response) -> NoReturn:
        _fail(f"the reward function {self.name}", what, response)


def read_grades(who: str, name: str, rewards: Any, responses: Sequence[Response]) -> list[Reward]:
    """Convert what a function or server returned, as ``worker.plain_grades`` gives it, to rewards.

    Args:
        who: Subject of the error message, such as "the reward function f".
        name: Short name for the reasons.
    """
    if isinstance(rewards, dict):
        _fail(
            who,
            f"{LIST} with one number per response; it returned {quoted(rewards['not'])}",
            responses[0],
        )
    if len(rewards) != len(responses):
        _fail(
            who,
            f"{ONE_EACH}; it returned {len(rewards)} for {len(responses)}, beginning",
            responses[0],
        )
    found = [_read_grade(who, name, x, y) for x, y in zip(rewards, responses, strict=True)]
    said = {n: x.correct is not None for n, x in enumerate(found) if x.verdict}
    if not any(said.values()) and said:
        return [replace(x, correct=None) for x in found]
    if silent := [n for n, says in said.items() if not says]:
        _fail(
            who,
            f"must say 'correct' for all responses or for none; it did for "
            f"{len(said) - len(silent)} of {len(said)}, but not",
            responses[silent[0]],
        )
    return found


def _read_grade(who: str, name: str, grade: Any, response: Response) -> Reward:
    """Convert the grade of one response into a Reward."""
    fields = grade if isinstance(grade, dict) and "reward" in grade else {"reward": grade}
    value = fields["reward"]
    if value is None:
        _fail(
            who,
            "returned None, which to TRL means 'not applicable'; here each function grades "
            "every response: return 0.0 for no reward. It was",
            response,
        )
    if isinstance(value, dict):
        required = f"must return {value['expected']}" if "expected" in value else FINITE
        _fail(who, f"{required}; it returned {quoted(value['not'])[1:-1]}", response)
    if not isfinite(value):
        _fail(who, f"{FINITE}; it returned {value}", response)
    verdict = fields.get("verdict", True)
    return Reward(
        value=value,
        reason=printable(fields.get("reason") or f"{name}: {value:g}", _REASON),
        correct=fields.get("correct") if verdict else False,
        verdict=verdict,
    )


def _fail(who: str, what: str, response: Response) -> NoReturn:
    raise RewardError(
        f"{who} {what} on prompt {quoted(response.prompt.id)}, response "
        f"{quoted(response.text)}.{_hint(what)}"
    )


def arguments(responses: Sequence[Response], conversational: bool = False) -> dict[str, list[Any]]:
    """Return the keyword arguments for a function in TRL's signature."""
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
    """Return the names of required parameters; empty if a function in C has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in named]


def _required_in_source(spec: str) -> list[str]:
    """Return a named function's required parameters; its file is parsed, not run."""
    name = spec.rpartition(":")[2]
    functions = [x for x in _parse(spec) if isinstance(x, _FUNCTION) and x.name == name]
    if not functions or functions[-1].decorator_list:
        return []
    given = functions[-1].args
    positional = [*given.posonlyargs, *given.args]
    plain = positional[: len(positional) - len(given.defaults)][len(given.posonlyargs) :]
    by_name = [
        x for x, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
    ]
    return [x.arg for x in (*plain, *by_name)]


def _and(names: Sequence[str]) -> str:
    return " and ".join(map(quoted, names))


def _what_happened(answer: Mapping[str, Any] | Failure) -> str:
    if isinstance(answer, Failure):
        return answer.reason
    return f"raised {quoted(answer['raised'], 300)[1:-1]}"


def _hint(what: str) -> str:
    if "string indices must be integers" in what:
        return " If it reads completion[0]['content'], set conversational=True."
    if what.startswith(FINITE):
        return INSTEAD
    if what.startswith((LIST, ONE_EACH)):
        return " Return one number for each text in completions, for example [1.0, 0.0] for two."
    if what.startswith(("was stopped after", "did not return within")):
        return " If it is only slow, raise its deadline: reward: {name: …, deadline: SECONDS}."
    if "main thread" in what:
        return " Pass it as 'file.py:function': there it runs in the main thread of a process."
    return ""


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _parse(spec: str) -> list[ast.stmt]:
    """Parse the file that should define the named function, without running it.

    Returns the file's statements; an empty list for a module without Python source (C extension).
    """
    place, _, name = spec.rpartition(":")
    if not names_code(spec):
        raise ValueError(
            f"a reward function in a file is written 'file.py:function'; got {spec!r}."
        )
    path = Path(place).expanduser().resolve() if place.endswith(".py") else _module_file(place)
    if path is None:
        return []
    if not path.is_file():
        raise ValueError(
            f"there is no file {path} (from {spec!r}). Relative paths start at {Path.cwd()}."
        )
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"{path} cannot be parsed as Python: {error}.") from None
    bound: dict[str, bool] = {}
    for x, callable_ in _module_names([tree]):
        bound[x] = callable_ or bound.get(x, False)
    if not bound.get(name) and "*" not in bound:
        functions = [s.name for s in tree.body if isinstance(s, _FUNCTION)]
        hint = nearest(name, functions) or f" It has {', '.join(functions) or 'none'}."
        if name in bound:
            raise ValueError(f"{path}: expected a function; got {name!r}, which is not one.{hint}")
        raise ValueError(f"{path} has no function {name!r}.{hint}")
    return tree.body


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


def _module_file(module: str) -> Path | None:
    """Return the source file of a module, found without importing the module or its packages."""
    name, places, spec = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, places) for finder in sys.meta_path)
        spec = next((x for x in specs if x is not None), None)
        if spec is None:
            raise ValueError(
                f"there is no module {module!r}. Install it, or name a file: 'file.py:function'."
            )
        places = spec.submodule_search_locations
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin if origin is not None and origin.suffix == ".py" else None
