"""Files that are either the old ones or the new ones, whole, whenever the process is killed."""

import json
import os
from collections.abc import Iterator
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
