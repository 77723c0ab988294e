"""Atomic file writes, JSON lines and file locks."""

import errno
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import yaml

_MARK = ".tmp-"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` on success and is deleted on an exception."""
    temporary = path.with_name(f".{path.name}{_MARK}{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Replace the content of a file completely, or leave it unchanged."""
    with replacing(path) as file:
        file.write(data)


def write_text_atomically(path: Path, text: str) -> None:
    """Write text as UTF-8, completely or not at all."""
    write_bytes_atomically(path, text.encode())


def write_yaml_atomically(path: Path, document: Any) -> None:
    """Write dicts, lists, strings and numbers as YAML, completely or not at all."""
    try:
        text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        what = error.args[1] if len(error.args) > 1 else error
        raise ValueError(
            f"{path.name} can contain dicts, lists, strings, numbers, booleans and None; got "
            f"{type(what).__name__} {what!r}. Convert it first, a path with str(path)."
        ) from None
    write_text_atomically(path, text)


def write_json_atomically(path: Path, document: Any) -> None:
    """Write indented JSON, completely or not at all."""
    write_text_atomically(path, json.dumps(document, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files of killed processes; the caller must hold the run's lock."""
    for file in folder.glob(f".*{_MARK}*"):
        if file.is_file():
            file.unlink(missing_ok=True)


class _Dumper(yaml.SafeDumper):
    """Writes repeated values in full instead of as aliases, for readability."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(row: Mapping[str, Any]) -> bytes:
    """Encode an object as one JSON line; tensors and arrays become lists."""
    try:
        return _dump(row)
    except (ValueError, RecursionError):  # usually a number that is not finite, which is rare
        try:
            return _dump(_nonfinite_as_text(row))
        except RecursionError:
            raise ValueError(
                "a row must be a plain object; got one that contains itself."
            ) from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all objects of a file; an incomplete last line is ignored."""
    return read_some_lines(path, None)[0]


def read_some_lines(path: Path, count: int | None) -> tuple[list[dict[str, Any]], int]:
    """Read at most ``count`` evenly spaced objects; return them and the total number."""
    *whole, last = path.read_bytes().split(b"\n")
    lines = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if _parse(last) is not None:
        lines.append((len(whole) + 1, last))
    total = len(lines)
    if count is not None and count < total:
        lines = [lines[i * total // count] for i in range(count)]
    rows = []
    for number, line in lines:
        row = _parse(line)
        if row is None:
            raise ValueError(
                f"line {number} of {path} must be a JSON object; got {line[:40]!r}. The file is "
                f"damaged. Delete that line to read the rest."
            )
        rows.append(row)
    return rows, total


def restore_nonfinite(x: Any) -> Any:
    """Convert "NaN" and "Infinity" back to numbers, also in nested lists."""
    if isinstance(x, str):
        return _NONFINITE.get(x, x)
    return [restore_nonfinite(item) for item in x] if isinstance(x, list) else x


def _dump(row: Any) -> bytes:
    return json.dumps(row, allow_nan=False, default=_plain).encode("ascii") + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _plain(x: Any) -> Any:
    if hasattr(x, "tolist"):
        return x.tolist()
    raise ValueError(
        f"a row can contain strings, numbers, booleans, None, lists and dicts; got a "
        f"{type(x).__name__}, {x!r:.60}. Convert it first."
    )


def _nonfinite_as_text(x: Any) -> Any:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if isinstance(x, Mapping):
        return {key: _nonfinite_as_text(value) for key, value in x.items()}
    return [_nonfinite_as_text(item) for item in x] if isinstance(x, list | tuple) else x


TRIES = 8
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors of network file systems that cannot lock."""


class LockedError(Exception):
    """Another process, or another part of this one, holds the lock."""

    def __init__(self, holder: int | None) -> None:
        super().__init__(holder)
        self.holder = holder
        """Process id of the holder, if known."""


class Lock:
    """File lock, held until :meth:`release` or the end of the process.

    The file is not deleted: two processes could then lock two files of the same name.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _take(self._descriptor)
        except BlockingIOError:
            holder = os.read(self._descriptor, 20).decode("ascii", "replace").strip()
            self.release()
            raise LockedError(int(holder) if holder.isdigit() else None) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                self.release()
                raise
            warnings.warn(
                f"{path} cannot be locked on this file system ({error.strerror}). Make sure "
                f"that no second process writes there.",
                stacklevel=2,
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _held.discard(self)


def _take(descriptor: int) -> None:
    """Try briefly: a child that was forked just before its parent died releases the lock soon."""
    import fcntl  # imported here, because Windows, which can read runs, does not have it

    for left in range(TRIES - 1, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.05)
        else:
            return


_held: set[Lock] = set()


def _close_in_child() -> None:
    """Close a forked child's copies of locks, which would outlive its parent."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
