"""Where everything of one run lies, and who may write there."""

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from segcredit.runlog.files import Lock, LockedError, remove_leftovers
from segcredit.runlog.untrusted import FLAG, read_yaml, requests_of

_STEP = re.compile(r"step-(\d+)(\.jsonl)?")
_LONGEST_NAME = 50  # characters: file names end at 255 bytes, and a character has up to 4


class RunError(ValueError):
    """A folder that is no run, is one already, or is being written by someone else."""


class RunFolder:
    """The paths of a run; made by :meth:`create` or :meth:`open`, it also holds the run's lock.

    ``RunFolder(path)`` alone is only a set of names: it touches nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config = self.path / "config.yaml"
        """Complete: running it again repeats the run."""
        self.metrics = self.path / "metrics.jsonl"
        self.environment = self.path / "environment.json"
        self.trackers = self.path / "trackers.json"
        """What wandb and mlflow call this run, to go on with it."""
        self.rollouts = self.path / "rollouts"
        self.watched = self.path / "watched"
        """The same few held-out prompts again and again, with credit."""
        self.images = self.path / "images"
        """The pictures of recorded prompts, each once."""
        self.evaluations = self.path / "evaluations"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.plots = self.path / "plots"
        self.rolled_back = self.path / "rolled_back"
        """Files removed from the run by a resume from an earlier step, one folder per resume."""
        self._lock: Lock | None = None

    @classmethod
    def create(cls, path: str | Path) -> "RunFolder":
        """A new run, locked; refuses a folder that already holds one."""
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot make the run folder {folder.path}: {error.strerror}. Choose another place."
            ) from error
        folder._refuse_a_run()
        folder._acquire()
        try:
            folder._refuse_a_run()  # someone may have been quicker
            folder._make_subfolders()
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run, locked, to go on writing; what killed writers left is cleared away.

        Only to read it, call :func:`segcredit.runlog.read_run`, which takes no lock.
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
        """Let other processes write the run."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            advice = f"Go on with it: {resume_command(self.path)}. Or choose another folder."
        else:
            advice = "It has no config.yaml, so it cannot be resumed: choose another folder."
        raise RunError(f"{self.path} already holds a run ({', '.join(found)}). {advice}")

    def _acquire(self) -> None:
        try:
            self._lock = Lock(self.path / ".lock")
        except LockedError as error:
            pid = error.holder
            who, how = (f"process {pid}", f" (kill {pid})") if pid else ("another process", "")
            raise RunError(
                f"{who} is writing the run {self.path}, and two would spoil it. "
                f"Wait for it or stop it{how}, or choose another folder."
            ) from None
        except OSError as error:
            raise RunError(
                f"cannot write in the run folder {self.path}: {error.strerror}. Choose another."
            ) from error


def exists(path: Path) -> bool:
    """Whether anything is there, a broken link included."""
    return path.exists() or path.is_symlink()


def _filled(folder: Path) -> bool:
    return any(folder.iterdir())


POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
"""The models of a checkpoint, each a folder."""


def step_name(step: int) -> str:
    """What files and folders of one step are called: step-000012."""
    if step < 0:
        raise ValueError(f"step must be at least 0; got {step}.")
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in such a name, or None."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def by_step(folder: Path) -> Iterator[tuple[int, Path]]:
    """Whatever is named after a step in the folder, in the order of the steps."""
    if not folder.is_dir():
        return
    named = [(step_of(path.name), path) for path in folder.iterdir()]
    yield from sorted((step, path) for step, path in named if step is not None)


def later_than(folder: Path, step: int) -> list[Path]:
    """Paths that are named after a later step."""
    return [path for number, path in by_step(folder) if number > step]


def require_run(folder: RunFolder) -> None:
    """Raise RunError unless the folder holds a run."""
    if is_run(folder.path):
        return
    reason = "there is no config.yaml in it" if folder.path.is_dir() else "there is no such folder"
    if folder.config.is_file():
        reason = "it is a model, because it has a config.json beside its config.yaml"
    near = runs_in(folder.path) or runs_in(folder.path.parent)
    advice = (
        f"Runs near by: {', '.join(shlex.quote(str(path)) for path in near[:5])}."
        if near
        else "A run folder is what segcredit train writes, such as runs/NAME-DATE-TIME."
    )
    raise RunError(f"{folder.path} holds no run: {reason}. {advice}")


def is_run(path: Path) -> bool:
    """Whether a folder is a run: it has a config.yaml but no config.json, unlike a model."""
    return (path / "config.yaml").is_file() and not (path / "config.json").is_file()


def runs_in(root: Path) -> list[Path]:
    """The runs that lie in a folder, newest first."""
    try:
        found = [(config.stat().st_mtime, config.parent) for config in root.glob("*/config.yaml")]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def resume_command(path: Path) -> str:
    """Command that resumes a run, with ``--trust-run`` if its settings need it."""
    try:
        config = read_yaml(path / "config.yaml")
    except (OSError, ValueError):  # missing or damaged: resuming it says so
        config = None
    flag = f" {FLAG}" if isinstance(config, dict) and requests_of(config) else ""
    return f"segcredit train --resume {shlex.quote(str(path))}{flag}"


def new_run_path(name: str, root: str | Path = "runs") -> Path:
    """A new, empty folder root/NAME-YYYYmmdd-HHMMSS, nobody else's even within one second."""
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
                f"cannot make the run folder {path}: {error.strerror}. Choose another place."
            ) from error
        else:
            return path
