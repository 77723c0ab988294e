"""Worker process of the pool: answers requests as JSON lines and may be killed at any time.

It is started by its path and imports neither this package nor torch, so it is ready in less than a
second. Printed output cannot disturb the protocol, and the process ends with its parent.
"""

import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

OUT_OF_MEMORY = 75
"""Exit status of a worker that reached its memory limit."""
_PR_SET_PDEATHSIG = 1
_KEYS = ("reward", "correct", "reason", "verdict")
"""Keys of the dict that a function may return for a response instead of a number."""

Handler = Callable[[Any], Any]


class UnusableError(Exception):
    """The function cannot be called with any responses."""


def main(arguments: list[str]) -> None:
    """Serve: ``PARENT math MEMORY``, ``PARENT sympy MEMORY`` or ``PARENT function PLACE NAME``."""
    parent, mode, *rest = arguments
    _die_with_parent(int(parent))
    requests, replies = _reserve_pipes()

    def reply(message: object) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        handle = _MODES[mode](*rest)
    except ModuleNotFoundError as error:
        reply({"error": last_line(error), "missing": error.name})
        return
    except Exception as error:
        reply({"error": last_line(error)})
        return
    reply({"ready": True})
    for line in requests:
        try:
            answer = handle(json.loads(line))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        reply(answer)


def math_verifier(memory: str) -> Handler:
    """Make a handler that compares ``{"gold", "answer"}`` by math-verify.

    math-verify's own time limits are off: they need SIGALRM and do not stop C code. Only complete
    LaTeX is parsed; otherwise math-verify takes the last number of text that it cannot parse, and
    accepts ``44 @ 45`` for 45.
    """
    import logging

    from math_verify import (  # type: ignore[import-untyped]
        LatexExtractionConfig,
        parse,
        verify,
    )

    logging.disable()
    sys.dont_write_bytecode = True
    _limit_resources(int(memory))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    latex = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]

    def read(text: str) -> list[Any]:
        box = f"\\boxed{{{text}}}"
        return parse(box, latex, extraction_mode="first_match", parsing_timeout=None)

    def handle(request: Mapping[str, str]) -> dict[str, Any]:
        gold, answer = read(request["gold"]), read(request["answer"])
        return {
            "right": bool(verify(gold, answer, timeout_seconds=None)),  # not symmetric: gold first
            "gold_read": any(not isinstance(x, str) for x in gold),
            "read": any(not isinstance(x, str) for x in answer),
        }

    handle({"gold": "\\frac{1}{2}", "answer": "0.5"})  # trigger lazy imports now
    return handle


def zero_tester(memory: str) -> Handler:
    """Make a handler that tests whether sympy simplifies all expressions in "zero" to zero.

    The parser passes the text to eval(), so the caller must ensure that it is plain arithmetic.
    """
    import sympy  # type: ignore[import-untyped]
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped]

    sys.dont_write_bytecode = True
    _limit_resources(int(memory))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    rules = (
        *sympy_parser.standard_transformations,
        sympy_parser.implicit_multiplication_application,
    )

    def is_zero(expression: str) -> bool:
        try:
            difference = sympy_parser.parse_expr(expression, transformations=rules)
            return bool(sympy.simplify(difference) == 0)
        except MemoryError:
            raise
        except Exception:  # an expression that cannot be parsed or computed is not zero
            return False

    def handle(request: Mapping[str, list[str]]) -> dict[str, Any]:
        return {"right": all(map(is_zero, request["zero"]))}

    handle({"zero": ["(sqrt(8))-(2sqrt(2))"]})  # trigger lazy imports now
    return handle


