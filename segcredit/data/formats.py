"""What a row means, whoever wrote it: verl, TRL, EasyR1, GSM8K, MATH and their like."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcredit.printable import listed, shown

SHOWN = 20
ADVICE = (
    "Repair these rows, or go on without them: --skip-bad-rows (in Python, skip_bad_rows=True)."
)


class RowError(ValueError):
    """What is wrong with one row: what was expected, what came."""

    def __init__(self, problem: str, line: int = 1) -> None:
        super().__init__(problem)
        self.line = line
        """Where in the text that was parsed."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    where: str
    """``train.jsonl:3``, ``train.parquet row 3`` (both counted from 1) or ``rows[3]``."""
    problem: str
    """What was expected, what came."""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class BadRows(ValueError):  # noqa: N818
    """Every bad row of the data, in one message."""

    def __init__(self, bad: Sequence[BadRow], advice: str = ADVICE) -> None:
        lines = [f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}:"]
        lines += [str(row) for row in bad[:SHOWN]]
        if len(bad) > SHOWN:
            lines.append(f"and {len(bad) - SHOWN} more")
        super().__init__("\n".join([*lines, advice]))
        self.bad = tuple(bad)


MARK = "<image>"
ROLES = ("system", "user", "assistant")
_EXTRA = "extra_info"
_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Keys:
    """Under which keys a row holds what; the first that is filled counts.

    A dot leads into a nested object. The answer letter of a multiple-choice set, for example, is
    ``Keys(answer=("answer",))`` where ``ground_truth`` has its text.
    """

    question: tuple[str, ...] = ("prompt", "problem", "question")
    """A text, or chat messages."""
    answer: tuple[str, ...] = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
    images: tuple[str, ...] = ("images", "image")
    id: tuple[str, ...] = ("id", "unique_id")
    """Must differ from row to row."""
    index: tuple[str, ...] = ("index", "extra_info.index", "extra_info.id")
    """The id of rows without one; verl counts anew in each file, so it need not differ."""


@dataclass(frozen=True)
class Parts:
    """A row taken apart: pictures not yet looked for."""

    messages: list[dict[str, str]]
    images: list[object]
    answer: str | None
    id: str | None
    index: str | None
    columns: dict[str, Any]


def take_apart(
    row: object, keys: Keys, answer_pattern: re.Pattern[str] | None, one_answer: bool = False
) -> Parts:
    """The row's parts, or a RowError that says what was expected and what came."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, {{…}}, with the row's keys; got {shown(row)}")
    asked, question = _first(row, keys.question)
    if question is None:
        raise RowError(
            f"expected a question under {_either(keys.question)}; got {_came(row, keys.question)}"
        )
    messages, inside = _messages(question)
    _, value = _first(row, keys.images)
    images = _as_list(value)
    if images and inside:
        raise RowError(
            f"expected the pictures in the messages or under {_either(keys.images)}; got "
            f"{len(inside)} there and {len(images)} here"
        )
    images = images or inside
    return Parts(
        _marked(messages, len(images)),
        images,
        _answer(row, keys.answer, answer_pattern, one_answer),
        _name(_first(row, keys.id)),
        _name(_first(row, keys.index)),
        _columns(row, {asked, *keys.images, *keys.id}),
    )


def missing_columns(columns: Iterable[str], keys: Keys, need_answer: bool) -> str | None:
    """What a table lacks, told once instead of row by row."""
    columns = list(columns)
    needed = {"question": keys.question} | ({"answer": keys.answer} if need_answer else {})
    for what, names in needed.items():
        if not any(name in columns or name.partition(".")[0] in columns for name in names):
            return f"expected a column with the {what}, {_either(names)}; got {listed(columns)}"
    return None


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, object]:
    """The first key that holds something, and what; None if there is none."""
    for key in keys:
        value = _plain(_look_up(row, key))
        if not _is_blank(value):
            return key, value
    return "", None


def _look_up(row: Mapping[str, Any], key: str) -> object:
    if key in row:
        return row[key]
    outer, _, inner = key.partition(".")
    nested = row.get(outer) if inner else None
    return nested.get(inner) if isinstance(nested, Mapping) else None


def _plain(value: Any) -> object:
    """Arrays and numbers of NumPy, as pandas hands them out, to lists and numbers of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_blank(value: object) -> bool:
    match value:
        case None:
            return True
        case str():
            return not value.strip()
        case float():
            return value != value  # pandas: NaN for a missing value
        case list() | tuple():
            return len(value) == 0
        case {"bytes": None, "path": None}:
            return True
    return False


def _either(keys: tuple[str, ...]) -> str:
    return " or ".join(f"'{key}'" for key in keys)


