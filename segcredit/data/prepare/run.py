"""The whole of it: find the splits, read and compare every row, write what is good."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from segcredit.data.formats import MARK, BadRow, BadRows
from segcredit.data.prepare.rows import (
    OWN_EXTRAS,
    PICTURE,
    Item,
    Kinds,
    LeftOut,
    Making,
    RowWriter,
    parquet_row,
    schema,
)
from segcredit.data.prepare.sources import OWN, Columns, DataSet, Part, choose, find_parts, in_order
from segcredit.data.readers import Found, no_rows
from segcredit.models.images import PictureError, check_image, open_image
from segcredit.printable import listed, named, printable, shown
from segcredit.runlog.files import replacing

USUAL_LIMIT = 1024


class TextLengths:
    """Counts by a tokenizer, its chat template included."""

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        except Exception as error:  # it raises whatever the file made it stumble
            raise ValueError(
                f"--tokenizer: expected a folder with a tokenizer, or a model's id on the Hub; "
                f"{shown(tokenizer)} cannot be loaded: {printable(str(error), 200)}"
            ) from None

    def count(self, messages: Sequence[dict[str, str]]) -> int:
        """Tokens of a prompt without its pictures."""
        plain = [
            {"role": message["role"], "content": message["content"].replace(MARK, "")}
            for message in messages
        ]
        if not self._tokenizer.chat_template:
            text = "\n".join(message["content"] for message in plain)
            return len(self._tokenizer(text)["input_ids"])
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may refuse system messages, for example
            raise ValueError(
                f"--tokenizer: its chat template refuses a prompt: {printable(str(error), 200)}"
            ) from None
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


_COMPARED_BYTES = 2**23
"""Larger encoded pictures are compared by their bytes alone."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests of one row."""

    question: bytes
    files: tuple[bytes, ...]
    """Of the encoded pictures."""
    pictures: tuple[bytes, ...]
    """Of their pixels, as a model sees them: the same drawing saved twice is the same."""

    @property
    def pairs(self) -> set[tuple[bytes, bytes]]:
        """The question with each of its pictures, or with none."""
        return {(self.question, picture) for picture in self.pictures or (b"",)}


class Fingerprints:
    """Takes fingerprints; a picture that occurs often is decoded once."""

    def __init__(self) -> None:
        self._pixels: dict[bytes, bytes] = {}

    def of(self, item: Item) -> Fingerprint:
        """The row's fingerprint; LeftOut if a picture of it cannot be decoded."""
        files, pictures = [], []
        for number, picture in enumerate(item.pictures, start=1):
            file = _digest(picture.content)
            if file not in self._pixels:
                try:
                    self._pixels[file] = _pixels(picture.content, file)
                except PictureError as error:
                    num = len(item.pictures)
                    which = f"picture {number} of {num}: " if num > 1 else ""
                    raise LeftOut(PICTURE, f"{which}{error}") from None
            files.append(file)
            pictures.append(self._pixels[file])
        question = _digest(normalised(_said(item)).encode())
        return Fingerprint(question, tuple(files), tuple(pictures))


def _said(item: Item) -> str:
    """The question, and what was said before it."""
    before = [said["content"] for said in item.messages[:-1] if said["role"] != "system"]
    return " ".join([*before, item.question])


def normalised(question: str) -> str:
    """Wording alone: no marks of pictures, no capitals, single spaces, one form of each sign."""
    text = unicodedata.normalize("NFC", question.replace(MARK, " "))
    return " ".join(text.casefold().split())


def _pixels(content: bytes, file: bytes) -> bytes:
    if len(content) > _COMPARED_BYTES:
        check_image(content)
        return file
    image = open_image(content)
    return _digest(repr(image.size).encode(), image.tobytes())


