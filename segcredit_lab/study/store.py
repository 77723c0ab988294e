"""Folder of runs, addressed by a digest of the recipe: the same recipe finds its run again."""

import hashlib
import json
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from segcredit.config import Recipe
from segcredit.runlog.files import Lock, write_json_atomically
from segcredit.runlog.folder import CRITIC, POLICY, RunFolder, by_step, step_name
from segcredit.runlog.storage import seal
from segcredit.train.checkpoint import mark_unsaved
from segcredit_lab.study.recipes import (
    after,
    pretrains,
)

FINISHED = "finished.json"
"""File in a run folder: all stages are done, and unneeded checkpoints are deleted."""
LETTERS = 10
"""Characters of the digest in a folder's name."""

ADDED_FIELDS: dict[tuple[str, str], object] = {("model", "family"): None}
"""Recipe fields that were added after the first studies, with their defaults. A digest leaves them
out at the default, so that runs made before are found again."""

Kind = Literal["warm", "tune", "run"]


@dataclass(frozen=True)
class StudyRun:
    """A run that a study needs, finished or not."""

    arm: str
    kind: Kind
    whole: Recipe
    """Recipe including the stages of its start, if that is a separate run."""
    start: "StudyRun | None" = None
    """Run whose final models it starts from: a warm start, with or without a pretrained critic."""

    @property
    def seed(self) -> int:
        return self.whole.seed

    @cached_property
    def digest(self) -> str:
        """Digest of the complete recipe and of its start, without the run's name and folder.

        It contains the method's repr, so a setting may be left out or set to its default.
        """
        recipe = self.recipe("start")
        content = recipe.as_dict() | {"algorithm": repr(recipe.make_algorithm())}
        content.pop("name")
        content["data"].pop("allow_outside")  # a permission, which does not change results
        for (section, field), default in ADDED_FIELDS.items():
            if content[section][field] == default:
                del content[section][field]
        text = json.dumps([content, self.start.digest if self.start else None], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:LETTERS]

    @property
    def name(self) -> str:
        """Name of the run folder."""
        what = self.arm if self.kind == "run" else f"{self.kind}-{self.arm}"
        return f"{what}-s{self.seed}-{self.digest}"

    @property
    def starts(self) -> "list[StudyRun]":
        """All runs that must finish before this one, in order."""
        return [] if self.start is None else [*self.start.starts, self.start]

    @property
    def steps(self) -> int:
        """Steps of this run, without its start."""
        return self.recipe("start").total_steps

    @property
    def keeps(self) -> tuple[str, ...]:
        """Parts of the last checkpoint to keep when the run is finished."""
        if self.kind == "tune":
            return ()
        return (POLICY, CRITIC) if self.kind == "warm" and pretrains(self.whole) else (POLICY,)

    def recipe(self, start: str) -> Recipe:
        """Recipe to train, starting from the checkpoint ``start`` if the run has a start."""
        return self.whole if self.start is None else after(self.whole, self.start.whole, start)


class Store:
    """Folder with the runs of all studies."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    def folder(self, run: StudyRun) -> Path:
        """Folder of a run; another arm with the same digest may have named it."""
        return existing_folder(self.path / run.name)

    def finished(self, run: StudyRun) -> bool:
        """Whether a run is finished and cleaned up."""
        return is_finished(self.folder(run))

    def reopen(self, run: StudyRun) -> None:
        """Mark a run as unfinished because its model was deleted."""
        folder = RunFolder(self.folder(run))
        if folder.config.is_file():
            mark_unsaved(folder.checkpoints)
        (folder.path / FINISHED).unlink(missing_ok=True)  # another study may have finished it

    def note_failure(self, run: StudyRun, message: str) -> None:
        """Record why a run failed, for tables that are written later."""
        place = self._failure(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(place, {"message": message})

    def forget_failure(self, run: StudyRun) -> None:
        """Delete the record of a failure when the run is tried again."""
        self._failure(run).unlink(missing_ok=True)

    def failure(self, run: StudyRun) -> str | None:
        """Why the last attempt failed; None if it did not."""
        try:
            return str(json.loads(self._failure(run).read_bytes())["message"])
        except FileNotFoundError:
            return None

    def _failure(self, run: StudyRun) -> Path:
        """Failure record, outside the run folder because a run may fail before it has one."""
        return self.path / ".failed" / f"{run.digest}.json"

    def recipe(self, run: StudyRun) -> Recipe:
        """Recipe to train, with the path of its start in this store."""
        start = run.start
        return run.recipe("" if start is None else str(self.last(start)))

    def last(self, run: StudyRun) -> Path:
        """Last checkpoint of a finished run."""
        return RunFolder(self.folder(run)).checkpoints / step_name(run.steps)

    def has_models(self, run: StudyRun) -> bool:
        """Whether the models that other runs start from still exist."""
        return all((self.last(run) / name).is_dir() for name in run.keeps)


def existing_folder(own: Path) -> Path:
    """Return this folder, or an existing one of another arm with the same digest."""
    if own.is_dir():
        return own
    digest = own.name.rpartition("-")[2]
    return next(iter(sorted(own.parent.glob(f"*-{digest}"))), own)


def claim(own: Path) -> Lock:
    """Lock a run for this process; raise LockedError if another process holds it.

    The trainer's own lock is released after training, before checkpoints are cleaned up.
    """
    place = own.parent / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    return Lock(place / own.name.rpartition("-")[2])


def record_of(folder: Path) -> dict[str, Any] | None:
    """Content of finished.json; None while the run is not finished."""
    try:
        found = json.loads((folder / FINISHED).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if isinstance(found, dict) else None


def is_finished(folder: Path) -> bool:
    """Whether a run is finished and cleaned up."""
    record = record_of(folder)
    return record is not None and record.get("cleared") is True


def finish(folder: Path, keep: Collection[str]) -> None:
    """Mark a run as finished and delete all checkpoints except these parts of the last one.

    Optimizers and reference model are most of a run's size. If the process is killed in between,
    the next call completes the cleanup.
    """
    if record_of(folder) is None:
        write_json_atomically(folder / FINISHED, {"cleared": False})
    steps = [path for _, path in by_step(RunFolder(folder).checkpoints)]
    last = steps[-1] if keep and steps else None
    for path in RunFolder(folder).checkpoints.iterdir():
        if path != last:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if last is not None:
        for path in last.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        seal(last)
    write_json_atomically(folder / FINISHED, {"cleared": True})
