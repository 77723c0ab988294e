"""Find question, answer and images in a row as verl, TRL, EasyR1, GSM8K or MATH write it."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcredit.models.loading import WindowError
from segcredit.printable import listed, shown
from segcredit.rewards.extract import boxed

SHOWN = 20
SKIP = (
    "Repair these rows, or skip them: --skip-bad-rows; in Python, skip_bad_rows=True "
    "(Trainer: data={'train': …, 'skip_bad_rows': True})."
)
NOTHING_LEFT = (
    "Every row is bad, so skipping bad rows would leave nothing. If all rows have the same "
    "problem, look for it in the keys of the data or in the model's chat template."
)


class RowError(ValueError):
    """A problem with one row: what was expected, and what the row has instead."""

    def __init__(self, problem: str, line: int = 1) -> None:
        super().__init__(problem)
        self.line = line
        """Line of the problem in the text that was parsed."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, for the error message."""

    where: str
    """``train.jsonl:3``, ``train.parquet row 3`` (both counted from 1) or ``rows[3]``."""
    problem: str
    """What was expected, and what the row has instead."""
    cause: Exception | None = None
    """The error behind the problem."""

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


class BadRows(ValueError):  # noqa: N818
    """All bad rows of the data, the first 20 of them in the message."""

    def __init__(self, bad: Sequence[BadRow], advice: str = SKIP) -> None:
        lines = [f"{len(bad)} bad row{'s' if len(bad) > 1 else ''}:"]
        rest, long = _without_long(bad)
        if long is not None:
            lines.append(long)
            if advice == NOTHING_LEFT and not rest:
                advice = ""
        lines += [str(row) for row in rest[:SHOWN]]
        if len(rest) > SHOWN:
            lines.append(f"and {len(rest) - SHOWN} more")
        super().__init__("\n".join([*lines, *([advice] if advice else [])]))
        self.bad = tuple(bad)
        self.advice = advice


def _without_long(bad: Sequence[BadRow]) -> tuple[Sequence[BadRow], str | None]:
    """Replace rows whose prompt and longest response exceed the context window by a summary.

    Only if these are several rows and the majority, and a smaller response limit repairs them.
    Returns the other rows and the summary; without a summary, all rows and None.
    """
    long = {
        n: row.cause
        for n, row in enumerate(bad)
        if isinstance(row.cause, WindowError) and row.cause.tokens < row.cause.window
    }
    if len(long) < 2 or 2 * len(long) <= len(bad):
        return bad, None
    first = next(iter(long.values()))
    tokens = sorted(x.tokens for x in long.values())
    lengths = f"{tokens[0]} to {tokens[-1]}" if tokens[0] < tokens[-1] else f"{tokens[0]}"
    which = f"all {len(long)} rows" if len(long) == len(bad) else f"{len(long)} of these rows"
    setting = first.setting.strip(" =")
    return [row for n, row in enumerate(bad) if n not in long], (
        f"{which}: set {setting} to {first.window - tokens[-1]} or less. Their prompts have "
        f"{lengths} tokens, which with {first.setting}{first.max_tokens} exceed the model's "
        f"context window of {first.window}"
    )


