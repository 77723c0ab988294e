"""Find and read benchmark data: VLMEvalKit's TSV files, parquet files, and git repositories.

The data is untrusted. Image paths must stay inside the folder of their file, files and cells have
size limits, and every problem is reported with its file and row.
"""

import ast
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.data import RowError, as_source
from segcredit.data.formats import check_text, either
from segcredit.data.readers import RawRow, open_source
from segcredit.models.images import ImageError, check_image
from segcredit.printable import listed, named, printable, shown

LMU_DATA = "LMUData"
"""Environment variable that names VLMEvalKit's data folder; its default is ~/LMUData."""
KEY = "(key)"
"""Column with the key of a row, in a JSON file that is an object of rows."""
MAX_JSON = 2**28
"""Maximum size of a JSON file in bytes, which is parsed at once."""
MAX_TABLE = 2**33
"""Maximum size of a TSV file in bytes, which is kept in memory."""
MAX_LITERAL = 20_000
"""Maximum number of characters of a list or dict that a table stores as Python text."""
MAX_TEXT = 100_000
"""Maximum number of characters in a question, an option or an answer."""
_REFERENCE = 64
"""VLMEvalKit: a shorter text in the image column is the index of the row that has the image."""


@dataclass(frozen=True)
class Layout:
    """A file layout in which the data of a benchmark is published."""

    files: str
    """Pattern of its files below the data folder: ``WeMath.tsv``, ``dynamath/trial*/x.json``."""
    origin: str
    """Where the files come from, for ``segcredit benchmark --list``."""
    hub: str = ""
    """Id of a dataset on the Hub whose files these are, in a folder of the dataset's name."""


@dataclass(frozen=True)
class BenchmarkData:
    """The files of a benchmark that were found."""

    layout: Layout
    files: tuple[Path, ...]
    """Empty: they are downloaded from the Hub."""

    def __str__(self) -> str:
        if not self.files:
            return f"{self.layout.hub} on the Hub"
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0]}{more}"

    def rows(self) -> "Iterator[BenchmarkRow]":
        """Read all rows of all files."""
        for file in self.files or _download(self.layout):
            images = _Images()
            for raw in _read_file(file):
                yield BenchmarkRow(raw, file, images)


def _download(layout: Layout) -> list[Path]:
    """Download the files into the Hub's cache, or find them there."""
    pattern = layout.files.partition("/")[2]
    try:
        fetch = import_module("huggingface_hub").snapshot_download
        folder = Path(fetch(layout.hub, repo_type="dataset", allow_patterns=[pattern]))
    except Exception as error:  # no network, unknown name, or no permission
        raise ValueError(
            f"expected {layout.files} on this machine, or a Hub that can be reached; the Hub's "
            f"{layout.hub} cannot be loaded: {printable(str(error), 300)}\nOn a machine with a "
            f"network, type: hf download {layout.hub} --repo-type dataset --local-dir "
            f"{layout.hub.rpartition('/')[2]}; then pass the folder that contains it: --data "
            f"FOLDER. Or leave the set out: --sets NAME"
        ) from None
    files = sorted(x for x in folder.glob(pattern) if x.is_file())
    if not files:
        raise ValueError(
            f"expected files {pattern} in {layout.hub} on the Hub; got none. The dataset has "
            f"changed: pass VLMEvalKit's table instead, --data FOLDER."
        )
    return files


def lmu_folder() -> Path:
    """Return VLMEvalKit's data folder."""
    return Path(os.environ.get(LMU_DATA) or "~/LMUData").expanduser()


def data_folders(given: str | Path | None) -> list[Path]:
    """Return the folders to search: the given one, then ./data and $LMUData.

    Benchmarks may also be in the subfolder ``bench`` of the first two.
    """
    usual = [Path("data/bench"), Path("data"), lmu_folder()]
    if given is not None:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise ValueError(
                f"--data must be a folder with benchmark data; there is no folder {named(folder)}. "
                f"Type segcredit benchmark --list to see the files that each set needs."
            )
        return [folder, folder / "bench", *usual]
    return usual


def find_data(
    layouts: Sequence[Layout], folders: Sequence[Path], hub: bool = False
) -> BenchmarkData | None:
    """Find the first layout whose files exist; with ``hub``, the Hub is tried last."""
    for folder in folders:
        for layout in layouts:
            files = tuple(sorted(x for x in folder.glob(layout.files) if x.is_file()))
            if files:
                return BenchmarkData(layout, files)
    remote = next((x for x in layouts if x.hub), None) if hub else None
    return None if remote is None else BenchmarkData(remote, ())


def _read_file(file: Path) -> Iterator[RawRow]:
    suffix = file.suffix.lower()
    size = file.stat().st_size
    most = {".json": MAX_JSON, ".tsv": MAX_TABLE}.get(suffix)
    if most is not None and size > most:
        raise ValueError(
            f"{named(file)} must have at most {most:,} bytes; it has {size:,}. Is it the right "
            f"file?"
        )
    if suffix == ".json":
        yield from _json_rows(file)
    elif suffix == ".tsv":
        yield from _resolve_references(list(open_source(file).rows()))
    else:
        yield from open_source(file).rows()


