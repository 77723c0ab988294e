"""Load prompts from data files; check every row before training and report all bad ones at once."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict, Unpack

from segcredit.data.formats import (
    NOTHING_LEFT,
    BadRow,
    BadRows,
    Keys,
    RowError,
    RowParts,
    append_suffix,
    image_problem,
    missing_columns,
    no_answer,
    split_row,
)
from segcredit.data.images import as_source
from segcredit.data.readers import RawRow, Source, no_rows, open_source
from segcredit.models.images import ImageError, check_image
from segcredit.models.template import BrokenTemplate
from segcredit.printable import named, printable, shown
from segcredit.types import Prompt

THREADS, AHEAD = 8, 64
"""Maximum number of threads that check images, and of rows that they check at once."""
CountTokens = Callable[[Prompt], int]
"""Counts the tokens of a prompt, chat template and images included; raises ValueError if the model
cannot process the prompt."""
Measure = Callable[[Sequence[bytes | Path]], object]
"""Counts the tokens of images ahead of ``CountTokens``, in a thread."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of the data, and the rows that were skipped."""

    prompts: list[Prompt]
    bad: list[BadRow]
    """Bad rows; empty unless ``skip_bad_rows`` was set."""


class RowOptions(TypedDict, total=False):
    """Options of ``load_prompts`` and ``prompts_from_rows``."""

    limit: int | None
    """Maximum number of prompts; later rows are not read."""
    max_prompt_tokens: int | None
    """A longer prompt is a bad row; needs ``count_tokens``."""
    count_tokens: CountTokens | None
    """Called for every row; if it raises a ValueError, the row is bad."""
    measure: Measure | None
    """Called before, by several threads, with the images of a row, so that ``count_tokens`` is
    fast; a ValueError is ignored, because ``count_tokens`` raises it again."""
    skip_bad_rows: bool
    """Return bad rows in ``.bad`` instead of raising BadRows."""
    suffix: str | None
    """Appended, after a space, to a last user message that does not end with it."""
    system: str | None
    """System prompt, a message before the row's own; a row that has one is a bad row."""
    answer_pattern: str | None
    r"""Regular expression; the answer is its last match (the first group). By default the answer is
    ``ground_truth`` unchanged; in ``answer`` and ``solution`` it is what follows ``####`` in the
    last line, else the last ``\boxed{}``, else everything."""
    need_answer: bool
    """Whether a row without an answer is bad. Default: True."""
    one_answer: bool
    """Whether an object or a list of several answers is bad, because the reward compares one
    text."""
    keys: Keys | None
    """Keys of the rows, if they have other names."""


def load_prompts(
    paths: str | Path | Sequence[str | Path],
    *,
    allow_outside: bool = False,
    **options: Unpack[RowOptions],
) -> PromptSet:
    """Load prompts from parquet, Arrow, JSON and CSV files or from datasets on the Hub.

    Rows of verl, TRL, EasyR1, GSM8K and MATH load as they are; ``keys`` names other keys. If the
    messages contain no ``<image>``, the images come first in the first user message, as in TRL.
    ``Prompt.columns`` has all columns but the prompt, its images and its id; the keys of verl's
    ``extra_info`` become columns.

    Args:
        paths: Files, or datasets on the Hub: ``hub:owner/name/config:split@revision``.
        allow_outside: Whether rows may name images outside the folder of their file.
        **options: Options for rows, see ``RowOptions``.
    """
    names = [paths] if isinstance(paths, str | Path) else list(paths)
    if not names:
        raise ValueError("expected at least one data file; got none.")
    _refuse_duplicates(names)
    collector = _Collector(**options)
    sources = [replace(open_source(name), outside=allow_outside) for name in names]
    return collector.load(_with_unique_stems(sources))


def prompts_from_rows(
    rows: Iterable[Any], *, folder: str | Path | None = None, **options: Unpack[RowOptions]
) -> PromptSet:
    """Load prompts from dictionaries, which may contain PIL images, or from Prompts.

    Image paths are relative to ``folder`` (default: the working directory) and may lead anywhere.
    The options are those of ``RowOptions``.
    """

    def numbered() -> Iterator[RawRow]:
        for number, row in enumerate(rows):
            yield RawRow(f"rows[{number}]", number, row)

    source = Source("rows", "rows", Path(folder or ".").absolute(), None, numbered, outside=True)
    return _Collector(**options).load([source])


