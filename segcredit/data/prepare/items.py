"""A row made ready: its messages, pictures and answer, or why it must be left out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcredit.data.formats import Keys, take_apart
from segcredit.data.images import as_source
from segcredit.data.prepare.answers import Rule
from segcredit.data.problems import RowError
from segcredit.data.readers import Found
from segcredit.images import PictureError
from segcredit.printable import printable, shown

UNREADABLE = "not readable"
NO_QUESTION = "empty question"
NO_ANSWER = "no answer"
PICTURE = "picture missing or broken"
OTHER = "other"
REASONS = (UNREADABLE, NO_QUESTION, NO_ANSWER, PICTURE, OTHER)
"""Why rows are left out, in the order of the report."""

OWN_EXTRAS = ("split", "index", "question")
"""Entries of extra_info that are not the row's to fill."""


class LeftOut(RowError):  # noqa: N818
    """A bad row, and of which kind."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


@dataclass(frozen=True)
class Picture:
    """An encoded picture, and the name its file had."""

    content: bytes
    name: str | None


@dataclass(frozen=True)
class Item:
    """One row as it will be written."""

    index: int
    messages: list[dict[str, str]]
    """The suffix included."""
    question: str
    """Without it."""
    answer: str
    pictures: list[Picture]
    data_source: str
    ability: str = "math"
    style: str = "rule"
    kept: dict[str, Any] = field(default_factory=dict)
    """Further entries of extra_info: the answer as the row has it, and what else is to stay."""


@dataclass(frozen=True)
class Making:
    """How rows become items."""

    keys: Keys
    rule: Rule
    suffix: str
    data_source: str
    """For rows that name none."""
    keep_data_source: bool
    """Whether a row's own name counts."""
    keep: tuple[str, ...]
    allow_outside: bool = False
    """Whether rows may name images outside the folder of their file."""

    def item(self, found: Found, folder: Path, index: int) -> Item:
        """The row as an item; LeftOut says why it is none."""
        row = found.content
        if isinstance(row, RowError):
            raise LeftOut(UNREADABLE, str(row))
        try:
            parts = take_apart(row, self.keys, None, one_answer=True)
            assert isinstance(row, Mapping)
        except RowError as error:
            raise LeftOut(_kind(error), str(error)) from None
        try:
            extra = _extra(row)
            answer = self._answer(row, parts.answer)
            return Item(
                index=_index(extra, index),
                messages=self._with_suffix(parts.messages),
                question=self._question(extra, parts.messages[-1]["content"]),
                answer=answer,
                pictures=_pictures(parts.images, folder, self.allow_outside),
                data_source=self._data_source(row),
                ability=_own_text(row, "ability") or "math",
                style=_own_text(row.get("reward_model"), "style") or "rule",
                kept={"answer": answer} | self._kept(row, extra),
            )
        except LeftOut:
            raise
        except RowError as error:
            raise LeftOut(OTHER, str(error)) from None

    def _with_suffix(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        last = messages[-1]["content"]
        if not self.suffix or last.endswith(self.suffix):
            return messages
        return [*messages[:-1], {**messages[-1], "content": f"{last} {self.suffix}"}]

    def _question(self, extra: Mapping[str, Any], content: str) -> str:
        own = _own_text(extra, "question")
        if own is not None:
            return own
        return content.removesuffix(f" {self.suffix}") if self.suffix else content

    def _answer(self, row: Mapping[str, Any], answer: str | None) -> str:
        try:
            found = self.rule(row, answer)
        except RowError as error:
            raise LeftOut(NO_ANSWER, str(error)) from None
        if found is None:
            names = " or ".join(f"'{key}'" for key in self.keys.answer)
            raise LeftOut(NO_ANSWER, f"expected an answer under {names}; got none")
        return found

    def _data_source(self, row: Mapping[str, Any]) -> str:
        own = _own_text(row, "data_source") if self.keep_data_source else None
        return own or self.data_source

    def _kept(self, row: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in extra.items() if name not in OWN_EXTRAS}
        kept |= {name: row[name] for name in self.keep if name in row}
        kept = {name: value for name, value in kept.items() if value is not None}
        for name, value in kept.items():
            _check_text(name, "a column's name")
            _check_text(value, f"'{printable(name, 60)}'")
        return kept


def _kind(error: RowError) -> str:
    said = str(error)
    if "an empty prompt" in said or said.startswith("expected a question under"):
        return NO_QUESTION
    return OTHER


def _extra(row: Mapping[str, Any]) -> Mapping[str, Any]:
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
    _check_text(value, f"'{key}'")
    return value


def _check_text(value: object, where: str) -> None:
    """Half a surrogate pair, which JSON can hold, cannot be written as UTF-8."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError(
            f"expected Unicode text in {where}; got half a surrogate pair, {shown(text)}"
        ) from None


def _pictures(values: list[object], folder: Path, outside: bool) -> list[Picture]:
    pictures = []
    for number, value in enumerate(values, start=1):
        try:
            source = as_source(value, folder, outside)
            content = source.read_bytes() if isinstance(source, Path) else source
        except (RowError, PictureError, OSError) as error:
            which = f"picture {number} of {len(values)}: " if len(values) > 1 else ""
            raise LeftOut(PICTURE, f"{which}{error}") from None
        pictures.append(Picture(content, _name(value, source)))
    return pictures


def _name(value: object, source: bytes | Path) -> str | None:
    """The name of the file, without folders, as the datasets library writes it."""
    if isinstance(source, Path):
        name = source.name
    else:
        own = value.get("path") if isinstance(value, Mapping) else None
        name = own.replace("\\", "/").rpartition("/")[2] if isinstance(own, str) else ""
    _check_text(name, "a picture's name")
    return name or None
