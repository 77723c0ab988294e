"""Segment lengths, positions and counts, and the variance of advantages within segments."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from segcredit.core.advantages import gae, length_adaptive_lambda, terminal_reward
from segcredit.printable import number_text
from segcredit.runlog import Run
from segcredit_lab.analysis.drawing import draw_shapes, draw_within
from segcredit_lab.analysis.reading import (
    Analysis,
    AnalysisSettings,
    CannotAnalyzeError,
    Step,
    Table,
    method_of,
    plain,
    smooth,
)

POSITION_BINS = 20
MOST_BARS = 32


def unit_of(owner: Int[np.ndarray, " N"], segment: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Number every (response, segment) from 0; −1 outside segments.

    A segment continues after tokens that belong to no segment.
    """
    inside = np.flatnonzero(segment >= 0)
    found = np.full(len(owner), -1)
    if len(inside):
        who, which = owner[inside], segment[inside]
        begins = np.concatenate([[True], (who[1:] != who[:-1]) | (which[1:] != which[:-1])])
        found[inside] = np.cumsum(begins) - 1
    return found


def unit_lengths(unit: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """Return the number of tokens of each unit."""
    return np.bincount(unit[unit >= 0])


@dataclass(frozen=True)
class Shapes:
    """Lengths, end positions and counts of the recorded segments."""

    length: Int[np.ndarray, " M"]
    """Tokens per segment."""
    position: Float[np.ndarray, " K"]
    """(e_m + 1) / T: end positions, without the last segment, which ends at 1."""
    per_response: Int[np.ndarray, " R"]


def shapes_of(owner: Int[np.ndarray, " N"], segment: Int[np.ndarray, " N"]) -> Shapes:
    """Compute the shapes of one step's segments."""
    inside = segment >= 0
    owner, unit = owner[inside], unit_of(owner[inside], segment[inside])
    responses, which, size = np.unique(owner, return_inverse=True, return_counts=True)
    first = np.concatenate([[0], np.cumsum(size)[:-1]])
    at = np.arange(len(owner)) - first[which]  # position in the response
    ends = np.concatenate([unit[1:] != unit[:-1], [True]]) if len(unit) else np.zeros(0, bool)
    inner = ends & (at + 1 < size[which])
    return Shapes(
        unit_lengths(unit),
        (at[inner] + 1) / size[which][inner],
        np.bincount(which[ends], minlength=len(responses)),
    )


def segment_shapes(name: str, steps: Sequence[Step]) -> Analysis:
    """Analyze a run's recorded segments."""
    found = [shapes_of(x.owner, x.segment) for x in steps]
    shapes = Shapes(
        np.concatenate([x.length for x in found]),
        np.concatenate([x.position for x in found]),
        np.concatenate([x.per_response for x in found]),
    )
    whole = (shapes.per_response, "a whole response"), (shapes.length, "one token")
    for lengths_or_counts, what in whole:
        if (lengths_or_counts == 1).all():
            raise CannotAnalyzeError(f"every segment is {what}.")
    lengths, counts = bars(shapes.length), bars(shapes.per_response)
    places, edges = np.histogram(shapes.position, bins=POSITION_BINS, range=(0.0, 1.0))
    numbers = {
        "segments": len(shapes.length),
        "responses": len(shapes.per_response),
        "length": {**_summary(shapes.length), "bars": lengths},
        "segments_per_response": {**_summary(shapes.per_response), "bars": counts},
        "end_position": {"edges": edges, "segments": places},
    }
    return Analysis(
        name="segments",
        title="Segments",
        runs=(name,),
        numbers=plain(numbers),
        table=Table(
            ("", "mean", "median", "5 – 95 %", "largest"),
            (
                _row("tokens per segment", shapes.length),
                _row("segments per response", shapes.per_response),
            ),
        ),
        note=(
            "Computed over all recorded responses. Positions leave out every response's last "
            "segment, which ends at its end."
        ),
        draw=partial(draw_shapes, lengths, places, counts),
        size=(10.4, 3.1),
    )


def bars(x: Int[np.ndarray, " N"]) -> dict[str, Any]:
    """Make a histogram of integers: counts in from … from + width − 1."""
    width = -(-(int(x.max()) - int(x.min()) + 1) // MOST_BARS)
    edges = np.arange(int(x.min()), int(x.max()) + width + 1, width)
    counts, _ = np.histogram(x, bins=edges)
    return {"width": width, "from": edges[:-1], "count": counts}


def _summary(x: Int[np.ndarray, " N"]) -> dict[str, float]:
    low, median, high = np.quantile(x, [0.05, 0.5, 0.95])
    return {"mean": float(x.mean()), "p05": low, "median": median, "p95": high, "max": int(x.max())}


def _row(label: str, x: Int[np.ndarray, " N"]) -> tuple[str, ...]:
    found = _summary(x)
    spread = f"{found['p05']:g} – {found['p95']:g}"
    return label, f"{found['mean']:.2f}", f"{found['median']:g}", spread, f"{found['max']}"


@dataclass(frozen=True)
class PaddedLayout:
    """Mask of the tokens of R responses in a right-padded (R, T) array."""

    mask: Bool[np.ndarray, "R T"]

    def spread(self, x: Float[np.ndarray, " N"]) -> Float[np.ndarray, "R T"]:
        """Put flat numbers into rows; 0 in the padding."""
        found = np.zeros(self.mask.shape)
        found[self.mask] = x
        return found


def pad(owner: Int[np.ndarray, " N"], num_responses: int) -> PaddedLayout:
    """Make the layout of tokens that are sorted by response."""
    length = np.bincount(owner, minlength=num_responses)
    return PaddedLayout(np.arange(max(1, length.max(initial=0))) < length[:, None])


@dataclass(frozen=True)
class Decomposition:
    """Sums of squares: total = within + between."""

    total: float
    within: float
    between: float

    @property
    def share_within(self) -> float:
        """Share within segments; NaN if nothing varies."""
        return self.within / self.total if self.total > 0 else float("nan")


def decompose(x: Float[np.ndarray, " N"], unit: Int[np.ndarray, " N"]) -> Decomposition:
    """Decompose the variance over segments: Σ (x − x̄)² = Σ (x − x̄_m)² + Σ |z_m| (x̄_m − x̄)²."""
    x, unit = x[unit >= 0], unit[unit >= 0]
    if not len(x):
        return Decomposition(0.0, 0.0, 0.0)
    count = np.bincount(unit)
    mean = np.bincount(unit, weights=x) / np.maximum(count, 1)
    off = x - x.mean()
    inside = x - mean[unit]
    across = mean - x.mean()
    return Decomposition(float(off @ off), float(inside @ inside), float((count * across) @ across))


def equal_cut(owner: Int[np.ndarray, " N"], unit: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Baseline: the same number of segments per response, all of (almost) equal length."""
    inside = np.flatnonzero(unit >= 0)
    _, which, size = np.unique(owner[inside], return_inverse=True, return_counts=True)
    first = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int64)
    begins = np.concatenate([[True], np.diff(unit[inside]) != 0]) if len(inside) else np.zeros(0)
    segments = np.bincount(which, weights=begins).astype(np.int64)
    at = np.arange(len(inside)) - first[which]
    found = np.full(len(owner), -1)
    found[inside] = unit_of(which, at * segments[which] // size[which])
    return found


def token_advantages(
    owner: Int[np.ndarray, " N"],
    value: Float[np.ndarray, " N"],
    reward: Float[np.ndarray, " R"],
    gamma: float,
    lam: "float | Float[np.ndarray, ' R']",
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Compute GAE per token with the reward at the end; also return a mask of valid tokens.

    Responses in which V or the reward is not finite are left out.
    """
    padded = pad(owner, len(reward))
    spread = padded.spread(value)
    good = np.isfinite(spread).all(axis=1) & np.isfinite(reward) & padded.mask.any(axis=1)
    mask = padded.mask[good]
    found = np.full(len(owner), np.nan)
    if good.any():
        marks = torch.from_numpy(mask)
        each = lam if isinstance(lam, float) else torch.from_numpy(lam[good])
        ends = terminal_reward(torch.from_numpy(reward[good]), marks)
        made = gae(ends, torch.from_numpy(spread[good]), marks, gamma, each)
        found[good[owner]] = made.numpy()[mask]
    return found, good[owner]


@dataclass(frozen=True)
class WithinSegments:
    """Share of the variance within segments at every recorded step."""

    step: Float[np.ndarray, " S"]
    share: Float[np.ndarray, " S"]
    smoothed: Float[np.ndarray, " S"]
    equal_cut: Float[np.ndarray, " S"]
    """Share with segments of equal length."""
    equal_cut_smoothed: Float[np.ndarray, " S"]


def within_segments(
    run: Run, name: str, steps: Sequence[Step], settings: AnalysisSettings
) -> Analysis:
    """Analyze the variance of advantages within a run's segments."""
    method = method_of(run)
    gamma = getattr(method.credit, "gamma", None)
    if not isinstance(gamma, float):
        raise CannotAnalyzeError("the method's credit is not generalized advantage estimation.")
    share, other, kept, left_out = [], [], [], 0
    longest = 0
    for step in steps:
        lam = credit_lambda(method.credit, step)
        advantage, good = token_advantages(step.owner, step.value, step.reward, gamma, lam)
        unit = unit_of(step.owner, np.where(good, step.segment, -1))
        left_out += int((~good).sum())
        if not (unit >= 0).any():
            continue
        longest = max(longest, int(unit_lengths(unit).max()))
        share.append(decompose(advantage, unit).share_within)
        other.append(decompose(advantage, equal_cut(step.owner, unit)).share_within)
        kept.append(float(step.step))
    if not kept:
        raise CannotAnalyzeError("no recorded response has segments, finite values and a reward.")
    if longest == 1:
        raise CannotAnalyzeError(
            "every segment is one token, so there is no variance within segments."
        )
    shares, others = np.array(share), np.array(other)
    if not np.isfinite(shares).any():
        raise CannotAnalyzeError("all tokens of a step have the same advantage.")
    found = WithinSegments(
        np.array(kept),
        shares,
        smooth(shares, settings.window),
        others,
        smooth(others, settings.window),
    )
    return _analysis(name, found, gamma, method.credit, left_out, settings)


def credit_lambda(credit: object, step: Step) -> "float | Float[np.ndarray, ' R']":
    """Return the method's λ, or VAPO's λ for each response's length."""
    if isinstance(lam := getattr(credit, "lam", None), float):
        return lam
    if not isinstance(alpha := getattr(credit, "alpha", None), float):
        raise CannotAnalyzeError("the method's credit has no λ.")
    length = np.bincount(step.owner, minlength=step.num_responses)
    return length_adaptive_lambda(torch.from_numpy(np.maximum(length, 1)), alpha).double().numpy()


def _analysis(
    name: str,
    found: WithinSegments,
    gamma: float,
    credit: object,
    left_out: int,
    settings: AnalysisSettings,
) -> Analysis:
    lam = getattr(credit, "lam", None)
    numbers = {
        "gamma": gamma,
        "lam": lam,
        "alpha": getattr(credit, "alpha", None),
        "window": settings.window,
        "step": found.step,
        "share_within": found.share,
        "share_within_equal_cut": found.equal_cut,
        "tokens_left_out": left_out,
    }
    rows = tuple(
        (label, *(number_text(float(y), ".1%") for y in (np.nanmean(x), x[0], x[-1])))
        for label, x in (
            ("the run's segments", found.share),
            ("as many of equal length", found.equal_cut),
        )
        if np.isfinite(x).any()
    )
    shown = "λ by length" if lam is None else f"λ = {lam:g}"
    return Analysis(
        name="within",
        title="Variance of token advantages within segments",
        runs=(name,),
        numbers=plain(numbers),
        table=Table(("share within segments", "mean", "first step", "last step"), rows),
        note=(
            f"Token-level GAE (γ = {gamma:g}, {shown}) from the recorded V and rewards, without "
            "a KL penalty, which is not recorded. One advantage per segment leaves out the "
            "variance within segments. With a critic trained only at boundaries, V in between is "
            "arbitrary, and so is that part of the variance."
        ),
        draw=partial(draw_within, found),
        size=(6.4, 3.4),
    )
