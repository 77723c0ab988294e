"""Read recorded rollouts for analyses; the result type of an analysis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.printable import number_text, printable
from segcredit.runlog import Run
from segcredit.runlog.records import evenly, sample_rollouts

if TYPE_CHECKING:
    from segcredit.algorithms import PolicyGradient


DIGITS = 6
"""Significant digits of written numbers, as many as the rollouts have."""


@dataclass(frozen=True)
class Table:
    """A small table of the main numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Analysis:
    """One analysis of one run, or a comparison of several runs."""

    name: str
    """Name of its files."""
    title: str
    runs: tuple[str, ...]
    """Names of the analyzed runs, as displayed."""
    numbers: Mapping[str, Any]
    """All numbers of the figure, ready for JSON; None if not finite."""
    table: Table
    note: str
    """How to interpret the numbers, and their limits."""
    draw: Callable[[Any], None]
    """Draws on a matplotlib figure."""
    size: tuple[float, float] = (8.8, 3.2)
    """Size of the figure in inches."""
    compares: bool = False
    """Whether it compares all runs."""

    @property
    def heading(self) -> str:
        """Title with the run's name; a comparison names its runs in the figure."""
        return self.title if self.compares else f"{self.title}: {', '.join(self.runs)}"


@dataclass(frozen=True)
class SkippedAnalysis:
    """An analysis that could not be made, with the reason."""

    name: str
    run: str
    reason: str


class CannotAnalyzeError(ValueError):
    """An analysis is impossible; the message says what the run lacks."""


def plain(x: Any) -> Any:
    """Convert to JSON types: lists, mappings, rounded numbers, None if not finite."""
    if isinstance(x, Mapping):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, np.ndarray | np.generic):
        x = x.tolist()
    if isinstance(x, list | tuple):
        return [plain(item) for item in x]
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None
    return x


def interval_text(ends: Float[np.ndarray, " 2"], form: str = ".2f") -> str:
    """Format both ends of an interval; a dash if undefined."""
    if not np.isfinite(ends).all():
        return "–"
    return " … ".join(number_text(float(x), form) for x in ends)


QUANTILES = tuple(n / 100 for n in range(50, 100, 5))
"""q = .50, .55, …, .95, the axis of the paper's Figure 3."""
OTHER_THRESHOLDS = (0.8, 0.95)
"""Reported in addition to the chosen one; the paper does not define a large jump of V."""


@dataclass(frozen=True, kw_only=True)
class AnalysisSettings:
    """Settings of all analyses."""

    threshold: float = 0.9
    """d: jumps of V above this quantile are large."""
    resamples: int = 1000
    """B, number of bootstrap resamples."""
    window: int = 5
    """Recorded steps in the moving average of a smooth curve."""
    seed: int = 0
    """Seed of the bootstrap and of the probe's folds."""
    steps: int | None = None
    """Number of recorded steps to read, evenly spaced; None: all."""
    responses: int | None = None
    """Number of responses per step to read, evenly spaced; None: all."""
    probe: bool = False
    """Whether to fit a value probe, which loads the last checkpoint."""
    trust_run: bool = False
    """Whether the probe may run code that the run's config.yaml requests (trust_remote_code)."""

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold < 1.0:
            raise ValueError(
                f"threshold must be a quantile between 0 and 1; got {self.threshold}. "
                f"For the largest tenth of the jumps pass 0.9."
            )
        for name in ("resamples", "window", "steps", "responses"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} must be at least 1; got {given}.")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """All thresholds, the chosen one first."""
        return self.threshold, *(d for d in OTHER_THRESHOLDS if d != self.threshold)


COLUMNS = ("entropy", "value", "ratio", "logp_old")
TEXTS = ("prompt_id", "messages", "images")


@dataclass(frozen=True)
class Step:
    """The R responses of one step, their N tokens concatenated.

    Missing or invalid numbers are NaN.
    """

    step: int
    owner: Int[np.ndarray, " N"]
    """Index of each token's response, ascending."""
    token: Int[np.ndarray, " N"]
    """Token id; −1 if the row has none."""
    segment: Int[np.ndarray, " N"]
    """m(t); −1 outside all segments."""
    entropy: Float[np.ndarray, " N"]
    value: Float[np.ndarray, " N"]
    ratio: Float[np.ndarray, " N"]
    logp_old: Float[np.ndarray, " N"]
    reward: Float[np.ndarray, " R"]
    rows: tuple[Mapping[str, Any], ...]
    """Other fields: prompt_id, messages, images."""

    @property
    def num_responses(self) -> int:
        return len(self.reward)

    def keep(self, tokens: np.ndarray) -> "Step":
        """Keep only these tokens; responses stay, possibly empty."""
        columns = ("owner", "token", "segment", *COLUMNS)
        return replace(self, **{name: getattr(self, name)[tokens] for name in columns})

    def without_holes(self) -> "Step":
        """Remove tokens outside all segments.

        A response without any recorded segment is kept whole.
        """
        segmented = np.zeros(self.num_responses, dtype=bool)
        segmented[self.owner[self.segment >= 0]] = True
        return self.keep((self.segment >= 0) | ~segmented[self.owner])


