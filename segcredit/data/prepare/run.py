"""Prepare datasets: find the splits, read and compare all rows, write the good ones."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcredit.data.formats import MARK, NOTHING_LEFT, SKIP, BadRow, BadRows, image_problem
from segcredit.data.overlap import ImageDigests, digest, image_digests, look_alike
from segcredit.data.prepare.rows import (
    IMAGE,
    OWN_EXTRAS,
    ColumnTypes,
    PreparedRow,
    RowFormat,
    RowWriter,
    SkipRow,
    parquet_row,
    schema,
)
from segcredit.data.prepare.sources import OWN, Columns, DataSet, Part, choose, find_parts, in_order
from segcredit.data.readers import RawRow, no_rows
from segcredit.models.images import ImageError, check_image
from segcredit.printable import listed, named, printable, shown
from segcredit.runlog.files import replacing

USUAL_LIMIT = 1024


class TextLengths:
    """Counts the tokens of prompts, chat template included."""

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        except Exception as error:  # damaged files raise exceptions of any class
            raise ValueError(
                f"--tokenizer: expected a folder with a tokenizer, or a model's id on the Hub; "
                f"{shown(tokenizer)} cannot be loaded: {printable(str(error), 200)}"
            ) from None

    def count(self, messages: Sequence[dict[str, str]]) -> int:
        """Return the number of tokens of a prompt without its images."""
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
"""Size from which images are compared by their bytes instead of their pixels."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests of one row, to find duplicates."""

    question: bytes
    files: tuple[bytes, ...]
    """Digests of the encoded images."""
    images: tuple[bytes, ...]
    """Digests of their pixels, which are the same if an image was saved twice."""
    edges: tuple[bytes, ...]
    """Their difference hashes, which are similar if images look alike."""

    @property
    def pairs(self) -> set[tuple[bytes, bytes]]:
        """Return (question, image) digest pairs; the image is empty for a text-only row."""
        return {(self.question, image) for image in self.images or (b"",)}


class Fingerprints:
    """Computes fingerprints; an image that occurs several times is decoded once."""

    def __init__(self) -> None:
        self._pictures: dict[bytes, ImageDigests] = {}

    def of(self, item: PreparedRow) -> Fingerprint:
        """Compute the fingerprint of a row; raise SkipRow if an image cannot be decoded."""
        files, pictures = [], []
        for number, image in enumerate(item.images, start=1):
            file = digest(image["bytes"])
            if file not in self._pictures:
                try:
                    self._pictures[file] = _picture(image["bytes"], file)
                except ImageError as error:
                    problem = image_problem(error, number, len(item.images))
                    raise SkipRow(IMAGE, problem) from None
            files.append(file)
            pictures.append(self._pictures[file])
        return Fingerprint(
            digest(normalized(_conversation(item)).encode()),
            tuple(files),
            tuple(picture.pixels for picture in pictures),
            tuple(picture.edges for picture in pictures if picture.edges),
        )


def _conversation(item: PreparedRow) -> str:
    """Return the question and the messages before it."""
    before = [x["content"] for x in item.messages[:-1] if x["role"] != "system"]
    return " ".join([*before, item.question])


def normalized(question: str) -> str:
    """Return the normalized wording: no ``<image>``, lower case, single spaces, Unicode NFC."""
    text = unicodedata.normalize("NFC", question.replace(MARK, " "))
    return " ".join(text.casefold().split())


def _picture(content: bytes, file: bytes) -> ImageDigests:
    if len(content) > _COMPARED_BYTES:
        check_image(content)
        return ImageDigests(file, b"")
    return image_digests(content)


TRAIN = "train"


@dataclass(frozen=True)
class Duplicates:
    """Numbers of duplicate rows, by five criteria."""

    split: str
    """Split whose rows are counted."""
    within: str
    """Split with which they are compared; the same split: its earlier rows."""
    rows: int
    question: int
    """Rows with the same wording."""
    file: int
    """Rows with an image of the same bytes."""
    image: int
    """Rows with an image of the same pixels."""
    alike: int | None
    """Rows with an image that looks the same (or is the same). None: not compared."""
    both: int
    """Rows with the same wording and the same image (or none)."""


class _KnownRows:
    """Fingerprints of the rows so far."""

    def __init__(self, rows: Iterable[Fingerprint] = ()) -> None:
        self.questions: set[bytes] = set()
        self.files: set[bytes] = set()
        self.images: set[bytes] = set()
        self.edges: set[bytes] = set()
        self.pairs: set[tuple[bytes, bytes]] = set()
        for row in rows:
            self.add(row)

    def add(self, row: Fingerprint) -> None:
        self.questions.add(row.question)
        self.files.update(row.files)
        self.images.update(row.images)
        self.edges.update(row.edges)
        self.pairs.update(row.pairs)

    def compare(self, row: Fingerprint) -> tuple[bool, bool, bool, bool]:
        return (
            row.question in self.questions,
            not self.files.isdisjoint(row.files),
            not self.images.isdisjoint(row.images),
            not self.pairs.isdisjoint(row.pairs),
        )

    def alike(self, rows: Sequence[Fingerprint]) -> int:
        """Count the rows with an image that looks like one of these or has equal pixels."""
        places = [place for place, row in enumerate(rows) for _ in row.edges]
        found = look_alike([x for row in rows for x in row.edges], sorted(self.edges))
        alike = {place for place, yes in zip(places, found, strict=True) if yes}
        same = {i for i, row in enumerate(rows) if not self.images.isdisjoint(row.images)}
        return len(alike | same)


