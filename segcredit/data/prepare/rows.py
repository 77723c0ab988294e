r"""Convert rows into verl's format: extract the answer, read the images, choose column types."""

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from segcredit.data.formats import (
    Keys,
    RowError,
    append_suffix,
    as_text,
    check_text,
    either,
    image_problem,
    split_row,
)
from segcredit.data.images import as_source
from segcredit.data.readers import RawRow
from segcredit.models.images import ImageError
from segcredit.printable import printable, shown
from segcredit.rewards.extract import boxed

Rule = Callable[[Mapping[str, Any], str | None], str | None]
"""Function of a row and the loader's answer that returns the answer or None, or raises RowError."""

Reshape = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Function that renames or adds columns of a row, or raises RowError."""

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")


def as_it_is(row: Mapping[str, Any], answer: str | None) -> str | None:
    """Return the loader's answer unchanged."""
    return answer


def number(row: Mapping[str, Any], answer: str | None) -> str | None:
    """Return the number after ``####`` without commas and currency (GSM8K)."""
    if answer is None:
        return None
    bare = answer.replace("$", "").strip().removesuffix(".")
    if not _NUMBER.fullmatch(bare):
        raise RowError(f"expected a solution that ends in '#### number'; got {shown(answer)}")
    return bare.replace(",", "")


def boxed_solution(row: Mapping[str, Any], answer: str | None) -> str | None:
    r"""Return the row's answer, else the last ``\boxed{}`` of its solution (MATH)."""
    solution = row.get("solution")
    given = any(_filled(row.get(name)) for name in ("answer", "ground_truth", "reward_model"))
    if given or not isinstance(solution, str) or not solution.strip():
        return answer
    found = last_box(solution)
    if not found:
        raise RowError(
            f"expected the answer in a \\boxed{{}} of 'solution'; got {shown(solution)}. If the "
            f"column holds only the answer: --answer solution"
        )
    return found


