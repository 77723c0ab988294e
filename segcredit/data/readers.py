"""Read rows from parquet, Arrow, JSON and CSV files and from datasets on the Hub."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from segcredit.data.arrow import open_arrow
from segcredit.data.formats import RowError
from segcredit.data.hub import PREFIX, Address
from segcredit.printable import listed, named, printable, shown
from segcredit.registry import nearest

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
"""Suffixes of data files; if a folder has several kinds, ``prepare`` uses the first of these."""
_LONGEST_CELL = 2**27
"""Maximum number of characters in a CSV cell, for base64 images; Python's default is 2**17."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROWS_AT_ONCE = 64
"""Rows to read per batch; a row may contain images."""
_RATIO = 100
"""Maximum ratio of a parquet file's unpacked size to its file size."""
_UNPACKED, _READ = 2**26, 2**30
"""Bytes that a file of any size may unpack to: in a parquet file's pages, and in all rows."""
_ROW = 500
"""Minimum number of bytes that a row takes in Python, besides its values."""
_VALUE = 8
"""Minimum number of bytes that a value takes in Python, such as a null in a list."""
_BATCH = 2**29
"""Maximum number of bytes in one batch of rows."""


class RawRow(NamedTuple):
    """One row as it is stored."""

    where: str
    """File and line, for messages."""
    number: int
    """Line or row number, from 1."""
    content: object
    """The row, or a RowError if it cannot be read."""


@dataclass(frozen=True)
class Source:
    """A file or dataset, and how to iterate over its rows."""

    name: str
    """Name as the user gave it."""
    stem: str
    """Prefix of the ids of rows without one."""
    folder: Path
    """Directory to which image paths are relative."""
    columns: list[str] | None
    """Columns of a table. None: each row has its own keys."""
    rows: Callable[[], Iterator[RawRow]]
    outside: bool = False
    """Whether rows may name images outside ``folder``."""


def open_source(name: str | Path) -> Source:
    """Open a file, or a dataset on the Hub (:data:`segcredit.data.hub.FORM`)."""
    if (address := hub_address(name)) is not None:
        return _from_hub(address)
    path, suffix = Path(name), Path(name).suffix.lower()
    _check_file(path)
    columns, rows = _FORMATS[suffix]
    return Source(str(name), path.stem, path.absolute().parent, columns(path), lambda: rows(path))


def hub_address(name: str | Path) -> Address | None:
    """Return the address of a dataset on the Hub; None if this is the path of a file.

    ``hub:`` may be omitted if the name cannot be that of a local file.
    """
    if not isinstance(name, str):
        return None
    path = Path(name)
    local = path.suffix.lower() in SUFFIXES or _exists(path) or _exists(path.parent)
    if local and not name.startswith(PREFIX):
        return None
    return Address.parse(name)


def pin_addresses(names: list[str]) -> list[str]:
    """Add the current commit to every dataset on the Hub; paths of files stay as they are."""
    found = [(name, hub_address(name)) for name in names]
    return [name if address is None else str(address.pinned()) for name, address in found]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


PREPARED = {
    "data/geo3k": "segcredit prepare geo3k",
    "data/gsm8k": "segcredit prepare gsm8k",
    "data/gsm8k-plain": 'segcredit prepare gsm8k --suffix "" -o data/gsm8k-plain',
}
"""Commands that make the files of the built-in recipes, by folder."""


def _check_file(path: Path) -> None:
    name = named(path)
    if not _exists(path):
        how = PREPARED.get("/".join(path.parts[-3:-1]))
        advice = _near(path) if how is None else f" To download and prepare it, type: {how}"
        raise ValueError(f"expected a data file; there is no {name}.{advice}")
    if path.is_dir():
        raise ValueError(f"expected a data file; got the folder {name}.{_in_folder(path)}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"expected a file that ends in {', '.join(SUFFIXES)}; got {name}.{_near(path)}"
        )
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise ValueError(
            f"expected a data file; {name} cannot be opened ({error.strerror})."
        ) from None
    if empty:
        raise no_rows(str(path))


def no_rows(name: str) -> ValueError:
    """Make the error for a file without rows."""
    return ValueError(
        f"expected at least one row; {named(name)} is empty. Was the download or export complete?"
    )