def _came(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        if key in row:
            return f"an empty prompt: '{key}' is {shown(row[key])}"
    return f"the keys {listed(row)}"


def _messages(question: object) -> tuple[list[dict[str, str]], list[object]]:
    """Chat messages with text alone, and the pictures that lay between the text."""
    if isinstance(question, str):
        question = [{"role": "user", "content": question}]
    if not isinstance(question, list | tuple):
        raise RowError(f"expected a text or chat messages as prompt; got {shown(question)}")
    messages, images = [], []
    for number, message in enumerate(question, start=1):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RowError(
                f"expected message {number} as {{'role', 'content'}}; got {shown(message)}"
            )
        role = message["role"]
        if role not in ROLES:
            raise RowError(
                f"expected the role {', '.join(ROLES[:-1])} or {ROLES[-1]} in message {number}; "
                f"got {shown(role)}"
            )
        content, inside = _content(_plain(message["content"]), number)
        messages.append({"role": role, "content": content})
        images += inside
    last = messages[-1]
    if last["role"] != "user":
        raise RowError(f"expected the last message from the user; got the role '{last['role']}'")
    if not last["content"].strip():
        raise RowError("expected a question in the last message; got an empty prompt")
    return messages, images


def _content(content: object, number: int) -> tuple[str, list[object]]:
    if isinstance(content, str):
        return _text(content, f"message {number}"), []
    if not isinstance(content, list | tuple):
        raise RowError(
            f"expected text, or a list of parts, in message {number}; got {shown(content)}"
        )
    texts, images = [], []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(_text(text, f"message {number}"))
            case {"type": "image" | "image_url" as kind}:
                texts.append(MARK)
                inside = [part.get(key) for key in (kind, "image", "url", "path", "bytes")]
                images += [value for value in inside if not _is_blank(value)][:1]
            case _:
                raise RowError(
                    f"expected the parts {{'type': 'text', 'text': …}} and {{'type': 'image'}} in "
                    f"message {number}; got {shown(part)}"
                )
    return "".join(texts), images


def _marked(messages: list[dict[str, str]], num_images: int) -> list[dict[str, str]]:
    """The messages with one mark per picture.

    Where there is none at all, the marks open the first user message without anything between,
    as TRL lays out rows whose messages are plain text.
    """
    marks = sum(message["content"].count(MARK) for message in messages)
    if num_images and not marks:
        first = next(message for message in messages if message["role"] == "user")
        first["content"] = MARK * num_images + first["content"]
    elif marks != num_images:
        raise RowError(
            f"expected one {MARK} in the prompt per picture; got {marks} {MARK} and {num_images} "
            f"picture{'' if num_images == 1 else 's'}"
        )
    return messages


def _as_list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(
            f"expected Unicode text in {where}; got half a surrogate pair, {shown(text)}"
        ) from None
    return text


def _answer(
    row: Mapping[str, Any],
    keys: tuple[str, ...],
    pattern: re.Pattern[str] | None,
    one_answer: bool,
) -> str | None:
    key, value = _first(row, keys)
    if one_answer:
        value = _only(value, key)
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = _text(text, f"'{key}'").strip()
    if pattern is not None:
        return _matched(text, pattern, key)
    return text if key.endswith("ground_truth") else _final_answer(text)


def _only(value: object, key: str) -> object:
    """Return the answer; unwrap a list with one element."""
    if hasattr(value, "tolist"):  # numpy values, as pandas reads them
        value = value.tolist()
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, list | tuple | Mapping):
        kind = "an object" if isinstance(value, Mapping) else f"a list of {len(value)}"
        raise RowError(
            f"expected one answer, a text or a number, under '{key}'; got {kind}, {shown(value)}, "
            f"which no response can equal. Keep one, or grade with your own function "
            f"(reward: file.py:function), which gets the row's value unchanged"
        )
    return value


def _matched(text: str, pattern: re.Pattern[str], key: str) -> str:
    group = 1 if pattern.groups else 0
    found = [match[group] for match in pattern.finditer(text) if match[group]]
    if not found:
        raise RowError(
            f"expected an answer that matches {shown(pattern.pattern)} under '{key}'; got "
            f"{shown(text)}"
        )
    return found[-1].strip()


def _final_answer(text: str) -> str:
    r"""The end of a worked solution: ``#### 18`` as in GSM8K, the last ``\boxed{}``, or all."""
    *_, last_line = text.rpartition("\n")
    _, hashes, final = (part.strip() for part in last_line.rpartition("####"))
    if hashes and final:
        return final.replace(",", "") if _THOUSANDS.fullmatch(final) else final
    return _last_boxed(text) or text


def _last_boxed(text: str) -> str | None:
    opening = r"\boxed{"
    start = text.rfind(opening)
    if start < 0:
        return None
    depth, place = 1, start + len(opening)
    first = place
    while place < len(text):
        match text[place]:
            case "\\":
                place += 1  # an escaped brace opens nothing
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if depth == 0:
            return text[first:place].strip()
        place += 1
    return None


def _name(found: tuple[str, object]) -> str | None:
    key, value = found
    if isinstance(value, float) and value.is_integer():  # pandas, where some rows have none
        value = int(value)
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value is None else str(value)
    raise RowError(f"expected a text or a whole number under '{key}'; got {shown(value)}")


def _columns(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    """The rest of the row; verl's extra_info is opened, and gives way to the row's own keys."""
    extra = row.get(_EXTRA)
    if not isinstance(extra, Mapping):
        return {key: value for key, value in row.items() if key not in used}
    own = {key: value for key, value in row.items() if key not in used and key != _EXTRA}
    return {**extra, **own}
