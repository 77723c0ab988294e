"""Prompts from data files: every row checked before training, every bad one told at once."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from segcredit.data.formats import (
    BadRow,
    BadRows,
    Keys,
    Parts,
    RowError,
    missing_columns,
    take_apart,
)
from segcredit.data.images import as_source
from segcredit.data.readers import Found, Source, no_rows, open_source
from segcredit.models.images import PictureError, check_image
from segcredit.models.template import BrokenTemplate
from segcredit.printable import named, printable, shown
from segcredit.types import Prompt

CountTokens = Callable[[Prompt], int]
"""How many tokens the model reads for a prompt, chat template and pictures included; a ValueError
says why it cannot be read."""


@dataclass(frozen=True)
class Loaded:
    """What the data held."""

    prompts: list[Prompt]
    bad: list[BadRow]
    """Left out, and why: empty unless bad rows are skipped."""


def load_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    count_tokens: CountTokens | None = None,
    skip_bad_rows: bool = False,
    suffix: str | None = None,
    answer_pattern: str | None = None,
    need_answer: bool = True,
    one_answer: bool = False,
    keys: Keys | None = None,
    allow_outside: bool = False,
) -> Loaded:
    r"""Prompts of .jsonl, .json and .parquet files, or of datasets on the Hub (``owner/name``).

    Rows of verl, TRL, EasyR1, GSM8K and MATH load as they are; ``keys`` names other keys. Where
    the messages hold no ``<image>`` at all, the pictures come first in the first user message,
    as in TRL. The whole row, less the prompt, its pictures and its id, is in ``Prompt.columns``,
    with verl's ``extra_info`` opened.

    Args:
        limit: At most so many prompts, the first ones; rows after them are not read.
        max_prompt_tokens: A longer prompt is a bad row; needs ``count_tokens``.
        count_tokens: Called for every row; if it raises a ValueError, the row is bad.
        skip_bad_rows: Return bad rows in ``.bad`` instead of raising BadRows.
        suffix: Joined by one space to the last user message that does not end so already.
        answer_pattern: The answer is the last match (its first group) of this regular expression.
            Without one: ``ground_truth`` as it is; of ``answer`` and ``solution`` what follows
            ``####`` in the last line, else the last ``\boxed{}``, else all.
        need_answer: Whether a row without an answer is bad.
        one_answer: Whether to reject answers that are an object or a list of several elements,
            because the reward compares one text.
        allow_outside: Whether rows may name images outside the folder of their file.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    if not names:
        raise ValueError("expected at least one data file; got none.")
    _refuse_twice(names)
    collector = _Collector(
        limit,
        max_prompt_tokens,
        count_tokens,
        suffix,
        answer_pattern,
        need_answer,
        one_answer,
        keys or Keys(),
    )
    sources = [replace(open_source(name), outside=allow_outside) for name in names]
    return collector.load(_with_own_stems(sources), skip_bad_rows)


def prompts_from_rows(
    rows: Iterable[Any],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    count_tokens: CountTokens | None = None,
    skip_bad_rows: bool = False,
    suffix: str | None = None,
    answer_pattern: str | None = None,
    need_answer: bool = True,
    one_answer: bool = False,
    keys: Keys | None = None,
) -> Loaded:
    """Load prompts from dictionaries in Python, with PIL images allowed, or from Prompts.

    Image paths are relative to ``folder`` (default: the working directory) and may lead anywhere.
    """
    collector = _Collector(
        limit,
        max_prompt_tokens,
        count_tokens,
        suffix,
        answer_pattern,
        need_answer,
        one_answer,
        keys or Keys(),
    )

    def found() -> Iterator[Found]:
        for number, row in enumerate(rows):
            yield Found(f"rows[{number}]", number, row)

    source = Source("rows", "rows", Path(folder or ".").absolute(), None, found, outside=True)
    return collector.load([source], skip_bad_rows)


