"""Read Arrow files within limits: they are untrusted, and a small one may ask for gigabytes.

A file is read as a stream, in which every message can be checked before it is unpacked. Refused
are compressed messages, and types in which one value can stand for many: dictionaries, run-ends,
views and unions. All other values take as much space in the file as in memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.printable import named, printable

_MAGIC = b"ARROW1\0\0"
"""First bytes of an Arrow file; the rest of it is a stream and a footer."""
_INSTEAD = "If you trust it, write its rows as .parquet or .jsonl."


@contextmanager
def open_arrow(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Open schema and batches of an Arrow stream (as the datasets library saves) or file."""
    arrow = import_module("pyarrow")
    try:
        with arrow.memory_map(str(path)) as file:
            start = len(_MAGIC) if file.read(len(_MAGIC)) == _MAGIC else 0
            file.seek(start)
            _refuse_compressed(arrow.ipc.MessageReader.open_stream(file), path)
            file.seek(start)
            stream = arrow.ipc.open_stream(file)
            for field in stream.schema:
                _refuse_repeating(arrow, field.type, path)
            yield stream.schema, _validated(stream)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(
            f"expected an Arrow file; {named(path)} cannot be read: "
            f"{printable(str(error), 200)}. Was the download complete?"
        ) from None


def _validated(stream: Any) -> Iterator[Any]:
    for batch in stream:
        batch.validate(full=True)  # offsets beyond the values would be read from other memory
        yield batch


def _refuse_compressed(messages: Any, path: Path) -> None:
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        if message.type in ("record batch", "dictionary") and _is_compressed(message):
            raise ValueError(f"expected an Arrow file; {named(path)} is compressed. {_INSTEAD}")


def _is_compressed(message: Any) -> bool:
    """Whether a message has the field ``compression`` (Arrow's Message.fbs)."""
    data = message.metadata.to_pybytes()
    header = _follow(data, _field(data, _follow(data, 0), 2))
    if message.type == "dictionary":
        header = _follow(data, _field(data, header, 1))
    return _field(data, header, 3) > 0


def _field(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer's table; 0 if the table does not have it."""
    layout = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    place = 4 + 2 * number
    if place >= int.from_bytes(data[layout : layout + 2], "little"):
        return 0
    offset = int.from_bytes(data[layout + place : layout + place + 2], "little")
    return table + offset if offset else 0


def _follow(data: bytes, position: int) -> int:
    return position + int.from_bytes(data[position : position + 4], "little")


def _refuse_repeating(arrow: Any, kind: Any, path: Path, inside: bool = False) -> None:
    """Refuse types whose values may take less space in the file than in memory.

    Args:
        inside: Whether this is the type of a list's items, which then must take space.
    """
    types = arrow.types
    plain: tuple[Callable[[Any], bool], ...] = (
        *(types.is_primitive, types.is_decimal, types.is_string, types.is_large_string),
        *(types.is_binary, types.is_large_binary),
    )
    is_list = types.is_list(kind) or types.is_large_list(kind)
    if types.is_fixed_size_list(kind):
        is_list = kind.list_size > 0
    if isinstance(kind, arrow.BaseExtensionType):
        _refuse_repeating(arrow, kind.storage_type, path, inside)
    elif types.is_struct(kind) and kind.num_fields:
        for field in kind:
            _refuse_repeating(arrow, field.type, path, inside)
    elif is_list:
        _refuse_repeating(arrow, kind.value_type, path, True)
    elif types.is_map(kind):
        _refuse_repeating(arrow, kind.key_type, path, True)
        _refuse_repeating(arrow, kind.item_type, path, True)
    elif not (
        any(is_kind(kind) for is_kind in plain)
        or (types.is_null(kind) and not inside)
        or (types.is_fixed_size_binary(kind) and kind.byte_width)
    ):
        raise ValueError(
            f"expected an Arrow file with plain columns; {named(path)} has the type "
            f"{printable(str(kind), 120)}, in which a small file may hold many values. {_INSTEAD}"
        )
