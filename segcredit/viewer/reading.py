"""From bytes to rows. Whatever is wrong with a line is said in one line."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Never

from pydantic import ValidationError

from segcredit.runlog.folder import RunFolder, by_step
from segcredit.viewer.errors import InputError, nearest
from segcredit.viewer.rows import Row

STDIN = "-"
EXAMPLE = str(Path(__file__).with_name("example.jsonl"))
"""Hand-made responses; their numbers are made up to illustrate."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TYPE = 'type e.g. {"text": "The answer is 12."}'


def rollouts_of(path: str) -> str:
    """Return the last rollouts file of a run folder; any other path is returned unchanged."""
    if path == STDIN:
        return path
    try:
        kept = [file for _, file in by_step(RunFolder(path).rollouts) if file.suffix == ".jsonl"]
    except (OSError, ValueError, RuntimeError):  # opening the path will report why
        return path
    return str(kept[-1]) if kept else path


@contextmanager
def open_lines(path: str) -> Iterator[IO[bytes]]:
    """The file's lines as bytes; ``-`` is standard input."""
    if path == STDIN:
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(path).open("rb"))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise InputError(f"{path}: expected a JSONL file; {_why(error)}") from None
        yield file


def _why(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is none of that name; check the path, or type --example"
    if isinstance(error, IsADirectoryError):
        return "this is a directory; name one of the files in it, or a run that kept rollouts"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"it cannot be opened ({reason}); check the path and its permissions"


def filled_lines(path: str, lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each line that is not blank, with its number from 1 on."""
    found = False
    try:
        for number, line in enumerate(lines, start=1):
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                found = True
                yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file") from None
    if not found:
        raise InputError(f"{path}: expected one JSON object per line; got nothing; {_TYPE}")


def parse_row(line: bytes) -> Row:
    """The row, or an InputError that names the field."""
    try:
        content = json.loads(line.decode().rstrip("\r\n"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected UTF-8; got byte 0x{line[error.start]:02x} at column {error.start + 1}; "
            f"save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"expected one JSON object per line; got text that is no JSON: "
            f"{error.msg[0].lower()}{error.msg[1:]} at column {error.colno}; {_TYPE}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 brackets
        raise InputError(
            f"expected one JSON object per line; got what Python cannot read ({error}); {_TYPE}"
        ) from None
    if not isinstance(content, dict):
        raise InputError(
            f"expected a JSON object, {{…}}; got {_JSON_NAMES[type(content)]}; put each response "
            f"on a line of its own, as {{…}}"
        )
    try:
        return Row.model_validate(
            _from_training(content) if _is_from_training(content) else content
        )
    except ValidationError as error:
        raise InputError(_explain(error)) from None


_NAMES_IN_TRAINING = {"prompt_id": "id", "prompt": "prompt", "reward": "reward"} | {
    name: name for name in ("entropy", "value")
}
"""Columns of a run's rollouts, watched and evaluations → fields of a row."""
_ROUNDING = 1e-3
"""Maximum amount by which a low-precision log-probability may exceed zero."""


def _is_from_training(content: dict[str, Any]) -> bool:
    """Whether training wrote the line: its tokens are ids, and their texts are in "pieces"."""
    return "response" in content and "prompt_id" in content


def _from_training(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a line that training wrote into the fields of a row; other columns are dropped."""
    row = {name: content[key] for key, name in _NAMES_IN_TRAINING.items() if key in content}
    if "pieces" in content:
        row["tokens"] = content["pieces"]
    elif content["response"] == "":  # an evaluation keeps only texts; here the end token came first
        row["tokens"] = [""]
    else:
        row["text"] = content["response"]
    if isinstance(logp := content.get("logp_old"), list):
        row["logp"] = [_rounded_to_zero(x) for x in logp]
    return row


def _rounded_to_zero(x: object) -> object:
    return 0.0 if isinstance(x, float) and 0 < x < _ROUNDING else x


_JSON_NAMES = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _refuse_constant(name: str) -> Never:
    raise InputError(
        f"expected finite numbers; got {name}; look at what wrote it (tool output takes 0)"
    )


def _explain(error: ValidationError) -> str:
    """The first thing wrong with a row; unknown keys first, since they explain the rest."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    name, *inside = first["loc"]
    if first["type"] == "extra_forbidden":
        known = list(Row.model_fields)
        return (
            f"expected the keys {', '.join(known)}; got {_shown(name)};"
            f"{nearest(str(name), known) or ' remove it'}"
        )
    field = Row.model_fields[str(name)]
    where = f" at position {inside[0]}" if inside else ""
    example = (field.examples or [""])[0]
    return (
        f"{name} must be {field.description}; got {_shown(first['input'])}{where}; type {example}"
    )


def _shown(content: object, limit: int = 40) -> str:
    shown = json.dumps(content, ensure_ascii=False)
    return shown if len(shown) <= limit else shown[:limit] + "…"