@dataclass
class _Collector:
    """Converts rows into prompts and collects the bad rows."""

    limit: int | None = None
    max_prompt_tokens: int | None = None
    count_tokens: CountTokens | None = None
    measure: Measure | None = None
    skip_bad_rows: bool = False
    suffix: str | None = None
    system: str | None = None
    answer_pattern: str | None = None
    need_answer: bool = True
    one_answer: bool = False
    keys: Keys | None = None
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("limit", "max_prompt_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(
                    f"{name} must be at least 1; got {number}. Leave it out to use all."
                )
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
        self._keys = self.keys or Keys()
        self._places: dict[str, str] = {}  # id → where
        self._checked: set[Path] = set()  # many rows may have the same image

    def load(self, sources: list[Source]) -> PromptSet:
        """Load the rows of all sources, up to the limit."""
        for source in sources:
            if self._full:
                break
            self._read(source)
        if not self.prompts:
            raise BadRows(self.bad, NOTHING_LEFT)
        if self.bad and not self.skip_bad_rows:
            raise BadRows(self.bad)
        return PromptSet(self.prompts, self.bad)

    @property
    def _full(self) -> bool:
        return self.limit is not None and len(self.prompts) >= self.limit

    def _read(self, source: Source) -> None:
        if source.columns is not None:
            problem = missing_columns(source.columns, self._keys, self.need_answer)
            if problem is not None:
                self.bad.append(BadRow(printable(source.name), problem))
                return
        empty = True
        for row, parsed in self._parsed(source):
            empty = False
            try:
                self.prompts.append(self._prompt(row, source, parsed))
            except RowError as error:
                cause = error.__cause__ if isinstance(error.__cause__, ValueError) else None
                self.bad.append(BadRow(printable(row.where), str(error), cause))
            except BrokenTemplate as error:  # every other row would fail, too
                raise BrokenTemplate(f"{printable(row.where)}: {error}") from None
            if self._full:
                return
        if empty:
            raise no_rows(source.name)

    def _parsed(self, source: Source) -> Iterator[tuple[RawRow, "_Parsed"]]:
        """Yield every row with its parts or its error; images are checked by several threads."""
        rows = source.rows()
        workers = min(THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            # no further ahead than the limit: later rows must not be read
            while some := list(islice(rows, AHEAD if self.limit is None else self._room)):
                parse = partial(self._parse, source)
                has_images = any(_may_have_images(row, self._keys) for row in some)
                # all of them before the first is used: chat templates are run in a forked process
                parsed = list((pool.map if has_images else map)(parse, some))
                yield from zip(some, parsed, strict=True)

    @property
    def _room(self) -> int:
        assert self.limit is not None
        return min(AHEAD, self.limit - len(self.prompts))

    def _parse(self, source: Source, row: RawRow) -> "_Parsed":
        """Split a row and check its images; this depends on no other row."""
        if isinstance(row.content, RowError | Prompt):
            return row.content
        try:
            parts = split_row(row.content, self._keys, self._pattern, self.one_answer)
            if parts.answer is None and self.need_answer:
                raise RowError(no_answer(row.content, self._keys.answer))
            append_suffix(parts.messages, self.suffix)
            self._add_system(parts)
            images = self._images(parts.images, source)
            if self.measure is not None and images:
                with suppress(ValueError):
                    self.measure(images)
            return parts, images
        except RowError as error:
            return error

    def _prompt(self, row: RawRow, source: Source, parsed: "_Parsed") -> Prompt:
        if isinstance(parsed, RowError):
            raise parsed
        if isinstance(parsed, Prompt):  # made in Python: used unchanged
            self._check_readable(parsed)
            return parsed
        parts, images = parsed
        prompt = Prompt(
            id=self._id(parts, f"{source.stem}:{row.number}"),
            messages=tuple(parts.messages),
            images=images,
            answer=parts.answer,
            columns=parts.columns,
            source=source.name,
        )
        self._check_readable(prompt)
        self._places[prompt.id] = row.where
        return prompt

    def _add_system(self, parts: RowParts) -> None:
        if self.system is None:
            return
        if any(message["role"] == "system" for message in parts.messages):
            raise RowError(
                "expected messages without a system prompt, since data.system sets one; got one "
                "in the row. Remove it there, or remove data.system"
            )
        parts.messages.insert(0, {"role": "system", "content": self.system})

    def _id(self, parts: RowParts, place: str) -> str:
        name = parts.id
        if name is None and parts.index not in self._places:
            name = parts.index
        name = place if name is None else name
        if name in self._places:
            raise RowError(
                f"expected a unique id; got {shown(name)}, the id of {self._places[name]}"
            )
        return name

    def _images(self, values: list[object], rows: Source) -> tuple[bytes | Path, ...]:
        sources = []
        for number, value in enumerate(values, start=1):
            try:
                source = as_source(value, rows.folder, rows.outside)
                if source not in self._checked:
                    check_image(source)
            except (RowError, ImageError) as error:
                raise RowError(image_problem(error, number, len(values))) from None
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
                f"expected a prompt the model can process; got {printable(str(error), 400)}"
            ) from error
        if self.max_prompt_tokens is not None and tokens > self.max_prompt_tokens:
            raise RowError(
                f"expected a prompt of at most {self.max_prompt_tokens} tokens; got {tokens}"
            )


_Parsed = RowError | Prompt | tuple[RowParts, tuple[bytes | Path, ...]]
"""A row's error, the prompt that it is, or its parts and images."""


def _may_have_images(row: RawRow, keys: Keys) -> bool:
    if not isinstance(row.content, Mapping):
        return False
    return any(row.content.get(key.partition(".")[0]) is not None for key in keys.images)


def _refuse_duplicates(names: Sequence[str | Path]) -> None:
    seen: set[Path] = set()
    for name in names:
        path = Path(name).absolute()
        if path in seen:
            raise ValueError(f"expected each file once; got {named(name)} twice.")
        seen.add(path)


def _with_unique_stems(sources: list[Source]) -> list[Source]:
    """Use the whole name as prefix of ids if two files have the same stem."""
    stems = [source.stem for source in sources]
    return [
        source if stems.count(source.stem) == 1 else replace(source, stem=source.name)
        for source in sources
    ]
