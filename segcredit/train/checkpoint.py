"""Write checkpoints atomically, and find complete ones after a kill or a full disk."""

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from segcredit.runlog.files import sync_folder
from segcredit.runlog.folder import by_step, exists, resume_command, step_of
from segcredit.runlog.storage import (
    CheckpointError,
    checked_size,
    load_state,
    save_state,
    seal,
    verify,
)

__all__ = [
    "CheckpointError",
    "LatestCheckpoint",
    "clean_up",
    "find_latest",
    "latest_complete",
    "load_state",
    "mark_unsaved",
    "never_saved",
    "prune",
    "save_checkpoint",
    "save_state",
    "verify",
]

_NAME = re.compile(r"\w[\w.-]*")
_UNFINISHED = re.compile(r"\.(tmp|old|was)-(.+)-(\d+)")
"""Prefixes: tmp: being written; old: being deleted; was: being replaced by one of the same name."""
_UNSAVED = ".no-checkpoint-yet"
"""Marker file in the folder of checkpoints until the first one is saved. If there is neither this
file nor a checkpoint, checkpoints were moved or deleted, and the run must not start over."""
_FULL = "disk full"
_DISK_ERRORS = {
    *(errno.EIO, errno.EROFS, errno.EFBIG, errno.ESTALE),
    *(errno.EACCES, errno.EPERM),
}
_CROWDED = 1 << 20  # with fewer bytes free, any error while writing is reported as a full disk
_MIB = 2**20

_busy: set[Path] = set()
"""Folders in use by this process. Needed because a dead process may have had the same PID."""


class LatestCheckpoint(NamedTuple):
    """The newest complete checkpoint, and one message for each newer one that is damaged."""

    path: Path | None
    refused: list[str]


