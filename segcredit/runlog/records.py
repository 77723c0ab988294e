"""Write metrics.jsonl and send the metrics to trackers; write and read recorded responses."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from segcredit.runlog.files import (
    read_some_lines,
    replacing,
    restore_nonfinite,
    sync_folder,
    to_line,
    write_bytes_atomically,
)
from segcredit.runlog.folder import resume_command, step_name
from segcredit.runlog.trackers import Tracker

WARNING = "warning"
"""Stage of lines that contain a warning instead of metrics."""
_RESERVED = ("step", "stage")


class MetricsWriter:
    """Appends lines such as ``{"step": 12, "stage": "train", "reward": 0.5, …}``.

    Numbers that are not finite are written as "NaN", "Infinity" and "-Infinity", and read back as
    numbers by :func:`segcredit.runlog.read_run`. Each line is passed to the operating system at
    once, so killing the process loses none. An incomplete last line of an earlier process is
    removed on opening.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self.path = path
        self._trackers = tuple(trackers)
        self._failed: set[int] = set()
        self._file = path.open("ab", buffering=0)
        self._position = path.read_bytes().rfind(b"\n") + 1
        self._file.truncate(self._position)
        sync_folder(path.parent)

    def write(self, step: int, stage: str, metrics: Mapping[str, Any]) -> None:
        """Append one line; values are numbers or tensors of one number."""
        _check(step, stage, metrics)
        numbers = {key: _number(key, x) for key, x in metrics.items()}
        self._append(to_line({"step": step, "stage": stage, **numbers}))
        mirrored = {f"{stage}/{key}": float(x) for key, x in numbers.items()}
        self._call_trackers(lambda tracker: tracker.log(step, mirrored))

    def warn(self, step: int, name: str, message: str) -> None:
        """Append a warning as a separate line; it is not sent to trackers."""
        self._append(to_line({"step": step, "stage": WARNING, "name": name, "message": message}))

    def sync(self) -> None:
        """Sync the lines to disk, so that they survive a power failure."""
        os.fsync(self._file.fileno())

    def position(self) -> int:
        """Return the offset after the last complete line, which a checkpoint records."""
        return self._position

    def truncate(self, position: int) -> None:
        """Drop the lines written after a checkpoint; :func:`lines_after` returns them."""
        if position > self._position:
            warnings.warn(
                f"{self.path} has {self._position} bytes, fewer than the {position} that the "
                f"checkpoint recorded: some lines are lost. New lines follow the last one.",
                stacklevel=2,
            )
            return
        lines_after(self.path, position)
        self._file.truncate(position)
        self._position = position
        self.sync()

    def close(self) -> None:
        """Close the file and the trackers."""
        if not self._file.closed:
            self.sync()
            self._file.close()
            self._call_trackers(lambda tracker: tracker.close())

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):  # a full disk may accept a part of the line first
                written += self._file.write(line[written:])
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._position)
            raise OSError(
                error.errno,
                f"{error.strerror} at {self.path}. Free disk space, then type: "
                f"{resume_command(self.path.parent)}",
            ) from error
        self._position += written

    def _call_trackers(self, action: Callable[[Tracker], None]) -> None:
        """Call all trackers; a failure causes one warning and does not stop the run."""
        for number, tracker in enumerate(self._trackers):
            try:
                action(tracker)
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    warnings.warn(
                        f"{type(tracker).__name__} failed: {type(error).__name__}: {error}. The "
                        f"run continues; {self.path} has all metrics. Shown only once.",
                        stacklevel=3,
                    )


def lines_after(path: Path, position: int) -> bytes:
    """Return the lines written after a checkpoint that recorded this position.

    Empty if the file ends before it; ValueError if no line ends there.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, position - 1))
            found = file.read()
    except FileNotFoundError:
        return b""
    if position < 0 or (position and found and found[:1] != b"\n"):
        raise ValueError(
            f"expected a line of {path} to end at byte {position}, as the checkpoint recorded; "
            f"none does, so the file was changed. Move it away to start a new one, then resume."
        )
    return found[1:] if position else found


def _check(step: int, stage: str, metrics: Mapping[str, Any]) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be a whole number, at least 0; got {step!r}.")
    if not isinstance(stage, str) or not stage:
        raise ValueError(f"stage must be a name such as 'train'; got {stage!r}.")
    for key in metrics:
        if not isinstance(key, str) or key in _RESERVED:
            raise ValueError(
                f"a metric's name must be a string other than 'step' and 'stage'; got {key!r}."
            )


def _number(key: str, x: Any) -> int | float:
    try:
        if isinstance(x, str | bytes):
            raise TypeError
        return int(x) if isinstance(x, int) else float(x)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError on many numbers
        raise ValueError(
            f"metric {key!r} must be one number; got {type(x).__name__} {x!r:.60}. Pass x.mean() "
            f"or omit it."
        ) from None


_NUMBERS = frozenset({"entropy", "value", "image_kl", "advantage", "ratio", "logp_old", "reward"})
"""Columns in which the string "NaN" is a number and not model output."""


def write_rollouts(folder: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the responses of one step, completely or not at all; an earlier file is replaced."""
    path = folder / f"{step_name(step)}.jsonl"
    with replacing(path) as file:
        for row in rows:
            file.write(to_line(row))
    return path


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a file."""
    return sample_rollouts(path, None)[0]


def sample_rollouts(path: Path, count: int | None) -> tuple[list[dict[str, Any]], int]:
    """Read at most ``count`` evenly spaced rows; return them and the total number."""
    rows, total = read_some_lines(path, count)
    return [
        {key: restore_nonfinite(x) if key in _NUMBERS else x for key, x in row.items()}
        for row in rows
    ], total


def evenly(steps: list[int], count: int | None) -> list[int]:
    """Select at most ``count`` evenly spaced steps, including the first and the last."""
    if count is None or len(steps) <= count:
        return steps
    if count == 1:
        return steps[-1:]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


_KINDS = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"RIFF": "webp",
}
"""First bytes of image formats, and their file suffixes."""


def save_image(folder: Path, image: bytes | Path) -> str:
    """Copy an image into the run directory; return its path there, or "" if its file is gone."""
    try:
        data = image if isinstance(image, bytes) else image.read_bytes()
    except OSError:
        return ""
    kind = next((kind for begins, kind in _KINDS.items() if data.startswith(begins)), "bin")
    path = folder / f"{hashlib.sha256(data).hexdigest()[:24]}.{kind}"
    if not path.exists():
        write_bytes_atomically(path, data)
    return f"{folder.name}/{path.name}"
