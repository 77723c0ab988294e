"""Mirrors of the metrics: TensorBoard, and wandb, trackio or mlflow by name, imported on use."""

import difflib
import importlib
import json
import re
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from segcredit.runlog.files import write_json_atomically
from segcredit.runlog.folder import RunFolder

PROJECT = "segcredit"


@runtime_checkable
class Tracker(Protocol):
    """Shows metrics elsewhere; what it raises costs the run a warning, no more."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step, named stage/key."""
        ...

    def close(self) -> None:
        """Hand over what is left."""
        ...


class TensorBoard:
    """Event files in the run folder's tensorboard/.

    On resume, ``first_step`` is the first step that will be written again: TensorBoard then hides
    what an earlier process wrote from there on, and curves do not double.
    """

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], first_step: int | None
    ) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        _wait_for_a_later_second(folder.tensorboard)
        self._writer = module.SummaryWriter(str(folder.tensorboard), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, x in metrics.items():
            self._writer.add_scalar(name, x, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_second(folder: Path) -> None:
    """A run that is resumed at once must not come before itself.

    Event files are read in the order of their names, which begin with the second of their making
    and go on with numbers that do not sort.
    """
    pattern = re.compile(r"events\.out\.tfevents\.(\d+)\.")
    seconds = [int(x[1]) for file in folder.glob("events*") if (x := pattern.match(file.name))]
    while seconds and max(seconds) == int(time.time()):
        time.sleep(0.05)


class Wandb:
    """Weights & Biases; on resume it keeps the first of two values for one step."""

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], first_step: int | None
    ) -> None:
        wandb = importlib.import_module("wandb")
        known = _known(folder)
        name = known.setdefault("wandb", uuid.uuid4().hex)
        write_json_atomically(folder.trackers, known)
        self._run = wandb.init(
            project=PROJECT,
            id=name,
            name=folder.path.name,
            dir=str(folder.path),
            config=dict(config),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, which finds a run again by its name."""

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], first_step: int | None
    ) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(
            project=PROJECT, name=folder.path.name, config=dict(config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class Mlflow:
    """MLflow, which names runs itself: the run folder remembers the name.

    It refuses some signs in names of metrics, and with one of them the whole step.
    """

    def __init__(
        self, folder: RunFolder, config: Mapping[str, Any], first_step: int | None
    ) -> None:
        self._mlflow = importlib.import_module("mlflow")
        known = _known(folder)
        self._mlflow.set_experiment(PROJECT)
        if "mlflow" in known:
            self._mlflow.start_run(run_id=known["mlflow"])
        else:
            run = self._mlflow.start_run(run_name=folder.path.name)
            write_json_atomically(folder.trackers, {**known, "mlflow": run.info.run_id})
            self._mlflow.log_dict(dict(config), "config.yaml")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_plain(name): x for name, x in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _plain(name: str) -> str:
    """pass@4 → pass_at_4."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


TRACKERS: Mapping[str, Callable[[RunFolder, Mapping[str, Any], int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def open_trackers(
    names: Sequence[str],
    folder: RunFolder,
    config: Mapping[str, Any],
    first_step: int | None = None,
) -> list[Tracker]:
    """The trackers of these names; ``first_step``, on resume, is the first to be written again.

    A name that is unknown or not installed is an error; one that cannot start (no network, no
    login) costs a warning.
    """
    for name in names:
        _require_installed(name)
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(TRACKERS[name](folder, config, first_step))
        except Exception as error:
            warnings.warn(
                f"{name} did not start: {type(error).__name__}: {error}. The run goes on without "
                f"it; {folder.metrics} has all metrics.",
                stacklevel=2,
            )
    return opened


def _require_installed(name: str) -> None:
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        advice = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
        raise ValueError(f"trackers are {', '.join(TRACKERS)}; got {name!r}. {advice}")
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"tracker {name!r} needs the package {name}, which cannot be imported ({error}). "
            f"Type: pip install {name}"
        ) from error


def _known(folder: RunFolder) -> dict[str, str]:
    """What the trackers called this run when it began."""
    try:
        return dict(json.loads(folder.trackers.read_bytes()))
    except FileNotFoundError:
        return {}
