"""Read recorded rollouts for analyses; compute statistics; define the result of an analysis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.algorithms import PolicyGradient
from segcredit.printable import number_text, printable
from segcredit.runlog import Run
from segcredit.runlog.records import evenly, sample_rollouts

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
    """An analysis that could not run, with the reason."""

    name: str
    run: str
    reason: str

    def __str__(self) -> str:
        return f"no {self.name} for {self.run}: {self.reason}"


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


def with_interval(x: float, ends: Float[np.ndarray, " 2"], form: str = ".2f") -> str:
    """Format a number and its interval in parentheses."""
    return f"{number_text(x, form)} ({interval_text(ends, form)})"


QUANTILES = tuple(n / 100 for n in range(50, 100, 5))
"""q = .50, .55, …, .95, the axis of the paper's Figure 3."""
OTHER_THRESHOLDS = (0.8, 0.95)
"""Further thresholds to report, since the paper does not define a large jump of V."""


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


LACKING = {
    "entropy": "the method does not need it.",
    "value": "the method has no critic.",
    "ratio": "the method has none.",
    "segment": "the method has no segments.",
}
"""Column of a recorded response → why a run may lack it."""


def require_columns(
    steps: Sequence[Step], columns: Sequence[str], without_critic: str = ""
) -> None:
    """Raise if no token has a number in one of these columns.

    Args:
        without_critic: Alternative to suggest if the missing column is the value.
    """
    for name in columns:
        found = [getattr(step, name) for step in steps]
        if not any((np.isfinite(x) & ((x >= 0) | (name != "segment"))).any() for x in found):
            other = f" {without_critic}" if without_critic and name == "value" else ""
            raise CannotAnalyzeError(
                f"it needs {' and '.join(columns)}; the rollouts have no {name}: "
                f"{LACKING[name]}{other}"
            )


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


def method_of(run: Run) -> PolicyGradient:
    """Rebuild the run's policy-gradient method from its settings."""
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


def smooth(x: Float[np.ndarray, " N"], window: int) -> Float[np.ndarray, " N"]:
    """Compute a centered moving average over finite numbers; the window is cut off at the ends."""
    known = np.isfinite(x)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, x, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(x))
    first = np.maximum(at - (window - 1) // 2, 0)
    last = np.minimum(at + window // 2 + 1, len(x))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[last] - total[first]) / (count[last] - count[first])


def ranks(x: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Compute ranks from 1; equal values share the mean of their ranks."""
    _, which, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[which]


def spearman(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """Compute the Spearman correlation over finite pairs; NaN if one variable is constant."""
    good = np.isfinite(x) & np.isfinite(y)
    a, b = ranks(x[good]), ranks(y[good])
    if len(a) < 2:
        return float("nan")
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm > 0 else float("nan")


def slope(
    x: Float[np.ndarray, " N"], y: Float[np.ndarray, "*B N"], weight: Float[np.ndarray, "*B N"]
) -> Float[np.ndarray, "*B"]:
    """Compute the weighted least-squares slope of y over x, ignoring non-finite y."""
    known = np.isfinite(y)
    weight = np.where(known, weight, 0.0)
    y = np.where(known, y, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = weight.sum(axis=-1, keepdims=True)
        x_off = x - (weight * x).sum(axis=-1, keepdims=True) / total
        y_off = y - (weight * y).sum(axis=-1, keepdims=True) / total
        spread = (weight * x_off**2).sum(axis=-1)
        found = (weight * x_off * y_off).sum(axis=-1) / spread
    return np.where(spread > 0, found, np.nan)


def slope_over_steps(
    x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"], resamples: int, seed: int = 0
) -> Float[np.ndarray, " B"]:
    """Bootstrap the least-squares slope of y over x by resampling the points."""
    counts = draws(seed, len(x), resamples).astype(np.float64)
    return slope(x, np.broadcast_to(y, counts.shape), counts)


POSITION_DIGITS = 9
"""Decimals to which (n − 1)q is rounded: in floating point 100 · .55 is 55.00000000000001."""


def place(total: Int[np.ndarray, "*B"], q: Float[np.ndarray, " Q"]) -> Float[np.ndarray, "*B Q"]:
    """Return (n − 1) q, the 0-based position of numpy's linear quantile in n sorted values."""
    return np.round((total[..., None] - 1) * q, POSITION_DIGITS)


def positions(
    cumulative: Int[np.ndarray, "B N"], rank: Int[np.ndarray, "B Q"]
) -> Int[np.ndarray, "B Q"]:
    """Return the index of the sorted value at each rank, given the cumulative counts of the values.

    Shifting the rows apart makes their sums one sorted array, so one search serves all draws.
    """
    num, width = cumulative.shape
    apart = int(cumulative[:, -1].max(initial=0)) + 1
    shift = apart * np.arange(num, dtype=np.int64)[:, None]
    found = np.searchsorted((cumulative + shift).ravel(), (rank + shift).ravel(), side="right")
    return found.reshape(rank.shape) - width * np.arange(num)[:, None]


def tail_starts(
    tie: Int[np.ndarray, " N"], cumulative: Int[np.ndarray, "B N"], q: Float[np.ndarray, " Q"]
) -> Int[np.ndarray, "B Q"]:
    """For each resample, find the index from which N sorted values are ≥ its q-quantile.

    The tail starts at the value of rank ⌈(n − 1) q⌉, or at the first value equal to it. ``tie``
    gives the index of the first equal value for every value.
    """
    rank = np.ceil(place(cumulative[:, -1], q)).astype(np.int64)
    return tie[positions(cumulative, rank)]


def draws(
    seed: int | Sequence[int] | np.random.Generator, num: int, resamples: int
) -> Int[np.ndarray, "resamples num"]:
    """Draw resamples with replacement; return how often each of ``num`` units is drawn."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(num, np.full(num, 1.0 / num), size=resamples)


SHARE = 0.95
"""Share of the draws inside an interval."""


def percentile_interval(x: Float[np.ndarray, "B *rest"]) -> Float[np.ndarray, "2 *rest"]:
    """Return the ends of the central 95 % of the draws; NaN if no draw is finite."""
    found = np.full((2, *x.shape[1:]), np.nan)
    if len(x):
        some = np.isfinite(x).any(axis=0)
        ends = [(1 - SHARE) / 2, (1 + SHARE) / 2]
        found[:, some] = np.nanquantile(x[:, some], ends, axis=0)
    return found
