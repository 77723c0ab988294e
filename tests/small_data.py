"""A picture in a file, and a stand-in for a table of the datasets library."""

from collections.abc import Iterator
from io import BytesIO

import pyarrow as pa
from PIL import Image


def png(color: str = "red") -> bytes:
    written = BytesIO()
    Image.new("RGB", (5, 4), color).save(written, "PNG")
    return written.getvalue()


class FakeDataset:
    """The few methods of datasets.Dataset that are called."""

    def __init__(self, rows: pa.Table, kind: str = "python") -> None:
        self.rows = rows
        self.column_names = rows.column_names
        self.kind = kind

    def with_format(self, kind: str) -> "FakeDataset":
        return FakeDataset(self.rows, kind)

    def iter(self, batch_size: int) -> Iterator[pa.Table]:
        assert self.kind == "arrow"
        for start in range(0, len(self.rows), batch_size):
            yield self.rows.slice(start, batch_size)