def _near(path: Path) -> str:
    """Suggest a data file with a similar name or the same stem, else list the folder's files."""
    if not _exists(path.parent):
        return f" There is no folder {named(path.parent)} either."
    names = _data_files(path.parent)
    same = [name for name in names if Path(name).stem == path.stem]  # train.csv and train.jsonl
    hint = nearest(path.name, names) or (f" Did you mean {listed(same)}?" if same else "")
    return hint or _in_folder(path.parent)


def _in_folder(folder: Path) -> str:
    names = _data_files(folder)
    return f" The folder holds {listed(names)}." if names else " The folder holds no data file."


def _data_files(folder: Path) -> list[str]:
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError:
        return []
    return [name for name in names if Path(name).suffix.lower() in SUFFIXES]


def _json_lines(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                yield RawRow(f"{path}:{number}", number, _parse(line))


def _json(path: Path) -> Iterator[RawRow]:
    """Read a list of rows, a single row, or JSON lines; a .json file may be any of these."""
    content = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    parsed = _parse(content)
    if isinstance(parsed, RowError) and not content.lstrip().startswith(b"["):
        yield from _json_lines(path)
    elif isinstance(parsed, RowError):
        yield RawRow(f"{path}:{parsed.line}", parsed.line, parsed)
    else:
        rows = parsed if isinstance(parsed, list) else [parsed]
        for number, row in enumerate(rows, start=1):
            yield RawRow(f"{path} row {number}", number, row)


def _parse(content: bytes) -> object:
    try:
        return json.loads(content.decode().strip())
    except UnicodeDecodeError as error:
        return RowError(
            f"expected UTF-8; got byte 0x{content[error.start]:02x} at byte {error.start + 1}",
            line=content.count(b"\n", 0, error.start) + 1,
        )
    except json.JSONDecodeError as error:
        return RowError(
            f"expected a JSON object; got {shown(error.doc)}: {error.msg[0].lower()}"
            f"{error.msg[1:]} at column {error.colno}",
            line=error.lineno,
        )
    except (ValueError, RecursionError) as error:  # thousands of digits or of open brackets
        return RowError(
            f"expected a JSON object; got unreadable JSON ({printable(str(error), 120)})"
        )


def _parquet_columns(path: Path) -> list[str]:
    parquet = import_module("pyarrow.parquet")
    try:
        return list(parquet.read_schema(path).names)
    except Exception as error:  # pyarrow's errors have no common class
        raise _not_parquet(path, error) from None


def _parquet(path: Path) -> Iterator[RawRow]:
    parquet = import_module("pyarrow.parquet")
    number, read = 1, 0
    most = max(_READ, _RATIO * path.stat().st_size)
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=rows_at_once(file.metadata, path)):
                read += _row_bytes(batch)
                if read > most:
                    raise _too_large(path, most, "more in its rows")
                yield from table_rows(str(path), batch, number)
                number += len(batch)
    except (OSError, import_module("pyarrow").ArrowException) as error:
        raise _not_parquet(path, error) from None


def _row_bytes(batch: Any) -> int:
    """Compute the size of a batch once dictionary-encoded columns are expanded into rows."""
    kind = import_module("pyarrow").DictionaryArray
    columns = [x.dictionary_decode() if isinstance(x, kind) else x for x in batch.columns]
    return sum(x.nbytes for x in columns)