def find_shared(splits: Mapping[str, Sequence[Fingerprint]]) -> list[Duplicates]:
    """Count held-out rows that are in the training data, and repetitions within each split."""
    train = _KnownRows(splits.get(TRAIN, ()))
    across = [
        _counted(split, TRAIN, [train.compare(row) for row in rows], train.alike(rows))
        for split, rows in splits.items()
        if split != TRAIN and TRAIN in splits
    ]
    return across + [_repeated(split, rows) for split, rows in splits.items()]


def leaking(splits: Mapping[str, Sequence[Fingerprint]]) -> set[int]:
    """Return positions of training rows with the question and image of a held-out row."""
    held_out = _KnownRows(row for split, rows in splits.items() if split != TRAIN for row in rows)
    return {
        place
        for place, row in enumerate(splits.get(TRAIN, ()))
        if not held_out.pairs.isdisjoint(row.pairs)
    }


def _repeated(split: str, rows: Sequence[Fingerprint]) -> Duplicates:
    seen, found = _KnownRows(), []
    for row in rows:
        found.append(seen.compare(row))
        seen.add(row)
    return _counted(split, split, found)


def _counted(
    split: str,
    within: str,
    found: Sequence[tuple[bool, bool, bool, bool]],
    alike: int | None = None,
) -> Duplicates:
    question, file, image, both = (sum(row[sense] for row in found) for sense in range(4))
    return Duplicates(split, within, len(found), question, file, image, alike, both)


