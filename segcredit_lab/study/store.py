"""Where runs lie, by what they are: the same recipe is found again, a changed one is another."""

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
"""In a run's folder: it went through all its stages, and what nobody needs any more is deleted."""
LETTERS = 10
"""Of a digest, in a folder's name."""

ADDED_FIELDS: dict[tuple[str, str], object] = {("model", "family"): None}
"""Recipe fields that were added after the first studies, with their defaults. A digest leaves them
out at the default, so that runs made before are found again."""

Kind = Literal["warm", "tune", "run"]


@dataclass(frozen=True)
class Planned:
    """A run that a study needs, done or not."""

    arm: str
    kind: Kind
    whole: Recipe
    """With the stages of its start, if that is a run of its own."""
    start: "Planned | None" = None
    """The run whose last models it begins from: a warm start, or that with a pretrained critic."""

    @property
    def seed(self) -> int:
        return self.whole.seed

    @cached_property
    def digest(self) -> str:
        """Of the complete recipe and of its start's; a run's name and place do not matter.

        The method counts as it was made, so that a setting may be left out or set to its default.
        """
        recipe = self.recipe("start")
        said = recipe.as_dict() | {"algorithm": repr(recipe.make_algorithm())}
        said.pop("name")
        said["data"].pop("allow_outside")  # a permission, which does not change results
        for (section, field), default in ADDED_FIELDS.items():
            if said[section][field] == default:
                del said[section][field]
        told = json.dumps([said, self.start.digest if self.start else None], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:LETTERS]

    @property
    def name(self) -> str:
        """Of its folder."""
        what = self.arm if self.kind == "run" else f"{self.kind}-{self.arm}"
        return f"{what}-s{self.seed}-{self.digest}"

    @property
    def starts(self) -> "list[Planned]":
        """Everything that must be there before, first things first."""
        return [] if self.start is None else [*self.start.starts, self.start]

    @property
    def steps(self) -> int:
        """Of its own."""
        return self.recipe("start").total_steps

    @property
    def keeps(self) -> tuple[str, ...]:
        """Which parts of its last checkpoint are needed once it is done."""
        if self.kind == "tune":
            return ()
        return (POLICY, CRITIC) if self.kind == "warm" and pretrains(self.whole) else (POLICY,)

    def recipe(self, start: str) -> Recipe:
        """What is run, from the models in the checkpoint ``start`` if it begins from any."""
        return self.whole if self.start is None else after(self.whole, self.start.whole, start)


class Store:
    """A folder of runs."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    def folder(self, planned: Planned) -> Path:
        """Of a run, under whatever arm's name it was begun."""
        return folder_of(self.path / planned.name)

    def finished(self, planned: Planned) -> bool:
        """Whether it is done, and cleared up."""
        return is_finished(self.folder(planned))

    def reopen(self, planned: Planned) -> None:
        """Have a run done again whose model is not there any more."""
        folder = RunFolder(self.folder(planned))
        if folder.config.is_file():
            mark_unsaved(folder.checkpoints)
        (folder.path / FINISHED).unlink(missing_ok=True)  # another study may have finished it

    def note_failure(self, planned: Planned, message: str) -> None:
        """Remember why a run did not come to its end, for tables that are written later."""
        place = self._failure(planned)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(place, {"message": message})

    def forget_failure(self, planned: Planned) -> None:
        """It is tried again."""
        self._failure(planned).unlink(missing_ok=True)

    def failure(self, planned: Planned) -> str | None:
        """Why it failed when it was last tried; None if it did not."""
        try:
            return str(json.loads(self._failure(planned).read_bytes())["message"])
        except FileNotFoundError:
            return None

    def _failure(self, planned: Planned) -> Path:
        """Beside the runs: one may fail before it has a folder."""
        return self.path / ".failed" / f"{planned.digest}.json"

    def recipe(self, planned: Planned) -> Recipe:
        """Ready to run, its start found in this store."""
        start = planned.start
        return planned.recipe("" if start is None else str(self.last(start)))

    def last(self, planned: Planned) -> Path:
        """A finished run's last checkpoint."""
        return RunFolder(self.folder(planned)).checkpoints / step_name(planned.steps)

    def has_models(self, planned: Planned) -> bool:
        """Whether what others begin from is there."""
        return all((self.last(planned) / name).is_dir() for name in planned.keeps)


def folder_of(own: Path) -> Path:
    """The folder of that name, or else of another arm's with the same digest, if there is one."""
    if own.is_dir():
        return own
    digest = own.name.rpartition("-")[2]
    return next(iter(sorted(own.parent.glob(f"*-{digest}"))), own)


def claim(own: Path) -> Lock:
    """Be the only process that works on a run; raises LockedError while another one does.

    The trainer's own lock ends with training, and then there is still something to clear up.
    """
    place = own.parent / ".locks"
    place.mkdir(parents=True, exist_ok=True)
    return Lock(place / own.name.rpartition("-")[2])


def record_of(folder: Path) -> dict[str, Any] | None:
    """What finished.json says; None while the run is not through."""
    try:
        found = json.loads((folder / FINISHED).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if isinstance(found, dict) else None


def is_finished(folder: Path) -> bool:
    """Whether a run is through and cleared up."""
    record = record_of(folder)
    return record is not None and record.get("cleared") is True


def finish(folder: Path, keep: Collection[str]) -> None:
    """Note that a run is through, and delete all of its checkpoints but these parts of the last.

    Optimizers and reference are most of a run's size. Killed in between, it is called
    again and goes on.
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
