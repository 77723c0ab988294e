"""Read the responses that ``segcredit segment`` shows: rows of JSONL, checked field by field."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Never

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from segcredit.registry import nearest
from segcredit.runlog.folder import RunFolder, by_step


class InputError(Exception):
    """A mistake in the input or the options; the message says what to type."""


_PIECE = re.compile(
    r"""
      [^\S\n]* \S+     # a word with the spaces before it
    | [^\S\n]* \n      # the end of a line
    | [^\S\n]+ \Z      # spaces at the very end
    """,
    re.VERBOSE,
)


def split_text(text: str) -> list[str]:
    """Split into words with the spaces before them, and line ends; joined, they are the text."""
    return _PIECE.findall(text)


def _flag(x: object) -> object:
    return bool(x) if type(x) is int and x in (0, 1) else x


Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false; also 1 or 0, as training frameworks store masks."""
Probability = Annotated[FiniteFloat, Field(gt=0, le=1)]
LogProbability = Annotated[FiniteFloat, Field(le=0)]

PER_TOKEN = ("entropy", "prob", "logp", "value", "mask")


def _field(description: str, example: str) -> Any:
    return Field(None, description=description, examples=[example])


class Row(BaseModel):
    """One response. Error messages quote each field's description and example."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tokens: list[str] | None = _field(
        "a list of token texts, special tokens as ''", '"tokens": ["The", " answer"]'
    )
    text: str | None = _field(
        "a string, the response where there are no 'tokens'", '"text": "The answer"'
    )
    entropy: list[FiniteFloat] | None = _field(
        "a list of finite numbers, one per token", '"entropy": [0.1, 2.3]'
    )
    prob: list[Probability] | None = _field(
        "a list of numbers in (0, 1], one per token", '"prob": [0.98, 0.4]'
    )
    logp: list[LogProbability] | None = _field(
        "a list of finite numbers ≤ 0, one per token", '"logp": [-0.02, -0.9]'
    )
    value: list[FiniteFloat] | None = _field(
        "a list of finite numbers, one per token: V of the prefix before it", '"value": [0.5, 0.6]'
    )
    mask: list[Flag] | None = _field(
        "a list of true or false, one per token: false at tool output", '"mask": [true, false]'
    )
    reward: FiniteFloat | None = _field("a finite number", '"reward": 1.0')
    id: str | None = _field("a string", '"id": "7"')
    prompt: str | None = _field("a string", '"prompt": "Find AB."')

    @model_validator(mode="after")
    def _consistent(self) -> "Row":
        if (self.tokens is None) == (self.text is None):
            came = "neither" if self.tokens is None else "both"
            raise ValueError(
                f"expected either 'tokens' (a list of strings) or 'text' (a string); got {came}; "
                f'type e.g. {{"text": "The answer is 12."}}'
            )
        if not self.pieces:
            raise ValueError(
                "expected at least one token; the response is empty; drop this line, or fill "
                "'tokens' or 'text'"
            )
        if self.prob is not None and self.logp is not None:
            raise ValueError("expected 'prob' or 'logp'; got both; leave one out")
        for name in PER_TOKEN:
            self._check_length(name)
        if not any(self.on_mask):
            raise ValueError(
                "mask must be true at one token at least; got false everywhere; true marks the "
                "tokens that the model wrote"
            )
        return self

    def _check_length(self, name: str) -> None:
        numbers = getattr(self, name)
        if numbers is None or len(numbers) == len(self.pieces):
            return
        if self.tokens is None:
            raise ValueError(
                f"{name} must have one entry per piece of 'text', which splits into "
                f"{len(self.pieces)}; got {len(numbers)}; give the model's own 'tokens' instead"
            )
        raise ValueError(
            f"{name} must have one entry per token, {len(self.pieces)}; got {len(numbers)}; "
            f"make the two lists equally long"
        )

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token."""
        return split_text(self.text or "") if self.tokens is None else self.tokens

    @cached_property
    def on_mask(self) -> list[bool]:
        """True at the tokens that the model wrote."""
        return [True] * len(self.pieces) if self.mask is None else self.mask


STDIN = "-"
EXAMPLE = str(Path(__file__).with_name("example.jsonl"))
"""Hand-written responses; their numbers are made up."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TYPE = 'type e.g. {"text": "The answer is 12."}'


def rollouts_of(path: str) -> str:
    """Return the last rollouts file of a run directory; any other path is returned unchanged."""
    if path == STDIN:
        return path
    try:
        kept = [file for _, file in by_step(RunFolder(path).rollouts) if file.suffix == ".jsonl"]
    except (OSError, ValueError, RuntimeError):  # opening the path will report why
        return path
    return str(kept[-1]) if kept else path


@contextmanager
def open_lines(path: str) -> Iterator[IO[bytes]]:
    """Open a file of lines as bytes; ``-`` is standard input."""
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
        return "there is no file of that name; check the path, or type --example"
    if isinstance(error, IsADirectoryError):
        return "this is a directory; name one of the files in it, or a run that recorded rollouts"
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"it cannot be opened ({reason}); check the path and its permissions"


def filled_lines(path: str, lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number from 1 on."""
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
    """Parse one line; an InputError names the wrong field."""
    try:
        content = json.loads(line.decode().rstrip("\r\n"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected UTF-8; got byte 0x{line[error.start]:02x} at column {error.start + 1}; "
            f"save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"expected one JSON object per line; got text that is not JSON: "
            f"{error.msg[0].lower()}{error.msg[1:]} at column {error.colno}; {_TYPE}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 brackets
        raise InputError(
            f"expected one JSON object per line; got a line that cannot be read ({error}); {_TYPE}"
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


_COPIED = ("prompt", "reward", "entropy", "value")
"""Columns of the files that training writes which a row takes over unchanged."""
_ROUNDING = 1e-3
"""Maximum amount by which a low-precision log-probability may exceed zero."""


def _is_from_training(content: dict[str, Any]) -> bool:
    """Whether training wrote the line: its tokens are ids, and their texts are in "pieces"."""
    return "response" in content and "prompt_id" in content


def _from_training(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a line that training wrote into the fields of a row; other columns are dropped."""
    row = {"id": content["prompt_id"]} | {key: content[key] for key in _COPIED if key in content}
    if "pieces" in content:
        row["tokens"] = content["pieces"]
    elif content["response"] == "":  # an evaluation records texts; this one is only an end token
        row["tokens"] = [""]
    else:
        row["text"] = content["response"]
    if isinstance(logp := content.get("logp_old"), list):
        row["logp"] = [0.0 if isinstance(x, float) and 0 < x < _ROUNDING else x for x in logp]
    return row


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
        f"expected finite numbers; got {name}; "
        f"correct the program that wrote it (tool output has 0)"
    )


def _explain(error: ValidationError) -> str:
    """Describe the first mistake in a row; unknown keys first, since they often explain others."""
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


class ValueAt(StrEnum):
    """Where V(s_m) is read: before the segment's first token, or before its last."""

    START = "start"
    END = "end"


@dataclass(frozen=True)
class CreditSettings:
    """Settings of the advantages; the defaults are SAPO's."""

    gamma: float = 1.0
    lam: float = 0.99
    value_at: ValueAt = ValueAt.START
