"""A lock that the operating system releases when its holder dies, however it dies."""

import errno
import os
import time
import warnings
from pathlib import Path

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
