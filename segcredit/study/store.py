"""Where runs lie, by what they are: the same recipe is found again, a changed one is another."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from segcredit.config import Recipe
from segcredit.runlog.atomic import write_json_atomically
from segcredit.runlog.folder import RunFolder, by_step, step_name
from segcredit.runlog.lock import Lock
from segcredit.runlog.manifest import seal
from segcredit.study.recipes import after_warm_start

FINISHED = "finished.json"
"""In a run's folder: it went through all its stages, and what nobody needs any more is deleted."""
POLICY = "policy"
LETTERS = 10
"""Of a digest, in a folder's name."""

Kind = Literal["warm", "tune", "run"]


@dataclass(frozen=True)
class Planned:
    """A run that a study needs, done or not."""

    arm: str
    kind: Kind
    whole: Recipe
    """With the stages of the warm start, if it has one that is a run of its own."""
    start: "Planned | None" = None
    """The run whose last model it begins from."""

    @property
    def seed(self) -> int:
        return self.whole.seed

    @cached_property
    def digest(self) -> str:
        """Of the complete recipe and of its start's; a run's name and place do not matter.

        The method counts as it was made, so that a setting may be left out or set to its default.
        """
        recipe = self.recipe("start" if self.start else None)
        said = recipe.as_dict() | {"algorithm": repr(recipe.make_algorithm())}
        said.pop("name")
        told = json.dumps([said, self.start.digest if self.start else None], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:LETTERS]

    @property
    def name(self) -> str:
        """Of its folder."""
        what = self.arm if self.kind == "run" else f"{self.kind}-{self.arm}"
        return f"{what}-s{self.seed}-{self.digest}"

    def recipe(self, start: str | None) -> Recipe:
        """What is run, from the model in the folder ``start``."""
        return self.whole if start is None else after_warm_start(self.whole, start)


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
        (self.folder(planned) / FINISHED).unlink()

    def recipe(self, planned: Planned) -> Recipe:
        """Ready to run, its start found in this store."""
        start = planned.start
        return planned.recipe(None if start is None else str(self.model(start)))

    def model(self, planned: Planned) -> Path:
        """Where a finished run's policy lies."""
        last = step_name(planned.recipe(None).total_steps)
        return RunFolder(self.folder(planned)).checkpoints / last / POLICY


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


def finish(folder: Path, keep_policy: bool) -> None:
    """Note that a run is through, and delete what only going on with it would need.

    Optimizers, critic and reference are most of a run's size. Killed in between, it is called
    again and goes on.
    """
    if record_of(folder) is None:
        write_json_atomically(folder / FINISHED, {"cleared": False})
    steps = [path for _, path in by_step(RunFolder(folder).checkpoints)]
    last = steps[-1] if keep_policy and steps else None
    for path in RunFolder(folder).checkpoints.iterdir():
        if path != last:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if last is not None:
        for path in last.iterdir():
            if path.name != POLICY:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        seal(last)
    write_json_atomically(folder / FINISHED, {"cleared": True})