@dataclass
class _Collector:
    """Rows in, prompts and bad rows out."""

    limit: int | None
    max_prompt_tokens: int | None
    count_tokens: CountTokens | None
    suffix: str | None
    answer_pattern: str | None
    need_answer: bool
    one_answer: bool
    keys: Keys
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("limit", "max_prompt_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}. Leave it out for all.")
        if self.max_prompt_tokens is not None and self.count_tokens is None:
            raise ValueError(
                "max_prompt_tokens needs count_tokens, a function from a Prompt to its number of "
                "tokens; got none."
            )
        try:
            self._pattern = None if self.answer_pattern is None else re.compile(self.answer_pattern)
        except re.error as error:
            raise ValueError(
                f"answer_pattern must be a regular expression; got {shown(self.answer_pattern)}: "
                f"{error}."
            ) from None
        self._places: dict[str, str] = {}  # id → where
        self._checked: set[Path] = set()  # one picture may serve many rows

    def load(self, sources: list[Source], skip_bad_rows: bool) -> Loaded:
        """All rows of all sources, up to the limit."""
        for source in sources:
            if self._full:
                break
            self._read(source)
        if self.bad and not skip_bad_rows:
            raise BadRows(self.bad)
        if not self.prompts:
            raise BadRows(self.bad, "No good row is left, so there is nothing to go on with.")
        return Loaded(self.prompts, self.bad)

    @property
    def _full(self) -> bool:
        return self.limit is not None and len(self.prompts) >= self.limit

    def _read(self, source: Source) -> None:
        if source.columns is not None:
            problem = missing_columns(source.columns, self.keys, self.need_answer)
            if problem is not None:
                self.bad.append(BadRow(printable(source.name), problem))
                return
        empty = True
        for found in source.rows():
            empty = False
            try:
                self.prompts.append(self._prompt(found, source))
            except RowError as error:
                self.bad.append(BadRow(printable(found.where), str(error)))
            except BrokenTemplate as error:  # all other rows would fail, too
                raise BrokenTemplate(f"{printable(found.where)}: {error}") from None
            if self._full:
                return
        if empty:
            raise no_rows(source.name)

    def _prompt(self, found: Found, source: Source) -> Prompt:
        if isinstance(found.content, RowError):
            raise found.content
        if isinstance(found.content, Prompt):  # made in Python: used unchanged
            self._check_readable(found.content)
            return found.content
        parts = take_apart(found.content, self.keys, self._pattern, self.one_answer)
        if parts.answer is None and self.need_answer:
            names = " or ".join(f"'{key}'" for key in self.keys.answer)
            raise RowError(f"expected an answer under {names}; got none")
        self._append_suffix(parts)
        prompt = Prompt(
            id=self._id(parts, f"{source.stem}:{found.number}"),
            messages=tuple(parts.messages),
            images=self._images(parts.images, source),
            answer=parts.answer,
            columns=parts.columns,
        )
        self._check_readable(prompt)
        self._places[prompt.id] = found.where
        return prompt

    def _append_suffix(self, parts: Parts) -> None:
        last = parts.messages[-1]
        if self.suffix and not last["content"].endswith(self.suffix):
            last["content"] += f" {self.suffix}"

    def _id(self, parts: Parts, place: str) -> str:
        name = parts.id
        if name is None and parts.index not in self._places:
            name = parts.index
        name = place if name is None else name
        if name in self._places:
            raise RowError(
                f"expected an id of its own; got {shown(name)}, the id of {self._places[name]}"
            )
        return name

    def _images(self, values: list[object], rows: Source) -> tuple[bytes | Path, ...]:
        sources = []
        for number, value in enumerate(values, start=1):
            try:
                source = as_source(value, rows.folder, rows.outside)
                if source not in self._checked:
                    check_image(source)
            except (RowError, PictureError) as error:
                which = f"picture {number} of {len(values)}: " if len(values) > 1 else ""
                raise RowError(f"{which}{error}") from None
            if isinstance(source, Path):
                self._checked.add(source)
            sources.append(source)
        return tuple(sources)

    def _check_readable(self, prompt: Prompt) -> None:
        if self.count_tokens is None:
            return
        try:
            tokens = self.count_tokens(prompt)
        except BrokenTemplate:
            raise
        except ValueError as error:
            raise RowError(
                f"expected a prompt the model can read; got {printable(str(error), 400)}"
            ) from error
        if self.max_prompt_tokens is not None and tokens > self.max_prompt_tokens:
            raise RowError(
                f"expected a prompt of at most {self.max_prompt_tokens} tokens; got {tokens}"
            )


def _refuse_twice(names: Sequence[str | Path]) -> None:
    seen: set[Path] = set()
    for name in names:
        path = Path(name).absolute()
        if path in seen:
            raise ValueError(f"expected each file once; got {named(name)} twice.")
        seen.add(path)


def _with_own_stems(sources: list[Source]) -> list[Source]:
    """Ids begin with the file's stem; with its whole name where two files share the stem."""
    stems = [source.stem for source in sources]
    return [
        source if stems.count(source.stem) == 1 else replace(source, stem=source.name)
        for source in sources
    ]
