"""Tables beyond those that the loader opens: .csv, .tsv and .arrow."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.data.problems import RowError
from segcredit.data.readers import SUFFIXES as LOADED
from segcredit.data.readers import Found, Source, no_rows, open_source, table_rows
from segcredit.printable import named, printable

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
"""In the order of preference where a folder holds several."""
_ARROW_FILE = b"ARROW1"
_ROWS_AT_ONCE = 64
_LONGEST_CELL = 2**27
"""Characters; a picture as base64 may stand in a cell. Python's own bound is 2**17."""


def open_table(path: Path) -> Source:
    """The rows of a file."""
    suffix = path.suffix.lower()
    if suffix in LOADED or not path.is_file():
        return open_source(path)  # which says what is wrong with it
    if suffix not in SUFFIXES:
        raise ValueError(f"expected a file that ends in {', '.join(SUFFIXES)}; got {named(path)}.")
    if path.stat().st_size == 0:
        raise no_rows(str(path))
    folder = path.absolute().parent
    if suffix == ".arrow":
        return Source(str(path), path.stem, folder, _arrow_columns(path), lambda: _arrow_rows(path))
    return Source(str(path), path.stem, folder, _csv_columns(path), lambda: _csv_rows(path))


def _csv_columns(path: Path) -> list[str]:
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected a name of its own for each column of {named(path)}; got "
                         f"{printable(', '.join(twice), 120)} twice.")  # fmt: skip
    return names


def _csv_rows(path: Path) -> Iterator[Found]:
    number = 0
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
        for number, cells in enumerate((row for row in reader if row), start=1):
            content: object = dict(zip(names, cells, strict=False))
            if len(cells) != len(names):
                content = RowError(f"expected {len(names)} cells; got {len(cells)}")
            yield Found(f"{path} row {number}", number, content)


@contextmanager
def _csv_reader(path: Path) -> Iterator[Any]:
    """Strict, so that a quote left open does not swallow the rest of the file in silence."""
    limit = csv.field_size_limit(_LONGEST_CELL)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield csv.reader(file, delimiter=delimiter, strict=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected {named(path)} in UTF-8; got byte 0x{error.object[error.start]:02x}. Save "
            f"it as UTF-8."
        ) from None
    except csv.Error as error:
        raise ValueError(
            f"expected a table of cells; {named(path)} cannot be read: {printable(str(error))}. "
            f"Is a quote left open?"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _arrow_columns(path: Path) -> list[str]:
    with _arrow_reader(path) as (schema, _):
        return list(schema.names)


def _arrow_rows(path: Path) -> Iterator[Found]:
    number = 1
    with _arrow_reader(path) as (_, batches):
        for batch in batches:
            for start in range(0, len(batch), _ROWS_AT_ONCE):
                part = batch.slice(start, _ROWS_AT_ONCE)
                yield from table_rows(str(path), part, number)
                number += len(part)


@contextmanager
def _arrow_reader(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the batches of a stream (as the datasets library saves) or of a file."""
    arrow = import_module("pyarrow")
    try:
        with arrow.memory_map(str(path)) as file:
            magic = file.read(len(_ARROW_FILE))
            file.seek(0)
            if magic == _ARROW_FILE:
                whole = arrow.ipc.open_file(file)
                numbers = range(whole.num_record_batches)
                yield whole.schema, (whole.get_batch(number) for number in numbers)
            else:
                stream = arrow.ipc.open_stream(file)
                yield stream.schema, iter(stream)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(
            f"expected an Arrow file; {named(path)} cannot be read: "
            f"{printable(str(error), 200)}. Was it downloaded whole?"
        ) from None