def run_name(run: Run) -> str:
    """Return the name of the run's directory, shortened and printable."""
    return printable(run.path.name, 60)


def read_steps(run: Run, settings: AnalysisSettings | None = None) -> list[Step]:
    """Read the recorded steps, or a selection of them; raise if there are none."""
    settings = settings or AnalysisSettings()
    chosen = evenly(list(run.rollout_files), settings.steps)
    steps = [
        _step(step, sample_rollouts(run.rollout_files[step], settings.responses)[0])
        for step in chosen
    ]
    steps = [step for step in steps if len(step.owner)]
    if not steps:
        raise CannotAnalyzeError(
            "the run has no recorded responses: none were written yet (see save.rollouts_every), "
            "or they were not copied with the run."
        )
    return steps


def require_column(steps: Sequence[Step], name: str, why: str) -> None:
    """Raise unless some token has a finite number in this column."""
    if not any(np.isfinite(getattr(step, name)).any() for step in steps):
        raise CannotAnalyzeError(f"the rollouts have no {name}: {why}")


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
    """Return the number of tokens of a response; 0 if the row has no list of them."""
    lists = [row.get(name) for name in ("tokens", *COLUMNS)]
    return next((len(x) for x in lists if isinstance(x, list)), 0)


def _numbers(x: Any, length: int) -> Float[np.ndarray, " T"]:
    """Convert a list of this many numbers; NaN for each if it is not one."""
    if isinstance(x, list) and len(x) == length:
        try:
            found = np.asarray(x, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            found = np.zeros(())
        if found.shape == (length,):
            return found
    return np.full(length, np.nan)


def _whole(x: np.ndarray) -> Int[np.ndarray, " N"]:
    """Convert to non-negative integers; −1 for everything else."""
    good = np.isfinite(x) & (x >= 0) & (x < 2**53)
    return np.where(good, x, -1).astype(np.int64)


def method_of(run: Run) -> "PolicyGradient":
    """Rebuild the run's policy-gradient method from its settings."""
    from segcredit.algorithms import PolicyGradient
    from segcredit.config import GIVEN_IN_PYTHON
    from segcredit.config.recipe import algorithm_of

    given = run.config.get(GIVEN_IN_PYTHON)
    if isinstance(given, dict | list) and "algorithm" in given:
        raise CannotAnalyzeError(
            "its method was passed as a Python object, which config.yaml cannot store."
        )
    spec = run.config.get("algorithm")
    if not isinstance(spec, str | dict) or (isinstance(spec, dict) and "name" not in spec):
        raise CannotAnalyzeError("its config.yaml names no algorithm.")
    try:
        run.require_trust("algorithm")
    except ValueError as error:
        raise CannotAnalyzeError(str(error)) from None
    try:
        made = algorithm_of(spec)
    except (ValueError, TypeError) as error:
        raise CannotAnalyzeError(
            f"the algorithm of its config.yaml is not known: {error}"
        ) from None
    if not isinstance(made, PolicyGradient):
        raise CannotAnalyzeError(f"{type(made).__name__} has neither segments nor a ratio.")
    return made
