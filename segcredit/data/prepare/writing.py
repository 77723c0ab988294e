"""Rows into a parquet file, a row group at a time: never more than that in memory."""

from importlib import import_module
from typing import Any, BinaryIO

_ROWS = 1000
_BYTES = 2**24
"""Of pictures in one row group."""


class RowWriter:
    """Collects rows and writes them by groups; equal rows give equal bytes."""

    def __init__(self, file: BinaryIO, schema: Any) -> None:
        self._arrow = import_module("pyarrow")
        self._file = import_module("pyarrow.parquet").ParquetWriter(file, schema)
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0

    def write(self, row: dict[str, Any], size: int) -> None:
        """Add a row whose pictures take so many bytes."""
        self._rows.append(row)
        self._bytes += size
        if len(self._rows) >= _ROWS or self._bytes >= _BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the file's end."""
        if self._rows:
            self._flush()
        self._file.close()

    def _flush(self) -> None:
        table = self._arrow.Table.from_pylist(self._rows, schema=self._schema)
        self._file.write_table(table, row_group_size=len(self._rows))
        self._rows, self._bytes = [], 0
