"""Send metrics to TensorBoard, wandb, trackio or mlflow; the packages are imported on use."""

import importlib
import json
import re
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from segcredit.registry import nearest
from segcredit.runlog.files import write_json_atomically
from segcredit.runlog.folder import RunFolder

PROJECT = "segcredit"


@runtime_checkable
class Tracker(Protocol):
    """Receives metrics; if it raises an exception, the run warns and continues."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step, named stage/key."""
        ...

    def close(self) -> None:
        """Send remaining metrics and close."""
        ...


class TensorBoard:
    """Writes event files to tensorboard/ in the run directory.

    On resume, ``first_step`` is the first step that is written again; TensorBoard hides what was
    written before from that step on.
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
    """Wait until a new event file sorts after those of the run before the resume.

    Event files are read in the order of their names. A name begins with the second in which it was
    created; the rest of the name does not sort by time.
    """
    pattern = re.compile(r"events\.out\.tfevents\.(\d+)\.")
    seconds = [int(x[1]) for file in folder.glob("events*") if (x := pattern.match(file.name))]
    while seconds and max(seconds) == int(time.time()):
        time.sleep(0.05)


class Wandb:
    """Weights & Biases. On resume it keeps the first of two values for one step."""

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
    """Trackio, which identifies a run by its name."""

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
    """MLflow, which assigns ids to runs; the id is stored in the run directory.

    It rejects a whole step if the name of a metric contains certain characters.
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
    """Replace characters that MLflow rejects: pass@4 → pass_at_4."""
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
    """Open trackers by name.

    An unknown or missing package is an error; a tracker that cannot start (no network, no login)
    causes a warning. On resume, ``first_step`` is the first step that is written again.
    """
    for name in names:
        _require_installed(name)
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(TRACKERS[name](folder, config, first_step))
        except Exception as error:
            warnings.warn(
                f"{name} did not start: {type(error).__name__}: {error}. The run continues without "
                f"it; {folder.metrics} has all metrics.",
                stacklevel=2,
            )
    return opened


def _require_installed(name: str) -> None:
    if name not in TRACKERS:
        hint = nearest(name, TRACKERS) or " Choose one of these."
        raise ValueError(f"trackers are {', '.join(TRACKERS)}; got {name!r}.{hint}")
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"tracker {name!r} needs the package {name}, which cannot be imported ({error}). "
            f"Type: pip install {name}"
        ) from error


def _known(folder: RunFolder) -> dict[str, str]:
    """Return the ids of this run in the trackers."""
    try:
        return dict(json.loads(folder.trackers.read_bytes()))
    except FileNotFoundError:
        return {}
