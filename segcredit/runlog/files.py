"""Files that are either the old ones or the new ones, whole, whenever the process is killed."""

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
    """A file to write to; it takes its place on leaving, or is gone if anything was raised."""
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
    """Replace the file's content, or leave it as it was."""
    with replacing(path) as file:
        file.write(data)


def write_text_atomically(path: Path, text: str) -> None:
    """The same for text, in UTF-8."""
    write_bytes_atomically(path, text.encode())


def write_yaml_atomically(path: Path, document: Any) -> None:
    """The same for plain data (dicts, lists, strings, numbers), as YAML in the given order."""
    try:
        text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        what = error.args[1] if len(error.args) > 1 else error
        raise ValueError(
            f"{path.name} can hold dicts, lists, strings, numbers, booleans and None; got "
            f"{type(what).__name__} {what!r}. Convert it first, a path by str(path)."
        ) from None
    write_text_atomically(path, text)


def write_json_atomically(path: Path, document: Any) -> None:
    """The same as indented JSON."""
    write_text_atomically(path, json.dumps(document, indent=2) + "\n")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left half-written; only for who holds the run's lock."""
    for file in folder.glob(f".*{_MARK}*"):
        if file.is_file():
            file.unlink(missing_ok=True)


class _Dumper(yaml.SafeDumper):
    """Writes a value that occurs twice out twice: people read these files."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_line(row: Mapping[str, Any]) -> bytes:
    """One object, one line; tensors and arrays become lists."""
    try:
        return _dumped(row)
    except (ValueError, RecursionError):  # mostly a number that is not finite: rare, so only now
        try:
            return _dumped(_spelled(row))
        except RecursionError:
            raise ValueError("a row must be a plain object; got one that holds itself.") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every object of the file; a last line that is still being written is left out."""
    return read_some_lines(path, None)[0]


def read_some_lines(path: Path, count: int | None) -> tuple[list[dict[str, Any]], int]:
    """At most ``count`` objects, evenly spread, and how many there are; others stay unparsed."""
    *whole, last = path.read_bytes().split(b"\n")
    lines = [(number, line) for number, line in enumerate(whole, start=1) if line.strip()]
    if _parsed(last) is not None:
        lines.append((len(whole) + 1, last))
    total = len(lines)
    if count is not None and count < total:
        lines = [lines[i * total // count] for i in range(count)]
    rows = []
    for number, line in lines:
        row = _parsed(line)
        if row is None:
            raise ValueError(
                f"line {number} of {path} must be a JSON object; got {line[:40]!r}. The file is "
                f"damaged; deleting that line makes the rest readable."
            )
        rows.append(row)
    return rows, total


def revived(x: Any) -> Any:
    """A number, or nested lists of them, with "NaN" and the infinities as numbers again."""
    if isinstance(x, str):
        return _SPELLED.get(x, x)
    return [revived(item) for item in x] if isinstance(x, list) else x


def _dumped(row: Any) -> bytes:
    return json.dumps(row, allow_nan=False, default=_plain).encode("ascii") + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _plain(x: Any) -> Any:
    if hasattr(x, "tolist"):
        return x.tolist()
    raise ValueError(
        f"a row can hold strings, numbers, booleans, None, lists and dicts; got a "
        f"{type(x).__name__}, {x!r:.60}. Convert it first."
    )


def _spelled(x: Any) -> Any:
    if hasattr(x, "tolist"):
        x = x.tolist()
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    if isinstance(x, Mapping):
        return {key: _spelled(value) for key, value in x.items()}
    return [_spelled(item) for item in x] if isinstance(x, list | tuple) else x


TRIES = 8
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
"""What some network file systems answer."""


class LockedError(Exception):
    """Another process (or another part of this one) holds the lock."""

    def __init__(self, holder: int | None) -> None:
        super().__init__(holder)
        self.holder = holder
        """Its process id, if known."""


class Lock:
    """Held from its making until :meth:`release` or the end of the process.

    The file stays: deleting it would let two processes lock two files of one name.
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
                f"{path} cannot be locked on this file system ({error.strerror}). Take care that "
                f"no second process writes there.",
                stacklevel=2,
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let others in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        _held.discard(self)


def _take(descriptor: int) -> None:
    """Try for a moment: a worker forked just before its parent died lets go within milliseconds."""
    import fcntl  # here, so that runs can be read where there is none (Windows)

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
    """A forked worker inherits the lock and, as an orphan, would keep it: it closes its copy."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