def rows_at_once(metadata: Any, path: Path) -> int:
    """Compute how many rows to read per batch; raise ValueError if the unpacked file is too large.

    Dictionary and prefix encodings store a value once for many rows, so a batch may need the
    unpacked size of a column once per row: a file of 1 kB can hold a text of 100 MB that every row
    repeats. Ordinary files unpack to a few times their size.
    """
    size = path.stat().st_size
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [[group.column(n) for n in range(group.num_columns)] for group in groups]
    unpacked = [sum(x.total_uncompressed_size for x in group) for group in columns]
    most = max(_UNPACKED, _RATIO * size)
    if sum(unpacked) > most or any(x < 0 for x in unpacked):
        raise _too_large(path, most, f"{sum(unpacked):,} in its pages")
    most = max(_READ, _RATIO * size)
    if metadata.num_rows > most // _ROW:
        raise _too_large(path, most, f"{metadata.num_rows:,} rows")
    values = sum(x.num_values for group in columns for x in group)  # also those in lists
    if values > most // _VALUE:
        raise _too_large(path, most, f"{values:,} values")
    return min(max(_BATCH // max([1, *unpacked]), 1), ROWS_AT_ONCE)


def _too_large(path: Path, most: int, got: str, kind: str = ".parquet") -> ValueError:
    return ValueError(
        f"expected a {kind} file that unpacks to at most {most:,} bytes (the limit for a file of "
        f"{path.stat().st_size:,} bytes); {named(path)} has {got}. If you trust it, write its "
        f"rows as .jsonl."
    )


def _not_parquet(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"expected a parquet file; {named(path)} cannot be read: "
        f"{printable(str(error), 200)} Was the download complete?"
    )


def _csv_columns(path: Path) -> list[str]:
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"expected unique column names in {named(path)}; got "
            f"{printable(', '.join(twice), 120)} twice."
        )
    return names


def _csv_rows(path: Path) -> Iterator[RawRow]:
    number = 0
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
        for number, cells in enumerate((row for row in reader if row), start=1):
            content: object = dict(zip(names, cells, strict=False))
            if len(cells) != len(names):
                content = RowError(f"expected {len(names)} cells; got {len(cells)}")
            yield RawRow(f"{path} row {number}", number, content)


@contextmanager
def _csv_reader(path: Path) -> Iterator[Any]:
    """Open a reader in strict mode, so that an open quote does not swallow the rest of the file."""
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
            f"Is there an unclosed quote?"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _arrow_columns(path: Path) -> list[str]:
    with open_arrow(path) as (schema, _):
        return list(schema.names)


def _arrow_rows(path: Path) -> Iterator[RawRow]:
    number, read = 1, 0
    most = max(_READ, _RATIO * path.stat().st_size)
    with open_arrow(path) as (_, batches):
        for batch in batches:
            count, size = len(batch), batch.nbytes
            read += size + count * _ROW
            if read > most:
                raise _too_large(path, most, "more in its rows", ".arrow")
            at_once = min(max(_BATCH * count // max(1, size), 1), ROWS_AT_ONCE)
            for start in range(0, count, at_once):
                part = batch.slice(start, at_once)
                yield from table_rows(str(path), part, number)
                number += len(part)


def table_rows(name: str, table: Any, first: int) -> Iterator[RawRow]:
    """Yield the rows of an Arrow table or batch; an unreadable row becomes a RowError."""
    try:
        rows: list[object] = table.to_pylist()
    except (ValueError, OverflowError):  # not UTF-8, or a date that Python cannot represent
        rows = [_one_row(table.slice(place, 1)) for place in range(len(table))]
    for number, row in enumerate(rows, start=first):
        yield RawRow(f"{name} row {number}", number, row)


def _one_row(table: Any) -> object:
    try:
        return table.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return RowError(f"expected text in UTF-8 and dates; got {printable(str(error), 120)}")


_FORMATS: dict[
    str, tuple[Callable[[Path], list[str] | None], Callable[[Path], Iterator[RawRow]]]
] = {
    ".parquet": (_parquet_columns, _parquet),
    ".arrow": (_arrow_columns, _arrow_rows),
    ".jsonl": (lambda path: None, _json_lines),
    ".json": (lambda path: None, _json),
    ".csv": (_csv_columns, _csv_rows),
    ".tsv": (_csv_columns, _csv_rows),
}
"""Functions that read the columns and the rows of a file, by its suffix."""


def _from_hub(address: Address) -> Source:
    return dataset_source(address.name, address.repository.rpartition("/")[2], address.load())


def dataset_source(name: str, stem: str, table: Any) -> Source:
    """Make a source from a table of the datasets library."""
    arrow = table.with_format("arrow")  # images stay encoded

    def rows() -> Iterator[RawRow]:
        number = 1
        for part in arrow.iter(batch_size=ROWS_AT_ONCE):
            yield from table_rows(name, part, number)
            number += len(part)

    return Source(name, stem, Path.cwd(), list(table.column_names), rows)