def _digest(*contents: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for content in contents:
        digest.update(content)
    return digest.digest()


TRAIN = "train"


@dataclass(frozen=True)
class Shared:
    """How many rows are not new, in each of four senses."""

    split: str
    """The rows that are counted."""
    within: str
    """Among which an equal one is looked for: another split, or the rows before it."""
    rows: int
    question: int
    """The same wording."""
    file: int
    """A picture with the same bytes."""
    picture: int
    """A picture with the same pixels."""
    both: int
    """The same wording and the same picture (or none) in one row."""


class _Seen:
    """What rows have shown so far."""

    def __init__(self, rows: Iterable[Fingerprint] = ()) -> None:
        self.questions: set[bytes] = set()
        self.files: set[bytes] = set()
        self.pictures: set[bytes] = set()
        self.pairs: set[tuple[bytes, bytes]] = set()
        for row in rows:
            self.add(row)

    def add(self, row: Fingerprint) -> None:
        self.questions.add(row.question)
        self.files.update(row.files)
        self.pictures.update(row.pictures)
        self.pairs.update(row.pairs)

    def compare(self, row: Fingerprint) -> tuple[bool, bool, bool, bool]:
        return (
            row.question in self.questions,
            not self.files.isdisjoint(row.files),
            not self.pictures.isdisjoint(row.pictures),
            not self.pairs.isdisjoint(row.pairs),
        )


def find_shared(splits: Mapping[str, Sequence[Fingerprint]]) -> list[Shared]:
    """Held-out rows that training data has, then rows that repeat an earlier one of their split."""
    train = _Seen(splits.get(TRAIN, ()))
    across = [
        _counted(split, TRAIN, [train.compare(row) for row in rows])
        for split, rows in splits.items()
        if split != TRAIN and TRAIN in splits
    ]
    return across + [_repeated(split, rows) for split, rows in splits.items()]


def leaking(splits: Mapping[str, Sequence[Fingerprint]]) -> set[int]:
    """The training rows whose question and picture a held-out row has, by their place."""
    held_out = _Seen(row for split, rows in splits.items() if split != TRAIN for row in rows)
    return {
        place
        for place, row in enumerate(splits.get(TRAIN, ()))
        if not held_out.pairs.isdisjoint(row.pairs)
    }


def _repeated(split: str, rows: Sequence[Fingerprint]) -> Shared:
    seen, found = _Seen(), []
    for row in rows:
        found.append(seen.compare(row))
        seen.add(row)
    return _counted(split, split, found)


def _counted(split: str, within: str, found: Sequence[tuple[bool, bool, bool, bool]]) -> Shared:
    question, file, picture, both = (sum(row[sense] for row in found) for sense in range(4))
    return Shared(split, within, len(found), question, file, picture, both)


@dataclass
class SplitReport:
    """One split, one file."""

    name: str
    path: Path
    """What was written."""
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Bad rows by reason."""
    dropped: int = 0
    """Training rows that held-out data has as well."""
    written: int = 0
    pictures: int = 0
    over_long: int = 0
    """Prompts whose text alone is beyond the limit."""
    longest: int = 0
    """Tokens of the longest text."""


@dataclass
class Report:
    """The whole of it."""

    data_sources: list[str]
    """Names of the rows' origin, by which verl chooses a scorer."""
    reward: str | None
    """Which reward of ours grades the answers, if the data set is a known one."""
    splits: list[SplitReport] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    leaking: int = 0
    """Training rows whose question and picture held-out data has, dropped or not."""
    max_prompt_tokens: int | None = None
    """The limit that the lengths were compared to; None: not counted."""

    @property
    def with_pictures(self) -> bool:
        """Whether any row has one."""
        return any(split.pictures for split in self.splits)


Watch = Callable[[str], None]
"""Is told what is being done."""


@dataclass
class Scan:
    """What the first reading of all splits has learnt."""

    columns: Columns
    lengths: TextLengths | None
    max_prompt_tokens: int
    kinds: Kinds = field(default_factory=Kinds)
    bad: list[BadRow] = field(default_factory=list)
    data_sources: dict[str, None] = field(default_factory=dict)
    """In the order of their first row."""
    rows: dict[str, list[Fingerprint]] = field(default_factory=dict)
    """The good rows of each split."""
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """And their numbers, from 0 on, among all rows of the split."""
    _fingerprints: Fingerprints = field(default_factory=Fingerprints)

    def read(self, report: SplitReport, parts: list[tuple[Part, Making]], watch: Watch) -> None:
        """All rows of a split."""
        rows = self.rows.setdefault(report.name, [])
        numbers = self.numbers.setdefault(report.name, [])
        seen: dict[str, dict[str, None]] = {}  # file → its columns
        for part, making, number, found in all_rows(parts):
            columns = seen.setdefault(part.source.name, {})
            if isinstance(found.content, Mapping):
                columns.update(dict.fromkeys(map(str, found.content)))
            report.read += 1
            if report.read % 100 == 0:
                watch(f"reading {report.name}, row {report.read}")
            try:
                item = making.item(found, part.source.folder, number)
                fingerprint = self._fingerprints.of(item)
            except LeftOut as error:
                report.left_out[error.reason] += 1
                self.bad.append(BadRow(printable(found.where), str(error)))
                continue
            rows.append(fingerprint)
            numbers.append(number)
            self._note(item, report)
        self._check_columns(parts, seen)

    def _note(self, item: Item, report: SplitReport) -> None:
        report.pictures += len(item.pictures)
        self.kinds.see(item.kept)
        self.data_sources[item.data_source] = None
        if self.lengths is not None:
            length = self.lengths.count(item.messages)
            report.longest = max(report.longest, length)
            report.over_long += length > self.max_prompt_tokens

    def _check_columns(
        self, parts: list[tuple[Part, Making]], seen: dict[str, dict[str, None]]
    ) -> None:
        for part, _ in parts:
            source = part.source
            if source.name not in seen:
                raise no_rows(source.name)
            if seen[source.name]:
                self.columns.check(source.name, list(seen[source.name]))


def all_rows(parts: list[tuple[Part, Making]]) -> Iterator[tuple[Part, Making, int, Found]]:
    """The rows of a split, numbered through from 0 on."""
    number = 0
    for part, making in parts:
        for found in part.source.rows():
            yield part, making, number, found
            number += 1


Splits = dict[str, list[tuple[Part, Making]]]


def prepare(
    what: str | Sequence[str],
    output: str | Path,
    *,
    source: str | Sequence[str] = (),
    config: str | None = None,
    columns: Columns | None = None,
    suffix: str | None = None,
    data_source: str | None = None,
    tokenizer: str | None = None,
    max_prompt_tokens: int | None = None,
    drop_duplicates: bool = False,
    skip_bad_rows: bool = False,
    allow_outside: bool = False,
    force: bool = False,
    watch: Watch = lambda what: None,
) -> Report:
    """Write ``train.parquet``, ``test.parquet`` … in verl's format; say what was in the data.

    Args:
        what: ``"geo3k"``, ``"gsm8k"``, ``"math"``; or files, folders or ids on the Hub of any
            rows that the loader reads. ``"test=FILE"`` says which split a file is.
        output: The folder to write into.
        source: Where the rows of a known data set lie, if not on the Hub: files, folders, ids.
        config: The part of a data set that has several.
        columns: The columns that hold question, answer and picture, if their names are unusual.
        suffix: Put behind every question; None: what verl puts there.
        data_source: The name by which verl chooses a scorer; None: what fits the data.
        tokenizer: Counts the tokens of every prompt's text.
        max_prompt_tokens: Longer texts are counted in the report.
        drop_duplicates: Leave out training rows whose question and picture held-out data has.
        skip_bad_rows: Leave bad rows out instead of raising BadRows.
        allow_outside: Allow rows to name images outside the folder of their file.
        force: Overwrite.
        watch: Is told what is being done.
    """
    folder, columns = Path(output), columns or Columns()
    _check_settings(columns, tokenizer, max_prompt_tokens)
    chosen, places = choose(_as_list(what), _as_list(source))
    splits = _find(chosen, places, config, columns, suffix, data_source, allow_outside)
    _check_output(folder, splits, force)
    scan = Scan(
        columns,
        None if tokenizer is None else TextLengths(tokenizer),
        max_prompt_tokens or USUAL_LIMIT,
    )
    reports = [SplitReport(name, folder / f"{name}.parquet") for name in splits]
    for report in reports:
        scan.read(report, splits[report.name], watch)
    if scan.bad and not skip_bad_rows:
        raise BadRows(scan.bad)
    found = Report(
        list(scan.data_sources),
        chosen.reward,
        reports,
        find_shared(scan.rows),
        scan.bad,
        max_prompt_tokens=scan.max_prompt_tokens if tokenizer is not None else None,
    )
    leaks = leaking(scan.rows)
    found.leaking = len(leaks)
    wanted = _wanted(scan, leaks if drop_duplicates else set())
    for report in reports:
        report.dropped = len(scan.numbers[report.name]) - len(wanted[report.name])
        if not wanted[report.name]:
            raise BadRows(scan.bad, f"No row is left for {report.path.name}.")
    _write(found, splits, wanted, scan, watch)
    return found


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_settings(columns: Columns, tokenizer: str | None, limit: int | None) -> None:
    for name in columns.keep:
        if name in OWN_EXTRAS:
            raise ValueError(
                f"--keep: extra_info has {listed(OWN_EXTRAS)} of its own; got '{name}'. Leave it "
                f"out, or rename the column."
            )
    if limit is not None and limit < 1:
        raise ValueError(f"--max-prompt-tokens must be at least 1; got {limit}.")
    if limit is not None and tokenizer is None:
        raise ValueError(
            "--max-prompt-tokens needs a tokenizer to count with: --tokenizer FOLDER, or a "
            "model's id on the Hub."
        )


def _find(
    chosen: DataSet,
    places: list[str],
    config: str | None,
    columns: Columns,
    suffix: str | None,
    data_source: str | None,
    allow_outside: bool,
) -> Splits:
    """The parts of each split, and how their rows become items."""
    splits: Splits = {}
    for place in places:
        for part in find_parts(place, config, chosen.config):
            making = Making(
                keys=columns.keys(),
                rule=chosen.named_rule if columns.answer else chosen.rule,
                suffix=chosen.suffix if suffix is None else suffix,
                data_source=data_source or chosen.data_source(part.place),
                keep_data_source=chosen is OWN and data_source is None,
                keep=(*chosen.keep, *columns.keep),
                allow_outside=allow_outside,
            )
            splits.setdefault(part.split, []).append((part, making))
    paths = [part.path.resolve() for parts in splits.values() for part, _ in parts if part.path]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"expected each file once; got {named(path)} twice.")
    return {split: splits[split] for split in sorted(splits, key=in_order)}