def named_function(place: str, name: str) -> Handler:
    """Make a handler that calls a function of a file or module with ``{"arguments"}``."""
    module = _load(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise UnusableError(f"{place} has no function {name!r}")
    return lambda request: call(function, request["arguments"], request["unsendable"])


def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], unsendable: Mapping[str, str]
) -> dict[str, Any]:
    """Return the function's result as plain numbers and dicts, or its failure."""
    try:
        result = function(**_accepted(function, arguments, unsendable))
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_awaited(result))
        return {"rewards": plain_grades(result)}
    except UnusableError as error:
        return {"unusable": str(error)}
    except BaseException as error:  # also SystemExit: a function cannot end the run
        return {"raised": last_line(error)}


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback with file and line number."""
    described = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):
        return f"{described[-1].strip()} ({error.filename}, line {error.lineno})"
    line = described[0].strip().partition("\n")[0]
    steps = traceback.extract_tb(error.__traceback__)
    theirs = [s for s in steps if s.filename != __file__ and not s.filename.startswith("<")]
    return f"{line} ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else line


def _accepted(
    function: Callable[..., Any], arguments: Mapping[str, Any], unsendable: Mapping[str, str]
) -> dict[str, Any]:
    """Return all arguments if the function has ``**kwargs``, else those that it names."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions in C have no signature
        return dict(arguments)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for p in named:
        if p.default is p.empty and p.name not in arguments:
            raise UnusableError(_missing(p.name, arguments, unsendable))
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(arguments)
    names = [p.name for p in named]
    return {name: x for name, x in arguments.items() if name in names}


def _missing(name: str, arguments: Mapping[str, Any], unsendable: Mapping[str, str]) -> str:
    if name in unsendable:
        return (
            f"requires {name!r}, a column of {unsendable[name]}, which cannot be sent to another "
            f"process. Store it as text or numbers, or pass the function itself from Python."
        )
    return f"requires {name!r}; it can have {', '.join(arguments)}."


def plain_grades(result: Any) -> Any:
    """Convert to a list of numbers, None or dicts; anything else is ``{"not": description}``."""
    if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__len__"):
        return {"not": _described(result)}
    return [_plain_grade(x) for x in result]


def _plain_grade(x: Any) -> Any:
    """Convert one grade to a number, or to a dict of ``_KEYS``."""
    if all(hasattr(x, key) for key in ("value", "reason", "correct", "verdict")):  # a Reward
        x = {"reward": x.value, "correct": x.correct, "reason": x.reason, "verdict": x.verdict}
    if not isinstance(x, Mapping):
        return _plain_number(x)
    unknown = [str(key) for key in x if key not in _KEYS]
    if unknown or "reward" not in x:
        return {"not": _described(x), "expected": f"a dict of {', '.join(_KEYS)}"}
    for key in ("correct", "verdict"):
        if x.get(key) is not None and _flag(x[key]) is None:
            return {"not": _described(x), "expected": f"true, false or None as {key!r}"}
    return {
        "reward": _plain_number(x["reward"]),
        "correct": _flag(x.get("correct")),
        "reason": None if x.get("reason") is None else str(x["reason"]),
        "verdict": _flag(x.get("verdict")) is not False,
    }


def _flag(x: Any) -> bool | None:
    """Convert a bool of Python, numpy or torch; None for anything else."""
    if hasattr(x, "item") and hasattr(x, "dtype"):
        x = x.item()
    return x if isinstance(x, bool) else None


def _plain_number(x: Any) -> Any:
    if x is None:
        return None
    try:
        return {"not": _described(x)} if isinstance(x, (str, bytes)) else float(x)
    except (TypeError, ValueError, OverflowError):
        return {"not": _described(x)}


def _described(x: Any) -> str:
    try:
        return f"{type(x).__name__} {repr(x)[:80]}"
    except Exception:
        return type(x).__name__


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _load(path: Path) -> ModuleType:
    """Import a file; its folder becomes importable, as if the file had been run."""
    sys.path.insert(0, str(path.parent))
    name = f"segcredit_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UnusableError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has already died
        os._exit(1)


def _reserve_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Duplicate the pipes of the protocol; print() then writes to stderr and input() fails."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def _limit_resources(memory: int) -> None:
    """Limit memory; forbid files, child processes and core dumps."""
    import resource

    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for name, most in limits.items():
        try:
            resource.setrlimit(name, (most, most))
        except (ValueError, OSError):  # macOS does not support some of them
            continue


_MODES: dict[str, Callable[..., Handler]] = {
    "math": math_verifier,
    "sympy": zero_tester,
    "function": named_function,
}


if __name__ == "__main__":
    main(sys.argv[1:])
