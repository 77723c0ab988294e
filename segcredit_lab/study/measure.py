"""Measurements of one run: its held-out accuracy curve and its cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from segcredit.runlog import Run, read_run
from segcredit.runlog.reader import as_number, step_in
from segcredit_lab.study.store import is_finished

LAST = 5
"""Last batches of critic pretraining over which its explained variance is averaged."""


@dataclass(frozen=True)
class Measurement:
    """Measurements of one run. Shares are in [0, 1]; missing values are NaN."""

    steps: tuple[int, ...]
    """Steps of the evaluations, counted from the first, which precedes optimization."""
    accuracy: tuple[float, ...]
    """Held-out accuracy or mean reward, as ``measure`` says."""
    area: float
    """Mean held-out accuracy (or reward) over the curve."""
    final: float
    """Last value of the curve."""
    tokens: float
    """Tokens sampled during optimization, including continuations."""
    pretraining_tokens: float
    """Tokens sampled to pretrain the critic."""
    seconds: float
    """Time of optimization, without evaluations."""
    clip_fraction: float
    """Mean over the optimization steps, as the following fields."""
    explained_variance: float
    segment_length: float
    entropy: float
    response_length: float
    explained_before: float
    """Explained variance of the critic in the last batches of its pretraining."""
    measure: str = "accuracy"
    """Either "accuracy", or "reward" if the run's reward does not report correctness."""


def area_under(steps: Sequence[float], values: Sequence[float]) -> float:
    """Normalized area under a curve by the trapezoidal rule: its mean over the steps."""
    if len(values) == 0:
        return float("nan")
    width = steps[-1] - steps[0]
    if width <= 0:
        return float(values[-1])
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / width)


def measure(run: Run) -> Measurement:
    """Compute all measurements of a finished run."""
    evaluated = [row for row in run.metrics if row.get("stage") == "evaluation"]
    known = any(ACCURACY in row for row in evaluated)
    key = ACCURACY if known else REWARD
    curve = [
        (step, as_number(row[key]))
        for row in evaluated
        if key in row and (step := step_in(row)) is not None
    ]
    if not curve:
        raise ValueError(
            f"{run.path} has no held-out accuracy: its data has no test prompts (data.test)."
        )
    first = curve[0][0]
    steps, accuracy = [step - first for step, _ in curve], [x for _, x in curve]
    trained = [row for row in run.metrics if row.get("stage") not in ("evaluation", "warm_start")]
    optimized = [row for row in trained if row.get("stage") != "pretrain_critic"]
    before = [row for row in trained if row.get("stage") == "pretrain_critic"]
    return Measurement(
        steps=tuple(steps),
        accuracy=tuple(accuracy),
        area=area_under(steps, accuracy),
        final=accuracy[-1],
        tokens=_tokens(optimized, run.config),
        pretraining_tokens=_pretraining_tokens(before, run.config),
        seconds=sum(x for row in optimized for key, x in row.items() if key.startswith("time/")),
        clip_fraction=_mean(optimized, "clip_fraction"),
        explained_variance=_mean(optimized, "explained_variance"),
        segment_length=_mean(optimized, "segment_length"),
        entropy=_mean(optimized, "entropy"),
        response_length=_mean(optimized, "response_length"),
        explained_before=_mean(before[-LAST:], "explained_variance"),
        measure="accuracy" if known else "reward",
    )


@lru_cache(maxsize=4096)
def read_measurement(folder: Path, critic: Path | None = None) -> Measurement:
    """Measurements of a finished run's folder, cached because it no longer changes.

    ``critic`` is the separate run that pretrained the critic, if any; its cost is NaN if that run
    is not finished.
    """
    found = measure(read_run(folder))
    if critic is None:
        return found
    if not is_finished(critic):
        return replace(found, pretraining_tokens=float("nan"))
    run = read_run(critic)
    before = [row for row in run.metrics if row.get("stage") == "pretrain_critic"]
    return replace(
        found,
        pretraining_tokens=_pretraining_tokens(before, run.config),
        explained_before=_mean(before[-LAST:], "explained_variance"),
    )


def _tokens(rows: Sequence[dict[str, Any]], config: dict[str, Any]) -> float:
    """Tokens sampled in some steps: responses and continuations."""
    rollout = config.get("rollout") or {}
    drawn = rollout.get("prompts", 0) * rollout.get("samples", 0)
    length = sum(float(row.get("response_length", 0.0)) for row in rows)
    return length * drawn + sum(float(row.get("continuations/tokens", 0.0)) for row in rows)


def _pretraining_tokens(rows: Sequence[dict[str, Any]], config: dict[str, Any]) -> float:
    """Tokens sampled for critic pretraining, whose stages may have their own number of prompts."""
    rollout = config.get("rollout") or {}
    usual = rollout.get("prompts", 0)
    stages = [x for x in config.get("stages") or () if x.get("kind") == "pretrain_critic"]
    asked = chain(*(repeat(x.get("prompts") or usual, x["steps"]) for x in stages), repeat(usual))
    each = zip(rows, asked, strict=False)
    lengths = sum(float(row.get("response_length", 0.0)) * prompts for row, prompts in each)
    return lengths * rollout.get("samples", 0)


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else float("nan")


ACCURACY, REWARD = "sampled", "reward"
"""Metrics on held-out prompts: accuracy of sampled responses, or their mean reward if the reward
does not report correctness."""
