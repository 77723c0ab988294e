"""Paths of a run directory, and the lock that allows one process to write to it."""

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from segcredit.runlog.files import Lock, LockedError, remove_leftovers
from segcredit.runlog.untrusted import FLAG, read_yaml, requests_of

GIVEN_IN_PYTHON = "given_in_python"
"""Key in config.yaml for the parts of a run that were objects in Python."""
_STEP = re.compile(r"step-(\d+)(\.jsonl)?")
_LONGEST_NAME = 50  # characters of up to 4 bytes; file names have at most 255 bytes


class RunError(ValueError):
    """A folder is not a run, is already a run, or is being written by another process."""


class RunFolder:
    """Paths of a run; from :meth:`create` or :meth:`open` it also holds the run's lock.

    ``RunFolder(path)`` alone neither reads nor writes anything.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config = self.path / "config.yaml"
        """All settings; training with this file repeats the run."""
        self.metrics = self.path / "metrics.jsonl"
        self.environment = self.path / "environment.json"
        self.trackers = self.path / "trackers.json"
        """Ids of this run in wandb and mlflow, for resuming."""
        self.rollouts = self.path / "rollouts"
        self.watched = self.path / "watched"
        """Responses to the same few held-out prompts at several steps, with credit."""
        self.images = self.path / "images"
        """Images of recorded prompts, each once."""
        self.evaluations = self.path / "evaluations"
        self.benchmarks = self.path / "benchmarks"
        """Answers of checkpoints to benchmarks, for the report: CHECKPOINT/SET.json."""
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best.json"
        """Step, metric and value of the best checkpoint (``save.best``)."""
        self.tensorboard = self.path / "tensorboard"
        self.plots = self.path / "plots"
        self.rolled_back = self.path / "rolled_back"
        """Files removed from the run by a resume from an earlier step, one folder per resume."""
        self._lock: Lock | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunFolder":
        """Create and lock a new run; refuse a folder that already contains one."""
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot create the run directory {folder.path}: {error.strerror}. Choose "
                "another folder."
            ) from error
        folder._refuse_a_run()
        folder._acquire()
        try:
            folder._refuse_a_run()  # another process may have created it meanwhile
            folder._make_subfolders()
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Lock an existing run to continue it; temporary files of killed processes are deleted.

        To read a run without a lock, use :func:`segcredit.runlog.read_run`.
        """
        folder = cls(path)
        require_run(folder)
        folder._acquire()
        try:
            folder._make_subfolders()
            for place in (folder.path, *folder._subfolders()):
                remove_leftovers(place)
        except BaseException:
            folder.close()
            raise
        return folder

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def _make_subfolders(self) -> None:
        for place in self._subfolders():
            place.mkdir(exist_ok=True)

    def _subfolders(self) -> tuple[Path, ...]:
        recorded = (self.rollouts, self.watched, self.images, self.evaluations)
        return *recorded, self.checkpoints, self.tensorboard, self.plots

    def _refuse_a_run(self) -> None:
        found = [
            file.name for file in (self.config, self.metrics, self.environment) if exists(file)
        ]
        found += [place.name for place in self._subfolders() if place.is_dir() and _filled(place)]
        if not found:
            return
        if exists(self.config):
            advice = f"Resume it: {resume_command(self.path)}. Or choose another folder."
        else:
            advice = "It has no config.yaml, so it cannot be resumed: choose another folder."
        raise RunError(f"{self.path} already contains a run ({', '.join(found)}). {advice}")

    def _acquire(self) -> None:
        for file in (self.path / ".lock", self.metrics):  # others are replaced, links included
            if file.is_symlink():
                raise RunError(
                    f"expected a file that belongs to the run; got a link, {file}, through which "
                    f"another file would be overwritten. Replace it with a copy of that file, or "
                    f"delete it."
                )
        try:
            self._lock = Lock(self.path / ".lock")
        except LockedError as error:
            pid = error.holder
            who, how = (f"process {pid}", f" (kill {pid})") if pid else ("another process", "")
            raise RunError(
                f"{who} is writing to the run {self.path}, and two writers would damage it. "
                f"Wait for it or stop it{how}, or choose another folder."
            ) from None
        except OSError as error:
            raise RunError(
                f"cannot write in the run directory {self.path}: {error.strerror}. Make it "
                "writable, or choose another folder."
            ) from error


