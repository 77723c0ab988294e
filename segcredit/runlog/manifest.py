"""A manifest with the size and SHA-256 of every file tells whether a checkpoint is whole."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from segcredit.runlog.atomic import sync_folder

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or must not be read."""


def seal(folder: Path) -> None:
    """Write the manifest and bring everything to the disk."""
    files = sorted(_files(folder))
    if not files:
        raise ValueError(f"a checkpoint must hold at least one file; {folder} is empty.")
    names = [file.relative_to(folder).as_posix() for file in files]
    mode = folder.stat().st_mode & 0o666  # the umask has determined the folder's mode

    def sealed(file: Path) -> dict[str, Any]:
        return _digest_and_sync(file, mode)

    with ThreadPoolExecutor(_threads()) as pool:
        entries = dict(zip(names, pool.map(sealed, files), strict=True))
    with (folder / MANIFEST).open("wb") as file:
        file.write(_rendered(entries))
        file.flush()
        os.fsync(file.fileno())
    for place, _, _ in os.walk(folder):
        sync_folder(Path(place))


def verify(folder: Path) -> None:
    """Raise CheckpointError naming the file that is missing, truncated or altered.

    If a file cannot be read (OSError: no permission, a failing disk), its content is unknown, so
    the error is raised unchanged.
    """
    checked_size(folder, hashes=True)


def checked_size(folder: Path, hashes: bool) -> int:
    """The size in bytes of a checkpoint that is whole; without hashes, a glance at the sizes."""
    entries = _manifest(folder)
    total = 0
    for name, entry in entries.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder / name} is missing.") from None
        if size < entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} is truncated: {size} of {entry['bytes']} bytes."
            )
        if size > entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} was altered: {size} bytes instead of {entry['bytes']}."
            )
        total += size
    if hashes:
        with ThreadPoolExecutor(_threads()) as pool:
            digests = pool.map(_digest, (folder / name for name in entries))
            for name, digest in zip(entries, digests, strict=True):
                if digest != entries[name]["sha256"]:
                    raise CheckpointError(f"{folder / name} was altered: its SHA-256 differs.")
    return total


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is missing: not a whole checkpoint.") from None
    try:
        entries = json.loads(data)["files"]
        whole = _rendered(entries) == data and all(
            isinstance(entry["bytes"], int) and isinstance(entry["sha256"], str)
            for entry in entries.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is truncated or was altered.")
    return entries


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_and_sync(file: Path, mode: int) -> dict[str, Any]:
    """Hash and sync a file, and set its mode.

    Some libraries write through temporary files that only their owner may read.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if os.fstat(opened.fileno()).st_mode & 0o777 != mode:
            with suppress(OSError):  # a file system without modes
                os.fchmod(opened.fileno(), mode)
        os.fsync(opened.fileno())
        return {"bytes": os.fstat(opened.fileno()).st_size, "sha256": digest}


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        for name in (*names, *folders):
            path = Path(place, name)
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise ValueError(
                    f"a checkpoint must hold plain files only; got {path}. Copy what it points to."
                )
            if name in names and path != folder / MANIFEST:
                yield path


def _rendered(entries: dict[str, Any]) -> bytes:
    """The manifest of these files: it carries its own digest, so no byte of it can change."""
    body = json.dumps(entries, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"sha256_of_files": "{digest}",\n"files": {body}}}\n'.encode()


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
