"""What an analysis hands over: numbers, a sentence on what they mean, and how to draw them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.printable import number_text, printable
from segcredit.runlog import Run
from segcredit.runlog.rollouts import evenly, sample_rollouts

if TYPE_CHECKING:
    from segcredit.algorithms import PolicyGradient


DIGITS = 6
"""Of written numbers: no more than the rollouts have."""


@dataclass(frozen=True)
class Table:
    """The few numbers one looks at first."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Analysis:
    """One analysis of one run, or of several side by side."""

    name: str
    """What its files are called."""
    title: str
    runs: tuple[str, ...]
    """The names of the runs it is about, to be shown as they are."""
    numbers: Mapping[str, Any]
    """Everything that is drawn, ready for JSON; what is not finite is None."""
    table: Table
    note: str
    """What the numbers can say, and what they cannot."""
    draw: Callable[[Any], None]
    """Draws on a matplotlib figure."""
    size: tuple[float, float] = (8.8, 3.2)
    """Of the figure, inches."""
    compares: bool = False
    """Whether it is about all runs together."""

    @property
    def heading(self) -> str:
        """The title, and of which run; a comparison names its runs itself."""
        return self.title if self.compares else f"{self.title}: {', '.join(self.runs)}"


@dataclass(frozen=True)
class Skipped:
    """An analysis that could not be made, and why."""

    name: str
    run: str
    reason: str


class CannotAnalyseError(ValueError):
    """One sentence on what a run lacks for an analysis."""


def plain(x: Any) -> Any:
    """As JSON has it: lists, mappings, numbers of few digits, None for what is not finite."""
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
    """Both ends, or a dash where there is no interval."""
    if not np.isfinite(ends).all():
        return "–"
    return " … ".join(number_text(float(x), form) for x in ends)


QUANTILES = tuple(n / 100 for n in range(50, 100, 5))
"""q = .50, .55, …, .95, the axis of the paper's Figure 3."""
OTHER_THRESHOLDS = (0.8, 0.95)
"""Reported beside the chosen one, since the paper does not say which jumps of V are large."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of all analyses at once."""

    threshold: float = 0.9
    """d: a jump of V is large from this quantile on."""
    resamples: int = 1000
    """B, draws of each bootstrap."""
    window: int = 5
    """Recorded steps that are averaged into one point of a smooth curve."""
    seed: int = 0
    """Of the bootstrap and the probe's folds."""
    steps: int | None = None
    """Recorded steps that are read, evenly spread; None: all."""
    responses: int | None = None
    """Responses of each that are read, evenly spread; None: all."""
    probe: bool = False
    """Whether to fit a value probe, for which the last checkpoint is loaded."""
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
        """The chosen one first."""
        return self.threshold, *(d for d in OTHER_THRESHOLDS if d != self.threshold)


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


def method_of(run: Run) -> "PolicyGradient":
    """The run's policy-gradient method, made again from its settings."""
    from segcredit.algorithms import PolicyGradient
    from segcredit.config import GIVEN_IN_PYTHON
    from segcredit.config.recipe import algorithm_of

    given = run.config.get(GIVEN_IN_PYTHON)
    if isinstance(given, dict | list) and "algorithm" in given:
        raise CannotAnalyseError(
            "its method came from Python as an object, which config.yaml cannot hold."
        )
    spec = run.config.get("algorithm")
    if not isinstance(spec, str | dict) or (isinstance(spec, dict) and "name" not in spec):
        raise CannotAnalyseError("its config.yaml names no algorithm.")
    try:
        run.require_trust("algorithm")
    except ValueError as error:
        raise CannotAnalyseError(str(error)) from None
    try:
        made = algorithm_of(spec)
    except (ValueError, TypeError) as error:
        raise CannotAnalyseError(
            f"the algorithm of its config.yaml is not known: {error}"
        ) from None
    if not isinstance(made, PolicyGradient):
        raise CannotAnalyseError(f"{type(made).__name__} has neither segments nor a ratio.")
    return made
