"""Read a run directory, even one in progress, without loading a model or torch."""

import json
import math
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from segcredit.registry import nearest
from segcredit.runlog.files import read_lines, restore_nonfinite
from segcredit.runlog.folder import RunFolder, by_step, require_run, step_name
from segcredit.runlog.records import WARNING, read_rollouts
from segcredit.runlog.storage import CheckpointError, verify
from segcredit.runlog.untrusted import FLAG, read_yaml, require_trust


class Run:
    """Contents of a run directory; each part is read on first use and cached."""

    def __init__(self, path: str | Path, trusted: bool = False) -> None:
        self.folder = RunFolder(path)
        self.trusted = trusted
        """Whether code that config.yaml names may run (``--trust-run``)."""
        require_run(self.folder)
        self.path = self.folder.path
        self.config = _read_config(self.folder.config)
        """Settings as plain data."""

    def require_trust(self, section: str) -> None:
        """Raise ValueError if a section of config.yaml names code and the run is not trusted."""
        if not self.trusted:
            asked = {section: self.config.get(section)}
            require_trust(asked, self.path, f"the same command with {FLAG}")

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of every line of metrics.jsonl; empty if nothing was written yet."""
        return [
            {key: x if key == "stage" else restore_nonfinite(x) for key, x in row.items()}
            for row in self._lines
            if row.get("stage") != WARNING
        ]

    @cached_property
    def warnings(self) -> list[dict[str, Any]]:
        """Warnings of the run, each with ``step``, ``name`` and ``message``."""
        return [row for row in self._lines if row.get("stage") == WARNING]

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        return read_lines(self.folder.metrics) if self.folder.metrics.exists() else []

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions and hardware of the run; empty if they were not recorded."""
        try:
            found = json.loads(self.folder.environment.read_bytes())
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.folder.environment} must be JSON: {error}.") from None
        return found if isinstance(found, dict) else {}

    def keys(self, stage: str | None = None) -> list[str]:
        """Return the names of the metrics in the order of their first occurrence."""
        lines = [row for row in self.metrics if stage in (None, row.get("stage"))]
        names = dict.fromkeys(key for row in lines for key in row)
        return [name for name in names if name not in ("step", "stage")]

    def series(self, key: str, stage: str | None = None) -> tuple[list[int], list[float]]:
        """Return the steps and values of one metric, for one stage or all."""
        points = [
            (step, as_number(row[key]))
            for row in self.metrics
            if key in row and stage in (None, row.get("stage"))
            if (step := step_in(row)) is not None
        ]
        if not points:
            raise ValueError(self._no_series(key, stage))
        return [step for step, _ in points], [x for _, x in points]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Metrics of every evaluation on held-out prompts."""
        return [row for row in self.metrics if row.get("stage") == "evaluation"]

    @cached_property
    def held_out_prompts(self) -> int | None:
        """Number of prompts of the last evaluation; None if its responses are not recorded."""
        recorded = list(_files(self.folder.evaluations).values())
        if not recorded:
            return None
        try:
            rows = read_rollouts(recorded[-1])
        except (OSError, ValueError, RecursionError):  # damaged
            return None
        return sum(x.get("how") == "sampled" and x.get("sample") == 0 for x in rows) or None

    @property
    def rollout_steps(self) -> list[int]:
        """Steps whose responses were recorded."""
        return list(self.rollout_files)

    @cached_property
    def rollout_files(self) -> dict[int, Path]:
        """Files of recorded responses by step."""
        return _files(self.folder.rollouts)

    @cached_property
    def watched_files(self) -> dict[int, Path]:
        """Files of responses to the same held-out prompts by step."""
        return _files(self.folder.watched)

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return the responses of one step, with the columns of docs/runs.md."""
        if step in self.rollout_files:
            return read_rollouts(self.rollout_files[step])
        steps = self.rollout_steps
        shown = ", ".join(map(str, steps[-8:])) or "none"
        raise ValueError(
            f"{self.path} has no rollouts of step {step}; its last steps with rollouts: {shown}."
        )

    @property
    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first; they may be damaged (see ``storage.verify``)."""
        found = by_step(self.folder.checkpoints)
        return [path for _, path in found if (path / "manifest.json").is_file()]

    @property
    def best(self) -> dict[str, Any] | None:
        """``step``, ``metric`` and ``value`` of the best checkpoint; None without save.best."""
        return read_best(self.folder)

    def best_checkpoint(self) -> Path:
        """Return the checkpoint with the best held-out result, verified."""
        if self.best is None:
            raise ValueError(
                f"expected a run that kept its best checkpoint (save.best=true); got {self.path}, "
                f"which has no best.json. Use its last checkpoint: leave --best out"
            )
        path = self.folder.checkpoints / step_name(self.best["step"])
        if not path.exists():
            raise ValueError(
                f"expected the best checkpoint of {self.path}, {path.name}; it was deleted or "
                f"moved. Put it back, or use the last checkpoint: leave --best out"
            )
        verify(path)
        return path

    def last_complete_checkpoint(self) -> Path | None:
        """Return the newest undamaged checkpoint, with a warning for each newer damaged one."""
        for path in reversed(self.checkpoints):
            try:
                verify(path)
            except CheckpointError as error:
                warnings.warn(f"checkpoint {path.name} is refused: {error}", stacklevel=2)
            else:
                return path
        return None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _no_series(self, key: str, stage: str | None) -> str:
        where = f"{self.path}" if stage is None else f"stage {stage!r} of {self.path}"
        known = self.keys(stage)
        if not known:
            stages = ", ".join(dict.fromkeys(str(row.get("stage")) for row in self.metrics))
            return f"{where} has no metrics yet. Its stages so far: {stages or 'none'}."
        hint = nearest(key, known)
        return f"{where} has no metric {key!r}.{hint} It has: {', '.join(known)}."


def step_in(row: Mapping[str, Any]) -> int | None:
    """Return the step of a line of metrics; None if it is missing or invalid."""
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step < 2**53:
        return None
    return int(step) if step == int(step) else None


def as_number(x: Any) -> float:
    """Convert a value of metrics.jsonl to a float; NaN if it is not a number."""
    try:
        return float(x) if isinstance(x, int | float) else math.nan
    except OverflowError:  # integers in JSON are unbounded
        return math.inf if x > 0 else -math.inf


def within_noise(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    """Whether the 95 % interval of the change between two evaluations contains 0.

    The interval is made of those of both results by the square-and-add method (Newcombe, 1998). It
    ignores that both evaluations have the same prompts, so it is rather too wide than too narrow.
    False if an interval is unknown, or if nothing changed.
    """
    old, new = as_number(before.get(key)), as_number(after.get(key))
    rises = new > old
    near, far = ("high", "low") if rises else ("low", "high")
    limit = math.hypot(
        as_number(before.get(f"{key}_{near}")) - old, as_number(after.get(f"{key}_{far}")) - new
    )
    return 0 < abs(new - old) <= limit < math.inf


def _files(folder: Path) -> dict[int, Path]:
    return {step: path for step, path in by_step(folder) if path.suffix == ".jsonl"}


def read_best(folder: RunFolder) -> dict[str, Any] | None:
    """Read best.json; None if there is none."""
    try:
        found = json.loads(folder.best.read_bytes())
        step_name(step := int(found["step"]))
        return {"step": step, "metric": str(found["metric"]), "value": float(found["value"])}
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"expected step, metric and value of the best checkpoint in {folder.best}; reading it "
            f"failed: {error!r}. Delete it; the next best evaluation writes it again"
        ) from None


def read_run(path: str | Path, trusted: bool = False) -> Run:
    """Read a run directory; raise ValueError if it is not one.

    Args:
        trusted: Allow code that the run's config.yaml names to run (``--trust-run``).
    """
    return Run(path, trusted)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{path} must be YAML; reading it failed: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must contain a mapping of settings; got {type(config).__name__}.")
    return config