def save_checkpoint(
    root: Path,
    name: str,
    write: Callable[[Path], None],
    keep: int = 2,
    protect: Collection[str] = (),
) -> Path:
    """Write a checkpoint folder root/name atomically, then delete old checkpoints.

    Only a checkpoint of a step replaces old ones; another folder, such as "reference", deletes
    none and is never deleted.

    Args:
        root: Folder of checkpoints.
        name: Name of the new checkpoint, such as step-000020.
        write: Function that fills the folder it is given.
        keep: Number of newest checkpoints to keep among those named after a step.
        protect: Names that are never deleted.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"a checkpoint's name must be like step-000020; got {name!r}.")
    if keep < 1:
        raise ValueError(f"keep must be at least 1 checkpoint; got {keep}.")
    final = root / name
    temporary = root / f".tmp-{name}-{os.getpid()}"
    try:
        _busy.add(temporary)
        root.mkdir(parents=True, exist_ok=True)
        clean_up(root)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        seal(temporary)
        _put_in_place(temporary, final)
        if step_of(name) is not None:
            with suppress(OSError):  # harmless: the checkpoint itself shows that one was saved
                (root / _UNSAVED).unlink(missing_ok=True)
    except BaseException as error:
        written, free = _size(temporary), _free(root)
        shutil.rmtree(temporary, ignore_errors=True)
        reason = _disk_error(error, free)
        if reason is None:
            raise
        # free + written: the failed writer may still hold the deleted file open
        raise CheckpointError(_cannot_write(root, name, reason, written, free + written)) from error
    finally:
        _busy.discard(temporary)
    if step_of(name) is not None:
        prune(root, keep, {name, *protect})
    return final


def prune(root: Path, keep: int, protect: Collection[str] = ()) -> None:
    """Delete all checkpoints of steps but the newest ``keep`` and those to protect, by name."""
    steps = [path for _, path in by_step(root) if path.is_dir()]
    for path in steps[:-keep]:
        if path.name not in protect:
            _delete(path)


def mark_unsaved(root: Path) -> None:
    """Record that no checkpoint was saved here yet, so that the run may start over."""
    root.mkdir(parents=True, exist_ok=True)
    (root / _UNSAVED).touch()
    sync_folder(root)


def never_saved(root: Path) -> bool:
    """Whether :func:`mark_unsaved` was called and no checkpoint of a step was saved since."""
    return (root / _UNSAVED).exists()


def find_latest(root: Path) -> LatestCheckpoint:
    """Find the newest complete checkpoint, with one message for each newer damaged one.

    A checkpoint that cannot be read may be complete, so it raises OSError.
    """
    clean_up(root)
    return _find_latest(root, hashes=True)


def latest_complete(root: Path) -> Path | None:
    """Find the newest complete checkpoint or None, with a warning for each newer damaged one."""
    found = find_latest(root)
    for message in found.refused:
        warnings.warn(message, stacklevel=2)
    return found.path


def clean_up(root: Path) -> None:
    """Delete leftovers of killed processes; complete checkpoints are not touched.

    A checkpoint that was being replaced by one of the same name gets its name back.
    """
    for path in sorted(root.glob(".*-*-*")):
        match = _UNFINISHED.fullmatch(path.name)
        if match is None or not path.is_dir() or path in _busy or _alive(int(match[3])):
            continue
        try:
            if match[1] == "was" and not exists(root / match[2]):
                path.rename(root / match[2])
            else:
                shutil.rmtree(path)
        except OSError:  # another user's folder or a read-only disk; leftovers do no harm
            continue


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename to the final name; an existing folder is moved aside and restored on failure."""
    if not exists(final):
        temporary.rename(final)
        sync_folder(final.parent)
        return
    aside = final.with_name(f".was-{final.name}-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    _busy.add(aside)
    try:
        final.rename(aside)
        try:
            temporary.rename(final)
        except BaseException:
            aside.rename(final)
            raise
        sync_folder(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        _busy.discard(aside)


def _delete(folder: Path) -> None:
    """Delete a checkpoint under another name, so that a partial folder never looks complete."""
    aside = folder.with_name(f".old-{folder.name}-{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        sync_folder(folder.parent)
        shutil.rmtree(aside)
    except OSError as error:
        warnings.warn(f"cannot delete the old checkpoint {folder}: {error}.", stacklevel=3)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # this process's folders are in _busy
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _find_latest(root: Path, hashes: bool) -> LatestCheckpoint:
    refused = []
    for _, path in reversed(list(by_step(root))):
        try:
            checked_size(path, hashes)
        except CheckpointError as error:
            refused.append(f"checkpoint {path.name} is refused: {error}")
        else:
            return LatestCheckpoint(path, refused)
    return LatestCheckpoint(None, refused)


def _disk_error(error: BaseException, free: int) -> str | None:
    """Describe a disk error, or return None if the disk did not cause the failure."""
    number = _errno(error)
    if number == errno.ENOSPC:
        return _FULL
    if number is None:
        return _FULL if isinstance(error, Exception) and free < _CROWDED else None
    if number == errno.EDQUOT:
        return "disk full (quota)"
    return os.strerror(number) if number in _DISK_ERRORS else None


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    if type(error).__name__ == "SafetensorError":  # Rust's errors come as text
        found = re.search(r"(?:os error|code:) (\d+)", str(error))
        return int(found[1]) if found else None
    return None


def _cannot_write(root: Path, name: str, reason: str, written: int, free: int) -> str:
    needed = written
    try:
        last = _find_latest(root, hashes=False).path
        if last is not None:
            needed = max(needed, checked_size(last, hashes=False))
    except OSError:
        ends = "Earlier checkpoints were not touched."
    else:
        ends = (
            "There is no complete checkpoint yet."
            if last is None
            else f"Nothing finished is lost: the last complete checkpoint is {last}."
        )
    if reason == _FULL:
        needed = max(needed, free)  # it did not fit into what was free
    return (
        f"{reason} at {root}: checkpoint {name} needs at least {needed / _MIB:.1f} MiB, "
        f"{free / _MIB:.1f} MiB are free. {ends} Free disk space or fix the disk, then run: "
        f"{resume_command(root.parent)}"
    )


def _size(folder: Path) -> int:
    """Sum the bytes written so far."""
    files = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    return sum(file.lstat().st_size for file in files)


def _free(root: Path) -> int:
    """Return the free bytes on the disk of a folder that may not exist yet."""
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return _free(root.parent) if root != root.parent else 0
