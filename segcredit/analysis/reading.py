"""A run's recorded responses as flat columns of numbers, one entry per token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.analysis.result import CannotAnalyseError
from segcredit.analysis.settings import Settings
from segcredit.printable import printable
from segcredit.runlog import Run
from segcredit.runlog.rollouts import evenly, sample_rollouts

COLUMNS = ("entropy", "value", "ratio", "logp_old")
TEXTS = ("prompt_id", "messages", "images")


@dataclass(frozen=True)
class Step:
    """The responses of one step; N tokens of R responses, one after the other.

    A number that a row lacks, or in which something else than a number stands, is NaN.
    """

    step: int
    owner: Int[np.ndarray, " N"]
    """Which response a token belongs to, ascending."""
    token: Int[np.ndarray, " N"]
    """Its id; −1 where the row has none."""
    segment: Int[np.ndarray, " N"]
    """m(t); −1 for none."""
    entropy: Float[np.ndarray, " N"]
    value: Float[np.ndarray, " N"]
    ratio: Float[np.ndarray, " N"]
    logp_old: Float[np.ndarray, " N"]
    reward: Float[np.ndarray, " R"]
    rows: tuple[Mapping[str, Any], ...]
    """What is not a number: prompt_id, messages, images."""

    @property
    def num_responses(self) -> int:
        return len(self.reward)

    def keep(self, tokens: np.ndarray) -> "Step":
        """Some tokens alone; the responses stay, perhaps empty."""
        columns = ("owner", "token", "segment", *COLUMNS)
        return replace(self, **{name: getattr(self, name)[tokens] for name in columns})

    def without_holes(self) -> "Step":
        """Tokens that belong to no segment cut out, as everywhere in this package.

        A response without any segment has no record of them, and stays whole.
        """
        segmented = np.zeros(self.num_responses, dtype=bool)
        segmented[self.owner[self.segment >= 0]] = True
        return self.keep((self.segment >= 0) | ~segmented[self.owner])


def run_name(run: Run) -> str:
    """The folder's name, on one line and not too long."""
    return printable(run.path.name, 60)


def read_steps(run: Run, settings: Settings | None = None) -> list[Step]:
    """Every recorded step, or as many as asked for; raises if there is none."""
    settings = settings or Settings()
    chosen = evenly(list(run.rollout_files), settings.steps)
    steps = [
        _step(step, sample_rollouts(run.rollout_files[step], settings.responses)[0])
        for step in chosen
    ]
    steps = [step for step in steps if len(step.owner)]
    if not steps:
        raise CannotAnalyseError(
            "the run has recorded no responses yet (save.rollouts_every says how often it does), "
            "or they were not copied with it."
        )
    return steps


def require_column(steps: Sequence[Step], name: str, why: str) -> None:
    """Raise unless some token has a finite number there."""
    if not any(np.isfinite(getattr(step, name)).any() for step in steps):
        raise CannotAnalyseError(f"the rollouts hold no {name}: {why}")


def _step(step: int, rows: list[dict[str, Any]]) -> Step:
    lengths = [_length(row) for row in rows]
    rows = [row for row, length in zip(rows, lengths, strict=True) if length]
    lengths = [length for length in lengths if length]
    pairs = list(zip(rows, lengths, strict=True))

    def column(name: str) -> np.ndarray:
        return np.concatenate([_numbers(row.get(name), n) for row, n in pairs] or [np.zeros(0)])

    return Step(
        step=step,
        owner=np.repeat(np.arange(len(rows)), lengths),
        token=_whole(column("tokens")),
        segment=_whole(column("segment")),
        **{name: column(name) for name in COLUMNS},
        reward=np.array([_numbers([row.get("reward")], 1)[0] for row in rows], dtype=np.float64),
        rows=tuple({name: row[name] for name in TEXTS if name in row} for row in rows),
    )


def _length(row: Mapping[str, Any]) -> int:
    """Tokens of a response; 0 if the row has no list of them."""
    lists = [row.get(name) for name in ("tokens", *COLUMNS)]
    return next((len(x) for x in lists if isinstance(x, list)), 0)


def _numbers(x: Any, length: int) -> Float[np.ndarray, " T"]:
    """A list of that many numbers, or as many NaN."""
    if isinstance(x, list) and len(x) == length:
        try:
            found = np.asarray(x, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            found = np.zeros(())
        if found.shape == (length,):
            return found
    return np.full(length, np.nan)


def _whole(x: np.ndarray) -> Int[np.ndarray, " N"]:
    """Whole numbers from 0 on; −1 for everything else."""
    good = np.isfinite(x) & (x >= 0) & (x < 2**53)
    return np.where(good, x, -1).astype(np.int64)