def _json_rows(file: Path) -> Iterator[RawRow]:
    """Read a list of rows, or an object of rows, whose keys become the column ``KEY``."""
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"expected a JSON file; {named(file)} cannot be read: {printable(str(error), 200)}. "
            f"Was the download complete?"
        ) from None
    if isinstance(rows, dict):
        for number, (key, row) in enumerate(rows.items(), start=1):
            content = {**row, KEY: key} if isinstance(row, dict) else row
            yield RawRow(f"{file} row {number} ({printable(key, 40)})", number, content)
    elif isinstance(rows, list):
        for number, row in enumerate(rows, start=1):
            yield RawRow(f"{file} row {number}", number, row)
    else:
        raise ValueError(
            f"expected a list or an object of rows in {named(file)}; got something else."
        )


def _resolve_references(rows: list[RawRow]) -> Iterator[RawRow]:
    """Replace each short text in the column ``image`` by the image of the row of that index."""
    images: dict[str, str] = {}
    for row in rows:
        if isinstance(row.content, dict) and len(row.content.get("image") or "") > _REFERENCE:
            images[str(row.content.get("index"))] = row.content["image"]
    for row in rows:
        content = row.content
        short = content.get("image") if isinstance(content, dict) else None
        if isinstance(content, dict) and short and len(short) <= _REFERENCE:
            if short in images:
                content = {**content, "image": images[short]}
            else:
                content = RowError(
                    f"expected a base64 image, or the index of a row that has one, under 'image'; "
                    f"got {shown(short)}"
                )
        yield RawRow(row.where, row.number, content)


class _Images:
    """Decoded images of one file; rows that share an image share its bytes."""

    def __init__(self) -> None:
        self._checked: dict[str | Path, bytes | Path] = {}

    def load(self, value: object, folder: Path) -> bytes | Path:
        """Decode base64, or find the file, and check that it is an image."""
        key = value if isinstance(value, str) else None
        if key in self._checked:
            return self._checked[key]
        encoded = isinstance(value, str) and len(value) > 2 * _REFERENCE and "." not in value
        source = as_source({"bytes": value} if encoded else value, folder)
        try:
            check_image(source)
        except ImageError as error:
            raise RowError(str(error)) from None
        if key is not None:
            self._checked[key] = source
        return source


@dataclass(frozen=True)
class BenchmarkRow:
    """One row of a data file; reading a missing or malformed value raises RowError."""

    raw: RawRow
    file: Path
    """Its folder is the one to which image paths are relative."""
    _images: _Images = field(repr=False)

    @property
    def where(self) -> str:
        """File and row, for messages."""
        return printable(self.raw.where)

    @property
    def content(self) -> Mapping[str, Any]:
        """All columns as they are stored."""
        if isinstance(self.raw.content, RowError):
            raise self.raw.content
        if not isinstance(self.raw.content, Mapping):
            raise RowError(f"expected an object with columns; got {shown(self.raw.content)}")
        return self.raw.content

    def get(self, *columns: str) -> Any:
        """Return the first of these columns that has a value; None if there is none."""
        for column in columns:
            value = self.content.get(column)
            missing = value is None or value == "" or value != value  # NaN is not itself
            if not missing:
                return value
        return None

    def text(self, *columns: str) -> str:
        """Return the first of these columns that has a value, as text."""
        value = self.get(*columns)
        if value is None:
            raise RowError(
                f"expected a value in the column {either(columns)}; the row has the columns "
                f"{listed(self.content, 20)}"
            )
        if not isinstance(value, str | int | float):
            raise RowError(f"expected a text under {either(columns)}; got {shown(value)}")
        text = check_text(str(value), either(columns)).strip()
        if len(text) > MAX_TEXT:
            raise RowError(
                f"expected at most {MAX_TEXT:,} characters under {either(columns)}; got "
                f"{len(text):,}"
            )
        return text

    def optional(self, *columns: str) -> str | None:
        """Return a text, or None if the column is missing or empty (pandas writes ``nan``)."""
        value = self.get(*columns)
        if value is None or (isinstance(value, str) and value.strip() in ("", "nan")):
            return None
        return self.text(*columns)

    def images(self, *columns: str, folder: str = "") -> tuple[bytes | Path, ...]:
        """Return the images in the first of these columns that has a value, at least one.

        A value is base64 text, a path, ``{"bytes", "path"}``, or a list of them; a TSV file writes
        a list as ``['…', '…']``. Paths are relative to ``folder`` in the folder of the file.
        """
        value = self.get(*columns)
        if value is None:
            raise RowError(
                f"expected an image in the column {either(columns)}; the row has the columns "
                f"{listed(self.content, 20)}"
            )
        if isinstance(value, str) and value.startswith("["):
            value = [x.strip(" '\"") for x in value.strip(" []").split(",")]
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(self._images.load(x, self.file.parent / folder) for x in values)


def literal(text: str) -> Any:
    """Read a list or dict that a table stores as Python text; code is not run."""
    if len(text) > MAX_LITERAL:
        raise RowError(
            f"expected a list with at most {MAX_LITERAL:,} characters; got {len(text):,}"
        )
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise RowError(f"expected a list such as ['3', '4']; got {shown(text)}") from None