MARK = "<image>"
ROLES = ("system", "user", "assistant")
_EXTRA = "extra_info"
_THOUSANDS = re.compile(r"[-+$]*\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Keys:
    """Keys under which rows hold each part; the first key with a value is used.

    A dot selects a key of a nested object. For example, ``Keys(answer=("answer",))`` reads the
    letter of a multiple-choice set whose ``ground_truth`` is the text of the choice.
    """

    question: tuple[str, ...] = ("prompt", "problem", "question")
    """Key of a text, or of chat messages."""
    answer: tuple[str, ...] = ("reward_model.ground_truth", "ground_truth", "answer", "solution")
    images: tuple[str, ...] = ("images", "image")
    id: tuple[str, ...] = ("id", "unique_id")
    """Key of an id, which must be unique."""
    index: tuple[str, ...] = ("index", "extra_info.index", "extra_info.id")
    """Key of an id for rows without one; it need not be unique, because verl restarts it in each
    file."""


@dataclass(frozen=True)
class RowParts:
    """The parts of a row; images are still in the row's own format, not yet decoded."""

    messages: list[dict[str, str]]
    images: list[object]
    answer: str | None
    id: str | None
    index: str | None
    columns: dict[str, Any]


def split_row(
    row: object, keys: Keys, answer_pattern: re.Pattern[str] | None, one_answer: bool = False
) -> RowParts:
    """Split a row into its parts; raise RowError if a part is missing or malformed."""
    if not isinstance(row, Mapping):
        raise RowError(f"expected an object, {{…}}, with the row's keys; got {shown(row)}")
    asked, question = _first(row, keys.question)
    if question is None:
        raise RowError(
            f"expected a question under {either(keys.question)}; got {_came(row, keys.question)}"
        )
    messages, inside = _messages(question)
    _, value = _first(row, keys.images)
    images = _as_list(value)
    if images and inside:
        raise RowError(
            f"expected images either in the messages or under {either(keys.images)}; got "
            f"{len(inside)} in the messages and {len(images)} under the key"
        )
    images = images or inside
    return RowParts(
        _marked(messages, len(images)),
        images,
        _answer(row, keys.answer, answer_pattern, one_answer),
        _id(*_first(row, keys.id)),
        _id(*_first(row, keys.index)),
        _columns(row, {asked, *keys.images, *keys.id}),
    )


def missing_columns(columns: Iterable[str], keys: Keys, need_answer: bool) -> str | None:
    """Describe which required column a table lacks; None if it has all."""
    columns = list(columns)
    needed = {"question": keys.question} | ({"answer": keys.answer} if need_answer else {})
    for what, names in needed.items():
        if not any(name in columns or name.partition(".")[0] in columns for name in names):
            return f"expected a column with the {what}, {either(names)}; got {listed(columns)}"
    return None


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, object]:
    """Return the first key with a value, and the value; ``("", None)`` if there is none."""
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
    """Convert NumPy arrays and numbers, as pandas returns them, to lists and Python numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_blank(value: object) -> bool:
    match value:
        case None:
            return True
        case str():
            return not value.strip()
        case float():
            return value != value  # pandas has NaN for a missing value
        case list() | tuple():
            return len(value) == 0
        case {"bytes": None, "path": None}:
            return True
    return False


def either(keys: tuple[str, ...]) -> str:
    """Return the keys in quotes, joined by "or"."""
    return " or ".join(f"'{key}'" for key in keys)


def _came(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        if key in row:
            return f"an empty prompt: '{key}' is {shown(row[key])}"
    return f"the keys {listed(row)}"


def no_answer(row: object, keys: tuple[str, ...]) -> str:
    """Say which keys may hold the answer, and which keys a row without them has."""
    names = row if isinstance(row, Mapping) else ()
    empty = any(name in names or name.partition(".")[0] in names for name in keys)
    came = "none" if empty else f"the keys {listed(names)}"
    return f"expected an answer under {either(keys)}; got {came}"


def _messages(question: object) -> tuple[list[dict[str, str]], list[object]]:
    """Return chat messages with plain text, and the images that were in their content."""
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
        return check_text(content, f"message {number}"), []
    if not isinstance(content, list | tuple):
        raise RowError(
            f"expected text, or a list of parts, in message {number}; got {shown(content)}"
        )
    texts, images = [], []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(check_text(text, f"message {number}"))
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
    """Return the messages with one ``<image>`` per image.

    If there is none at all, they are put at the start of the first user message, as TRL does with
    messages of plain text.
    """
    marks = sum(message["content"].count(MARK) for message in messages)
    if num_images and not marks:
        first = next(message for message in messages if message["role"] == "user")
        first["content"] = MARK * num_images + first["content"]
    elif marks != num_images:
        raise RowError(
            f"expected one {MARK} in the prompt per image; got {marks} {MARK} and {num_images} "
            f"image{'' if num_images == 1 else 's'}"
        )
    return messages


def _as_list(value: object) -> list[object]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def check_text(text: str, where: str) -> str:
    """Return the text; raise RowError if UTF-8 cannot encode it (JSON may contain such text)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(
            f"expected Unicode text in {where}; got half a surrogate pair, {shown(text)}"
        ) from None
    return text


def as_text(value: object) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def append_suffix(messages: list[dict[str, str]], suffix: str | None) -> None:
    """Append a suffix, after a space, to a last message that does not end with it."""
    if suffix and not messages[-1]["content"].endswith(suffix):
        messages[-1]["content"] += f" {suffix}"


def image_problem(error: Exception, number: int, count: int) -> str:
    """Describe the problem of an image, with its number if the row has several."""
    return f"image {number} of {count}: {error}" if count > 1 else str(error)


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
    text = check_text(as_text(value), f"'{key}'").strip()
    if pattern is not None:
        return _matched(text, pattern, key)
    return text if key.endswith("ground_truth") else _final_answer(text)


def _only(value: object, key: str) -> object:
    """Return the answer; unwrap a list with one element."""
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
    r"""Return ``#### 18`` of the last line (GSM8K), else the last ``\boxed{}``, else all text."""
    *_, last_line = text.rpartition("\n")
    _, hashes, final = (part.strip() for part in last_line.rpartition("####"))
    if hashes and final:
        return final.replace(",", "") if _THOUSANDS.fullmatch(final) else final
    return boxed(text) or text


def _id(key: str, value: object) -> str | None:
    if isinstance(value, float) and value.is_integer():  # pandas, if some rows have none
        value = int(value)
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value is None else str(value)
    raise RowError(f"expected a text or a whole number under '{key}'; got {shown(value)}")


def _columns(row: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    """Return the unused columns of a row, and the keys of its ``extra_info`` as columns.

    If a key is also a column, the column takes precedence.
    """
    extra = row.get(_EXTRA)
    if not isinstance(extra, Mapping):
        return {key: value for key, value in row.items() if key not in used}
    own = {key: value for key, value in row.items() if key not in used and key != _EXTRA}
    return {**extra, **own}
