"""From a file's name, or a dataset's on the Hub, to its rows; what is no row says why."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from segcredit.data.formats import RowError
from segcredit.printable import listed, named, printable, shown

SUFFIXES = (".jsonl", ".json", ".parquet")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<config>[\w.-]+))?(:(?P<split>\S+))?")
_ROWS_AT_ONCE = 64
"""Rows of a parquet file held twice at a time; they may carry pictures."""
_RATIO = 100
"""Maximum ratio of a parquet file's unpacked size to its file size."""
_UNPACKED, _READ = 2**26, 2**30
"""Bytes that any parquet file may unpack to, however small: in its pages, in all its rows."""
_ROW = 500
"""Bytes that a row takes in Python besides its values, at least."""
_BATCH = 2**29
"""Maximum number of bytes in one batch of rows."""


class Found(NamedTuple):
    """One row as it lies there."""

    where: str
    number: int
    """Line or row, from 1 on."""
    content: object
    """The row; a RowError where it cannot be read."""


@dataclass(frozen=True)
class Source:
    """Something with rows in it."""

    name: str
    """As it was given."""
    stem: str
    """The beginning of the ids of rows without one."""
    folder: Path
    """Relative paths of pictures begin here."""
    columns: list[str] | None
    """What every row has; None: each row has its own keys."""
    rows: Callable[[], Iterator[Found]]
    outside: bool = False
    """Whether rows may name images outside ``folder``."""


def open_source(name: str | Path) -> Source:
    """A file, or else a dataset of the Hub: ``owner/name``, ``owner/name/config:split``."""
    path, suffix = Path(name), Path(name).suffix.lower()
    local = suffix in SUFFIXES or _exists(path) or _exists(path.parent)
    if isinstance(name, str) and not local and (match := _HUB_ID.fullmatch(name)):
        return _hub(name, match["id"], match["config"], match["split"] or "train")
    _check_file(path)
    columns = _parquet_columns(path) if suffix == ".parquet" else None
    read = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}[suffix]
    return Source(str(name), path.stem, path.absolute().parent, columns, lambda: read(path))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _check_file(path: Path) -> None:
    name = named(path)
    if not _exists(path):
        raise ValueError(f"expected a data file; there is no {name}.{_near(path)}")
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
    """The error for a file with nothing in it."""
    return ValueError(
        f"expected at least one row; {named(name)} is empty. Was it written, or downloaded, whole?"
    )


def _near(path: Path) -> str:
    """`` Did you mean 'train.jsonl'?``, else what data the folder holds."""
    if not _exists(path.parent):
        return f" There is no folder {named(path.parent)} either."
    names = _data_files(path.parent)
    near = get_close_matches(path.name, names, n=3, cutoff=0.6)
    if not near:  # train.csv beside train.jsonl
        near = [name for name in names if Path(name).stem == path.stem]
    return f" Did you mean {listed(near)}?" if near else _in_folder(path.parent)


def _in_folder(folder: Path) -> str:
    names = _data_files(folder)
    return f" The folder holds {listed(names)}." if names else " The folder holds no data file."


def _data_files(folder: Path) -> list[str]:
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError:
        return []
    return [name for name in names if Path(name).suffix.lower() in SUFFIXES]


def _json_lines(path: Path) -> Iterator[Found]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                yield Found(f"{path}:{number}", number, _parsed_or_why(line))


def _json(path: Path) -> Iterator[Found]:
    """A list of rows; JSON lines and a single row go by this ending, too."""
    content = path.read_bytes().removeprefix(_BYTE_ORDER_MARK)
    parsed = _parsed_or_why(content)
    if isinstance(parsed, RowError) and not content.lstrip().startswith(b"["):
        yield from _json_lines(path)
    elif isinstance(parsed, RowError):
        yield Found(f"{path}:{parsed.line}", parsed.line, parsed)
    else:
        rows = parsed if isinstance(parsed, list) else [parsed]
        for number, row in enumerate(rows, start=1):
            yield Found(f"{path} row {number}", number, row)


def _parsed_or_why(content: bytes) -> object:
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
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 5000 brackets
        return RowError(
            f"expected a JSON object; got what Python cannot read ({printable(str(error), 120)})"
        )


def _parquet_columns(path: Path) -> list[str]:
    parquet = _library("pyarrow.parquet", "pyarrow", "or pass the rows as .jsonl")
    try:
        return list(parquet.read_schema(path).names)
    except Exception as error:  # pyarrow's errors share no class of their own
        raise _not_parquet(path, error) from None


def _parquet(path: Path) -> Iterator[Found]:
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
    """Bytes of a batch as rows: a dictionary's value counts for every row that repeats it."""
    kind = import_module("pyarrow").DictionaryArray
    columns = [x.dictionary_decode() if isinstance(x, kind) else x for x in batch.columns]
    return sum(x.nbytes for x in columns)


def rows_at_once(metadata: Any, path: Path) -> int:
    """Number of rows of a parquet file to read per batch; ValueError if its contents are too large.

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
    return min(max(_BATCH // max([1, *unpacked]), 1), _ROWS_AT_ONCE)


def _too_large(path: Path, most: int, got: str) -> ValueError:
    return ValueError(
        f"expected a parquet file that unpacks to at most {most:,} bytes (the limit for a file of "
        f"{path.stat().st_size:,} bytes); {named(path)} has {got}. If you trust it, write its "
        f"rows as .jsonl."
    )


def _not_parquet(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"expected a parquet file; {named(path)} cannot be read: "
        f"{printable(str(error), 200)} Was it downloaded whole?"
    )


def table_rows(name: str, table: Any, first: int) -> Iterator[Found]:
    """The rows of an Arrow table or batch; a row that Python cannot hold is found by itself."""
    try:
        rows: list[object] = table.to_pylist()
    except (ValueError, OverflowError):  # text that is not UTF-8, a date in the year 300,000
        rows = [_row_or_why(table.slice(place, 1)) for place in range(len(table))]
    for number, row in enumerate(rows, start=first):
        yield Found(f"{name} row {number}", number, row)


def _row_or_why(table: Any) -> object:
    try:
        return table.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return RowError(f"expected text in UTF-8 and dates; got {printable(str(error), 120)}")


def _hub(name: str, repository: str, config: str | None, split: str) -> Source:
    datasets = _library(
        "datasets",
        "datasets",
        f"or pass a local file ({', '.join(SUFFIXES)}); there is none of the name {shown(name)}",
    )
    try:
        table = datasets.load_dataset(repository, config, split=split).with_format("arrow")
    except Exception as error:  # the library's errors share no class
        raise ValueError(
            f"expected a file or a dataset of the Hub, owner/name or owner/name/config:split; "
            f"{shown(name)} cannot be loaded: {printable(str(error), 300)}"
        ) from None

    def rows() -> Iterator[Found]:
        number = 1
        for part in table.iter(batch_size=_ROWS_AT_ONCE):  # Arrow: pictures stay encoded
            yield from table_rows(name, part, number)
            number += len(part)

    stem = repository.rpartition("/")[2]
    return Source(name, stem, Path.cwd(), list(table.column_names), rows)


def _library(module: str, package: str, otherwise: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ValueError(f"this needs {package}: pip install {package}, {otherwise}.") from None