@dataclass
class SplitReport:
    """Numbers for one split."""

    name: str
    path: Path
    """File that was written."""
    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of bad rows by reason."""
    dropped: int = 0
    """Training rows that were dropped because they are in the held-out data."""
    written: int = 0
    images: int = 0
    too_long: int = 0
    """Prompts whose text is longer than the limit."""
    longest: int = 0
    """Number of tokens of the longest text."""


@dataclass
class Report:
    """Result of ``prepare``."""

    data_sources: list[str]
    """Names by which verl selects its scorer."""
    reward: str | None
    """Reward that grades the answers of a known dataset."""
    splits: list[SplitReport] = field(default_factory=list)
    shared: list[Duplicates] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    leaking: int = 0
    """Training rows with the question and image of a held-out row, dropped or not."""
    max_prompt_tokens: int | None = None
    """Limit for ``too_long``. None: lengths were not counted."""

    @property
    def with_images(self) -> bool:
        """Whether any row has an image."""
        return any(split.images for split in self.splits)


Progress = Callable[[str], None]
"""Receives a description of the current work."""


@dataclass
class Scan:
    """Results of the first pass over all splits."""

    columns: Columns
    lengths: TextLengths | None
    max_prompt_tokens: int
    types: ColumnTypes = field(default_factory=ColumnTypes)
    bad: list[BadRow] = field(default_factory=list)
    data_sources: dict[str, None] = field(default_factory=dict)
    """Data sources in the order of their first row."""
    rows: dict[str, list[Fingerprint]] = field(default_factory=dict)
    """Fingerprints of the good rows of each split."""
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """Their positions among all rows of the split, from 0."""
    _fingerprints: Fingerprints = field(default_factory=Fingerprints)

    def read(
        self, report: SplitReport, parts: list[tuple[Part, RowFormat]], progress: Progress
    ) -> None:
        """Read all rows of a split."""
        rows = self.rows.setdefault(report.name, [])
        numbers = self.numbers.setdefault(report.name, [])
        seen: dict[str, dict[str, None]] = {}  # file → its columns
        for part, row_format, number, raw in all_rows(parts):
            columns = seen.setdefault(part.source.name, {})
            if isinstance(raw.content, Mapping):
                columns.update(dict.fromkeys(map(str, raw.content)))
            report.read += 1
            if report.read % 100 == 0:
                progress(f"reading {report.name}, row {report.read}")
            try:
                item = row_format.convert(raw, part.source.folder, number)
                fingerprint = self._fingerprints.of(item)
            except SkipRow as error:
                report.skipped[error.reason] += 1
                self.bad.append(BadRow(printable(raw.where), str(error)))
                continue
            rows.append(fingerprint)
            numbers.append(number)
            self._note(item, report)
        self._check_columns(parts, seen)

    def _note(self, item: PreparedRow, report: SplitReport) -> None:
        report.images += len(item.images)
        self.types.see(item.kept)
        self.data_sources[item.data_source] = None
        if self.lengths is not None:
            length = self.lengths.count(item.messages)
            report.longest = max(report.longest, length)
            report.too_long += length > self.max_prompt_tokens

    def _check_columns(
        self, parts: list[tuple[Part, RowFormat]], seen: dict[str, dict[str, None]]
    ) -> None:
        for part, _ in parts:
            source = part.source
            if source.name not in seen:
                raise no_rows(source.name)
            if seen[source.name]:
                self.columns.check(source.name, list(seen[source.name]))


def all_rows(parts: list[tuple[Part, RowFormat]]) -> Iterator[tuple[Part, RowFormat, int, RawRow]]:
    """Yield the rows of a split, numbered from 0."""
    number = 0
    for part, row_format in parts:
        for found in part.source.rows():
            yield part, row_format, number, row_format.read(found)
            number += 1


Splits = dict[str, list[tuple[Part, RowFormat]]]


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
    progress: Progress = lambda text: None,
) -> Report:
    """Write ``train.parquet``, ``test.parquet`` … in verl's format and report on the data.

    Args:
        what: ``"geo3k"``, ``"gsm8k"``, ``"math"``, ``"words"``; or files, folders or Hub ids
            of any rows that the loader reads. ``"test=FILE"`` sets the split of a file.
        output: Folder for the files.
        source: Files, folders or Hub ids of a known dataset, if not the default on the Hub.
        config: Configuration (subset) of a dataset that has several.
        columns: Columns of question, answer and image, if they have other names.
        suffix: Text appended to every question. None: what verl appends.
        data_source: Name by which verl selects its scorer. None: the dataset's own.
        tokenizer: Folder or Hub id of a tokenizer that counts the tokens of every prompt.
        max_prompt_tokens: Text length above which the report counts a prompt as too long.
        drop_duplicates: Drop training rows that share question and image with a held-out row.
        skip_bad_rows: Skip bad rows instead of raising BadRows.
        allow_outside: Allow rows to name images outside the folder of their file.
        force: Overwrite existing files.
        progress: Receives a description of the current work.
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
        scan.read(report, splits[report.name], progress)
    if scan.bad and not skip_bad_rows:
        raise BadRows(scan.bad, SKIP if any(scan.rows.values()) else NOTHING_LEFT)
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
    _write(found, splits, wanted, scan, progress)
    return found


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_settings(columns: Columns, tokenizer: str | None, limit: int | None) -> None:
    for name in columns.keep:
        if name in OWN_EXTRAS:
            raise ValueError(
                f"--keep: prepare fills {listed(OWN_EXTRAS)} of extra_info itself; got '{name}'. "
                f"Omit it, or rename the column."
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
    """Find the sources of each split and the format of their rows."""
    splits: Splits = {}
    for place in places:
        for part in find_parts(place, config, chosen.config, chosen.held_out):
            row_format = RowFormat(
                keys=columns.keys(),
                rule=chosen.named_rule if columns.answer else chosen.rule,
                suffix=chosen.suffix if suffix is None else suffix,
                data_source=data_source or chosen.data_source(part.place),
                keep_data_source=chosen is OWN and data_source is None,
                keep=(*chosen.keep, *columns.keep),
                reshape=chosen.reshape,
                allow_outside=allow_outside,
            )
            splits.setdefault(part.split, []).append((part, row_format))
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
                f"{named(path)} is an input. Choose another folder for the output: -o FOLDER"
            )
    there = [path.name for path in outputs if path.exists()]
    if there and not force:
        raise ValueError(
            f"{named(folder)} has {listed(there)} already. Overwrite: --force; or choose another "
            f"folder: -o FOLDER"
        )


def _wanted(scan: Scan, leaks: set[int]) -> dict[str, list[int]]:
    """Return the positions of the rows to write."""
    wanted = dict(scan.numbers)
    if leaks:
        kept = [number for place, number in enumerate(wanted[TRAIN]) if place not in leaks]
        wanted[TRAIN] = kept
    return wanted


def _write(
    found: Report, splits: Splits, wanted: dict[str, list[int]], scan: Scan, progress: Progress
) -> None:
    """Write all files under temporary names first, so that an error leaves none behind."""
    with_images = found.with_images
    columns = schema(scan.types, with_images)
    with ExitStack() as files:
        for report in found.splits:
            report.path.parent.mkdir(parents=True, exist_ok=True)
            writer = RowWriter(files.enter_context(replacing(report.path)), columns)
            files.callback(writer.close)
            numbers = set(wanted[report.name])
            for part, row_format, number, raw in all_rows(splits[report.name]):
                if number not in numbers:
                    continue
                try:
                    item = row_format.convert(raw, part.source.folder, number)
                except SkipRow as error:
                    raise _changed(part) from error
                size = sum(len(image["bytes"]) for image in item.images)
                if item.images and not with_images:
                    raise _changed(part)
                writer.write(parquet_row(item, report.name, scan.types, with_images), size)
                report.written += 1
                if report.written % 100 == 0:
                    progress(f"writing {report.path.name}, row {report.written}")
            if report.written != len(numbers):
                raise _changed(part)
            writer.close()


def _changed(part: Part) -> ValueError:
    return ValueError(
        f"{named(part.source.name)} changed while it was read, so nothing was written. Run "
        f"the command again when no other program writes to it."
    )