def chosen_text(row: Mapping[str, Any], answer: str | None) -> str | None:
    """Return the text of the choice if the answer is its letter (Geometry3K)."""
    choices = row.get("choices")
    if _filled(row.get("ground_truth")) or not isinstance(choices, list):
        return answer
    place = "ABCDEFGH".find(answer) if answer is not None and len(answer) == 1 else -1
    if place < 0:
        return answer
    if place >= len(choices) or not _filled(choices[place]):
        raise RowError(f"expected a text for the choice {answer} in 'choices'; got none")
    return str(choices[place]).strip()


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` or ``\fbox{}``; 5 for ``$\boxed 5$``."""
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    if text[start : start + 1] != "{":
        return re.split(r"[$\n]", text[start:], maxsplit=1)[0].strip().rstrip(".") or None
    return boxed(text) or None


def _filled(value: object) -> bool:
    return value is not None and str(value).strip() != ""


_CALCULATION = re.compile(r"<<[^<>]*>>")
_PLACE = re.compile(r"\bnumber(\d{1,3})\b")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_TOLERANCE = 1e-3
"""Maximum difference between the value of an equation and the stated answer."""
_LONGEST_EQUATION = 64
"""Maximum number of numbers and operators."""


def unchanged(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row as it is."""
    return row


def with_solution(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add GSM8K's solution as ``response``, which a warm start imitates.

    Calculator annotations (``<<48/2=24>>``) are removed. It begins with a space, because it follows
    a prompt such as ``Answer:``.
    """
    solution = row.get("answer")
    if "response" in row or not isinstance(solution, str) or "####" not in solution:
        return row
    return {**row, "response": " " + _CALCULATION.sub("", solution).strip()}


def word_problem(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a row of MAWPS, ASDiv-A or SVAMP, as the SVAMP repository has them.

    In MAWPS and ASDiv-A, ``Question`` has number0, number1, … for its ``Numbers``, and ``Equation``
    is in prefix notation; the equation becomes a ``response`` with one operation per line. SVAMP
    has ``Body`` and ``Question``, and is for testing. Other rows stay unchanged.
    """
    if _filled(row.get("Numbers")) and _filled(row.get("Equation")):
        numbers = [_as_number(x) for x in str(row["Numbers"]).split()]
        value, lines = _solve(str(row["Equation"]).split(), numbers)
        if not abs(value - _as_number(row.get("Answer"))) <= _TOLERANCE:
            raise RowError(
                f"expected an equation that gives the answer {shown(row.get('Answer'))}; got "
                f"{_written(value)} from {shown(row['Equation'])} with {shown(row['Numbers'])}"
            )
        answer = f"#### {_written(value)}"
        question = _PLACE.sub(lambda x: _written(_at(numbers, x)), str(row.get("Question")))
        response = " " + "\n".join([*lines, answer])
        return {"question": _spaced(question), "answer": answer, "response": response}
    if _filled(row.get("Body")) and _filled(row.get("Question")):
        body = str(row["Body"]).strip()
        body += "" if body[-1] in ".,?!" else "."
        answer = f"#### {_written(_as_number(row.get('Answer')))}"
        return {"question": _spaced(f"{body} {row['Question']}"), "answer": answer}
    return row


def _solve(prefix: list[str], numbers: list[float]) -> tuple[float, list[str]]:
    """Evaluate an equation in prefix notation; return its value and a line per operation."""
    stack: list[tuple[float, list[str]]] = []
    for word in reversed(prefix[:_LONGEST_EQUATION]):
        if word not in _OPERATORS:
            place = _PLACE.fullmatch(word)
            stack.append((_as_number(word) if place is None else _at(numbers, place), []))
            continue
        if len(stack) < 2:
            stack.clear()  # an operand is missing
            break
        (left, before), (right, after) = stack.pop(), stack.pop()
        value = float("nan") if word == "/" and right == 0 else _OPERATORS[word](left, right)
        line = f"{_written(left)} {word} {_written(right)} = {_written(value)}"
        stack.append((value, [*before, *after, line]))
    if len(stack) != 1 or len(prefix) > _LONGEST_EQUATION:
        raise RowError(f"expected one equation in prefix notation; got {shown(' '.join(prefix))}")
    return stack[0]


def _at(numbers: list[float], place: re.Match[str]) -> float:
    if int(place[1]) >= len(numbers):
        raise RowError(f"expected a value for {place[0]} in 'Numbers'; got {len(numbers)} numbers")
    return numbers[int(place[1])]


def _as_number(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise RowError(f"expected a number; got {shown(value)}") from None


def _written(number: float) -> str:
    """Format a number without trailing zeros, such as 56 or 0.25; at most four decimals."""
    return f"{number:.4f}".rstrip("0").rstrip(".")


def _spaced(text: str) -> str:
    """Return a tokenized text without spaces before punctuation, beginning with a capital."""
    joined = re.sub(r"\s+([.,?!;:])", r"\1", text.strip())
    return joined[:1].upper() + joined[1:]


UNREADABLE = "not readable"
NO_QUESTION = "empty question"
NO_ANSWER = "no answer"
IMAGE = "image missing or broken"
OTHER = "other"

OWN_EXTRAS = ("split", "index", "question")
"""Keys of extra_info that prepare fills itself."""


class SkipRow(RowError):  # noqa: N818
    """A bad row, with its reason for the report."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True)
class PreparedRow:
    """One row as it will be written."""

    index: int
    messages: list[dict[str, str]]
    """Chat messages with the suffix."""
    question: str
    """Question without the suffix."""
    answer: str
    images: list[dict[str, Any]]
    """``{"bytes": …, "path": …}`` with the original file name, as datasets stores images."""
    data_source: str
    ability: str = "math"
    style: str = "rule"
    kept: dict[str, Any] = field(default_factory=dict)
    """Further entries of extra_info: the original answer and the columns to keep."""


@dataclass(frozen=True)
class RowFormat:
    """Settings that convert rows of one source into verl's format."""

    keys: Keys
    rule: Rule
    suffix: str
    data_source: str
    """Data source of rows that name none."""
    keep_data_source: bool
    """Whether a row's own data source is kept."""
    keep: tuple[str, ...]
    reshape: Reshape = unchanged
    allow_outside: bool = False
    """Whether rows may name images outside the folder of their file."""

    def read(self, raw: RawRow) -> RawRow:
        """Return a row with the columns that ``convert`` expects; its content may be a SkipRow."""
        if not isinstance(raw.content, Mapping):
            return raw
        try:
            return raw._replace(content=self.reshape(raw.content))
        except RowError as error:
            return raw._replace(content=SkipRow(NO_ANSWER, str(error)))

    def convert(self, raw: RawRow, folder: Path, index: int) -> PreparedRow:
        """Convert a row; raise SkipRow if it is bad."""
        row = raw.content
        if isinstance(row, SkipRow):
            raise row
        if isinstance(row, RowError):
            raise SkipRow(UNREADABLE, str(row))
        try:
            parts = split_row(row, self.keys, None, one_answer=True)
            assert isinstance(row, Mapping)
        except RowError as error:
            raise SkipRow(_kind(error), str(error)) from None
        try:
            extra = _extra_info(row)
            answer = self._answer(row, parts.answer)
            append_suffix(parts.messages, self.suffix)
            return PreparedRow(
                index=_index(extra, index),
                messages=parts.messages,
                question=self._question(extra, parts.messages[-1]["content"]),
                answer=answer,
                images=_images(parts.images, folder, self.allow_outside),
                data_source=self._data_source(row),
                ability=_own_text(row, "ability") or "math",
                style=_own_text(row.get("reward_model"), "style") or "rule",
                kept={"answer": answer} | self._kept(row, extra),
            )
        except SkipRow:
            raise
        except RowError as error:
            raise SkipRow(OTHER, str(error)) from None

    def _question(self, extra: Mapping[str, Any], content: str) -> str:
        own = _own_text(extra, "question")
        if own is not None:
            return own
        return content.removesuffix(f" {self.suffix}") if self.suffix else content

    def _answer(self, row: Mapping[str, Any], answer: str | None) -> str:
        try:
            found = self.rule(row, answer)
        except RowError as error:
            raise SkipRow(NO_ANSWER, str(error)) from None
        if found is None:
            names = either(self.keys.answer)
            raise SkipRow(NO_ANSWER, f"expected an answer under {names}; got none")
        return found

    def _data_source(self, row: Mapping[str, Any]) -> str:
        own = _own_text(row, "data_source") if self.keep_data_source else None
        return own or self.data_source

    def _kept(self, row: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in extra.items() if name not in OWN_EXTRAS}
        kept |= {name: row[name] for name in self.keep if name in row}
        kept = {name: value for name, value in kept.items() if value is not None}
        for name, value in kept.items():
            check_text(name, "a column's name")
            check_text(as_text(value), f"'{printable(name, 60)}'")
        return kept


def _kind(error: RowError) -> str:
    said = str(error)
    if "an empty prompt" in said or said.startswith("expected a question under"):
        return NO_QUESTION
    return OTHER


def _extra_info(row: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = row.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}


def _index(extra: Mapping[str, Any], index: int) -> int:
    own = extra.get("index")
    usable = isinstance(own, int) and not isinstance(own, bool) and abs(own) < 2**63
    return own if usable and own is not None else index


def _own_text(row: object, key: str) -> str | None:
    value = row.get(key) if isinstance(row, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        return None
    return check_text(value, f"'{key}'")


def _images(values: list[object], folder: Path, outside: bool) -> list[dict[str, Any]]:
    images = []
    for number, value in enumerate(values, start=1):
        try:
            source = as_source(value, folder, outside)
            content = source.read_bytes() if isinstance(source, Path) else source
        except (RowError, ImageError, OSError) as error:
            raise SkipRow(IMAGE, image_problem(error, number, len(values))) from None
        images.append({"bytes": content, "path": _name(value, source)})
    return images


def _name(value: object, source: bytes | Path) -> str | None:
    """Return the file name without folders, as the datasets library writes it."""
    if isinstance(source, Path):
        name = source.name
    else:
        own = value.get("path") if isinstance(value, Mapping) else None
        name = own.replace("\\", "/").rpartition("/")[2] if isinstance(own, str) else ""
    check_text(name, "an image's name")
    return name or None


NOTHING = "null"
TEXT = "string"
_LIST = "list of "


class ColumnTypes:
    """One type per column that can hold every value seen so far; text if no other type can."""

    def __init__(self) -> None:
        self.of = {"answer": TEXT}  # as in verl

    def see(self, values: Mapping[str, Any]) -> None:
        """Widen the types so that they can hold a row's values."""
        for name, value in values.items():
            self.of[name] = _wider(self.of.get(name, NOTHING), _value_type(value))

    def cast(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row's values to the column types; missing ones are None."""
        return {name: _cast(values.get(name), kind) for name, kind in self.of.items()}


def element_type(kind: str) -> str | None:
    """Return the element type of a list type; None if it is not a list."""
    return kind.removeprefix(_LIST) if kind.startswith(_LIST) else None


def _value_type(value: object) -> str:
    match value:
        case None:
            return NOTHING
        case bool():
            return "bool"
        case int() if -(2**63) <= value < 2**63:
            return "int64"
        case float():
            return "float64"
        case list():
            inner = NOTHING
            for part in value:
                inner = _wider(inner, _value_type(part))
            return TEXT if inner.startswith(_LIST) else _LIST + inner
    return TEXT


def _wider(a: str, b: str) -> str:
    if a == b or b == NOTHING:
        return a
    if a == NOTHING:
        return b
    if {a, b} == {"int64", "float64"}:
        return "float64"
    inner_a, inner_b = element_type(a), element_type(b)
    if inner_a is not None and inner_b is not None:
        return _LIST + _wider(inner_a, inner_b)
    return TEXT


def _cast(value: Any, kind: str) -> Any:
    if value is None:
        return None
    inner = element_type(kind)
    if inner is not None and isinstance(value, Sequence):
        return [_cast(part, inner) for part in value]
    if kind in (TEXT, NOTHING):
        return as_text(value)
    return float(value) if kind == "float64" else value


pa = import_module("pyarrow")

_STRING = {"dtype": "string", "_type": "Value"}
_IMAGE = {"_type": "Image"}


def schema(types: ColumnTypes, with_images: bool) -> Any:
    """Make the Arrow schema: verl's columns, with ``images`` only if some row has one.

    Lists of features are written as JSON lists, which every version of datasets can read. Versions
    before 4.0 do not know ``{"_type": "List"}``, which newer ones write.
    """
    features: dict[str, Any] = {
        "data_source": _STRING,
        "prompt": [{"role": _STRING, "content": _STRING}],
        **({"images": [_IMAGE]} if with_images else {}),
        "ability": _STRING,
        "reward_model": {"style": _STRING, "ground_truth": _STRING},
        "extra_info": {
            "split": _STRING,
            "index": {"dtype": "int64", "_type": "Value"},
            "question": _STRING,
            **{name: _feature(kind) for name, kind in types.of.items()},
        },
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    fields = [pa.field(name, _type(feature)) for name, feature in features.items()]
    return pa.schema(fields, metadata=metadata)


def parquet_row(
    item: PreparedRow, split: str, types: ColumnTypes, with_images: bool
) -> dict[str, Any]:
    """Return a row of the parquet file."""
    extra = {"split": split, "index": item.index, "question": item.question}
    return {
        "data_source": item.data_source,
        "prompt": item.messages,
        **({"images": item.images} if with_images else {}),
        "ability": item.ability,
        "reward_model": {"style": item.style, "ground_truth": item.answer},
        "extra_info": extra | types.cast(item.kept),
    }


def _feature(kind: str) -> Any:
    inner = element_type(kind)
    if inner is not None:
        return [_feature(inner)]
    return {"dtype": TEXT if kind == NOTHING else kind, "_type": "Value"}


def _type(feature: Any) -> Any:
    """Return the Arrow type in which datasets stores a feature."""
    if isinstance(feature, list):
        return pa.list_(_type(feature[0]))
    if feature == _IMAGE:
        return pa.struct({"bytes": pa.binary(), "path": pa.string()})
    if feature.get("_type") == "Value":
        return pa.type_for_alias(feature["dtype"])
    return pa.struct({name: _type(inner) for name, inner in feature.items()})


_ROWS = 1000
_BYTES = 2**24
"""Maximum number of rows, and of image bytes, in one row group."""


class RowWriter:
    """Writes rows in groups; equal rows give equal bytes."""

    def __init__(self, file: BinaryIO, schema: Any) -> None:
        self._file = import_module("pyarrow.parquet").ParquetWriter(file, schema)
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, row: dict[str, Any], size: int) -> None:
        """Add a row; ``size`` is the number of bytes of its images."""
        self._rows.append(row)
        self._bytes += size
        if len(self._rows) >= _ROWS or self._bytes >= _BYTES:
            self._flush()

    def close(self) -> None:
        """Write the remaining rows and the footer."""
        if self._rows:
            self._flush()
        self._file.close()

    def _flush(self) -> None:
        table = pa.Table.from_pylist(self._rows, schema=self._schema)
        self._file.write_table(table, row_group_size=len(self._rows))
        self._rows, self._bytes = [], 0