def _check_output(folder: Path, splits: Splits, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: expected a folder; got the file {named(folder)}.")
    inputs = {part.path.resolve() for parts in splits.values() for part, _ in parts if part.path}
    outputs = [folder / f"{split}.parquet" for split in splits]
    for path in outputs:
        if path.resolve() in inputs:
            raise ValueError(
                f"{named(path)} would be read and written at once. Choose another folder: -o FOLDER"
            )
    there = [path.name for path in outputs if path.exists()]
    if there and not force:
        raise ValueError(
            f"{named(folder)} has {listed(there)} already. Overwrite: --force; or choose another "
            f"folder: -o FOLDER"
        )


def _wanted(scan: Scan, leaks: set[int]) -> dict[str, list[int]]:
    """The numbers of the rows that are written."""
    wanted = dict(scan.numbers)
    if leaks:
        kept = [number for place, number in enumerate(wanted[TRAIN]) if place not in leaks]
        wanted[TRAIN] = kept
    return wanted


def _write(
    found: Report, splits: Splits, wanted: dict[str, list[int]], scan: Scan, watch: Watch
) -> None:
    """All files under other names first: an error in reading or writing leaves none behind."""
    with_pictures = found.with_pictures
    columns = schema(scan.kinds, with_pictures)
    with ExitStack() as files:
        for report in found.splits:
            report.path.parent.mkdir(parents=True, exist_ok=True)
            writer = RowWriter(files.enter_context(replacing(report.path)), columns)
            files.callback(writer.close)
            numbers = set(wanted[report.name])
            for part, making, number, row_found in all_rows(splits[report.name]):
                if number not in numbers:
                    continue
                try:
                    item = making.item(row_found, part.source.folder, number)
                except LeftOut as error:
                    raise _changed(part) from error
                size = sum(len(picture.content) for picture in item.pictures)
                if item.pictures and not with_pictures:
                    raise _changed(part)
                writer.write(parquet_row(item, report.name, scan.kinds, with_pictures), size)
                report.written += 1
                if report.written % 100 == 0:
                    watch(f"writing {report.path.name}, row {report.written}")
            if report.written != len(numbers):
                raise _changed(part)
            writer.close()


def _changed(part: Part) -> ValueError:
    return ValueError(
        f"{named(part.source.name)} changed while it was read, so nothing was written. Type the "
        f"command again when nobody writes to it."
    )
