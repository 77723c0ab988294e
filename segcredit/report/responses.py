"""The one exception that the command line turns into one line."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, Never

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from segcredit.runlog.folder import RunFolder, by_step


class InputError(Exception):
    """What the person at the terminal gave cannot be used; the message says what to type."""


def nearest(name: str, known: list[str]) -> str:
    """`` Did you mean 'entropy'?``, or nothing where no known name is near."""
    near = get_close_matches(name.lower(), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


_PIECE = re.compile(
    r"""
      [^\S\n]* \S+     # a word with the blanks before it
    | [^\S\n]* \n      # a line's end
    | [^\S\n]+ \Z      # blanks at the very end
    """,
    re.VERBOSE,
)


def split_text(text: str) -> list[str]:
    """Words with the blanks before them, and line ends; joined, they are the text again."""
    return _PIECE.findall(text)


def _flag(x: object) -> object:
    return bool(x) if type(x) is int and x in (0, 1) else x


Flag = Annotated[bool, BeforeValidator(_flag)]
"""true or false; 1 or 0, as training frameworks store masks, will do."""
Probability = Annotated[FiniteFloat, Field(gt=0, le=1)]
LogProbability = Annotated[FiniteFloat, Field(le=0)]

PER_TOKEN = ("entropy", "prob", "logp", "value", "mask")


class Row(BaseModel):
    """A response. Each field's description says what is expected; its example, what to type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tokens: list[str] | None = Field(
        None,
        description="a list of token texts, special tokens as ''",
        examples=['"tokens": ["The", " answer"]'],
    )
    text: str | None = Field(
        None,
        description="a string, the response where there are no 'tokens'",
        examples=['"text": "The answer"'],
    )
    entropy: list[FiniteFloat] | None = Field(
        None,
        description="a list of finite numbers, one per token",
        examples=['"entropy": [0.1, 2.3]'],
    )
    prob: list[Probability] | None = Field(
        None,
        description="a list of numbers in (0, 1], one per token",
        examples=['"prob": [0.98, 0.4]'],
    )
    logp: list[LogProbability] | None = Field(
        None,
        description="a list of finite numbers ≤ 0, one per token",
        examples=['"logp": [-0.02, -0.9]'],
    )
    value: list[FiniteFloat] | None = Field(
        None,
        description="a list of finite numbers, one per token: V of the prefix before it",
        examples=['"value": [0.5, 0.6]'],
    )
    mask: list[Flag] | None = Field(
        None,
        description="a list of true or false, one per token: false at tool output",
        examples=['"mask": [true, false]'],
    )
    reward: FiniteFloat | None = Field(
        None, description="a finite number", examples=['"reward": 1.0']
    )
    id: str | None = Field(None, description="a string", examples=['"id": "7"'])
    prompt: str | None = Field(None, description="a string", examples=['"prompt": "Find AB."'])

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


class ValueAt(StrEnum):
    """Where V(s_m) is read: before the segment's first token, or before its last."""

    START = "start"
    END = "end"


@dataclass(frozen=True)
class Settings:
    """Settings of the partitions and of the credit; the defaults are the library's own."""

    fraction: float = 0.30
    threshold: float = 0.9
    every: int = 5
    size: int = 16
    window: int = 5
    gamma: float = 1.0
    lam: float = 0.99
    value_at: ValueAt = ValueAt.START


ALL = "all"


class Strategy(NamedTuple):
    """A way to cut."""

    about: str
    needs: tuple[str, ...] = ()
    """Fields of a row; any one of them will do."""


STRATEGIES = {
    "entropy": Strategy("after the most uncertain tokens (SAPO)", ("entropy",)),
    "probability": Strategy("before every n-th unlikely token (SPO)", ("prob", "logp")),
    "accumulate": Strategy("after every n-th unlikely token", ("prob", "logp")),
    "newline": Strategy("after each line"),
    "step": Strategy("before each Step 1, Step 2, …"),
    "fixed": Strategy("every so many tokens"),
    "token": Strategy("after each token (PPO)"),
    "response": Strategy("nowhere (GRPO, GSPO)"),
    "peaks": Strategy("after peaks of uncertainty", ("entropy",)),
    "smooth": Strategy("after the most uncertain stretches", ("entropy",)),
    "value": Strategy("where the critic changes its mind", ("value",)),
}


def check_names(asked: Sequence[str]) -> None:
    """Refuse a name that is not a strategy."""
    known = [*STRATEGIES, ALL]
    for name in asked:
        if name not in known:
            raise InputError(
                f"--strategy must be one of {', '.join(known)} (repeat -s for several); "
                f"got {name!r}.{nearest(name, known)}"
            )


def choose(asked: Sequence[str], row: Row) -> list[str]:
    """The strategies to show for a row: those asked for, each once, or the row's natural one."""
    if not asked:
        return ["entropy" if _can(row, "entropy") else "newline"]
    names: dict[str, None] = {}
    for name in asked:
        if name == ALL:
            names.update(dict.fromkeys(name for name in STRATEGIES if _can(row, name)))
        elif _can(row, name):
            names[name] = None
        else:
            raise InputError(_missing(name))
    return list(names)


def _can(row: Row, name: str) -> bool:
    needs = STRATEGIES[name].needs
    return not needs or any(getattr(row, field) is not None for field in needs)


def _missing(name: str) -> str:
    needs = STRATEGIES[name].needs
    example = (Row.model_fields[needs[0]].examples or [""])[0]
    return (
        f"strategy {name!r} needs the field {' or '.join(map(repr, needs))}; this row has none; "
        f"add {example}, or type -s newline"
    )