def exists(path: Path) -> bool:
    """Whether the path exists; a broken link counts."""
    return path.exists() or path.is_symlink()


def _filled(folder: Path) -> bool:
    return any(folder.iterdir())


POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
"""Folders of the models in a checkpoint."""
INITIAL = "initial"
"""Folder beside the checkpoints with the model that a run started from, if it came from memory."""


def step_name(step: int) -> str:
    """Return the name of files and folders of one step: step-000012."""
    if step < 0:
        raise ValueError(f"step must be at least 0; got {step}.")
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in such a name, or None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def by_step(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the paths in a folder that are named after a step, in order."""
    if not folder.is_dir():
        return
    named = [(step_of(path.name), path) for path in folder.iterdir()]
    yield from sorted((step, path) for step, path in named if step is not None)


def later_than(folder: Path, step: int) -> list[Path]:
    """Return the paths in a folder that are named after a later step."""
    return [path for number, path in by_step(folder) if number > step]


def require_run(folder: RunFolder) -> None:
    """Raise RunError unless the folder is a run."""
    if is_run(folder.path):
        return
    reason = "there is no config.yaml in it" if folder.path.is_dir() else "there is no such folder"
    if folder.config.is_file():
        reason = "it is a model, because it has a config.json beside its config.yaml"
    near = runs_in(folder.path) or runs_in(folder.path.parent)
    advice = (
        f"Runs nearby: {', '.join(shlex.quote(str(path)) for path in near[:5])}."
        if near
        else "A run directory is what segcredit train writes, such as runs/NAME-DATE-TIME."
    )
    raise RunError(f"{folder.path} is not a run: {reason}. {advice}")


def is_run(path: Path) -> bool:
    """Whether a folder is a run: it has a config.yaml but no config.json, unlike a model."""
    return (path / "config.yaml").is_file() and not (path / "config.json").is_file()


def runs_in(root: Path) -> list[Path]:
    """Return the runs in a folder, newest first."""
    try:
        found = [(config.stat().st_mtime, config.parent) for config in root.glob("*/config.yaml")]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def file_inside(folder: Path, name: str) -> Path | None:
    """Return the file that recorded data names, links followed; None if it is not in the folder."""
    try:
        path = (folder / name).resolve()
        inside = path.is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # an impossible file name, or links in a loop
        return None
    return path if inside else None


def resume_command(path: Path, change: str = "") -> str:
    """Return the command that resumes a run, with ``--trust-run`` if its settings need it.

    For a run with objects of Python it is a call in Python. ``change`` is a setting to change.
    """
    try:
        config = read_yaml(path / "config.yaml")
    except (OSError, ValueError):  # missing or damaged, which resuming will report
        config = None
    config = config if isinstance(config, dict) else {}
    if config.get(GIVEN_IN_PYTHON):
        return resume_call(path) + (f" with the setting {change}" if change else "")
    flag = f" {FLAG}" if requests_of(config) else ""
    return f"segcredit train --resume {shlex.quote(str(path))}{flag} {change}".rstrip()


def resume_call(path: Path) -> str:
    """Return the call that resumes a run in Python."""
    return f"Trainer(…).train(folder={str(path)!r}, resume=True)"


def new_run_path(name: str, root: str | Path = "runs") -> Path:
    """Create a folder root/NAME-YYYYmmdd-HHMMSS; a number is added if it exists."""
    plain = re.sub(r"[^\w.-]+", "-", name)[:_LONGEST_NAME].strip(".-") or "run"
    return _new_folder(Path(root).expanduser() / f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}")


def new_rollback(folder: RunFolder, step: int) -> Path:
    """Create an empty folder for the files that a resume from this step removes."""
    return _new_folder(folder.rolled_back / f"{time.strftime('%Y%m%d-%H%M%S')}-{step_name(step)}")


def _new_folder(stamped: Path) -> Path:
    path, number = stamped, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = stamped.with_name(f"{stamped.name}-{number}")
        except OSError as error:
            raise RunError(
                f"cannot create the run directory {path}: {error.strerror}. Choose another folder."
            ) from error
        else:
            return path
