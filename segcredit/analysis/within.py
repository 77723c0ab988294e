"""How much of the variance of token-level advantages lies inside segments, and is averaged away."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Bool, Float, Int

from segcredit.analysis.drawing.within import draw_within
from segcredit.analysis.method import method_of
from segcredit.analysis.padding import pad
from segcredit.analysis.reading import Step, require_column
from segcredit.analysis.result import Analysis, CannotAnalyseError, Table, plain
from segcredit.analysis.segment_shapes import unit_lengths, unit_of
from segcredit.analysis.settings import Settings
from segcredit.analysis.trend import smooth
from segcredit.printable import number_text
from segcredit.runlog import Run


@dataclass(frozen=True)
class Decomposition:
    """Sums of squares: total = within + between."""

    total: float
    within: float
    between: float

    @property
    def share_within(self) -> float:
        """NaN where nothing varies."""
        return self.within / self.total if self.total > 0 else float("nan")


def decompose(x: Float[np.ndarray, " N"], unit: Int[np.ndarray, " N"]) -> Decomposition:
    """Σ (x − x̄)² = Σ (x − x̄_m)² + Σ |z_m| (x̄_m − x̄)², over tokens that belong to a segment."""
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
    """As many segments in each response, all of (almost) one length: something to compare with."""
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
    """GAE with one unit per token, the reward at the end; and which tokens have it.

    Left out are responses in which V or the reward is not finite.
    """
    import torch

    from segcredit.core.advantages import gae, terminal_reward

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
    """The share of the variance that lies within segments, at every recorded step."""

    step: Float[np.ndarray, " S"]
    share: Float[np.ndarray, " S"]
    smoothed: Float[np.ndarray, " S"]
    equal_cut: Float[np.ndarray, " S"]
    """The same with segments of equal length."""
    equal_cut_smoothed: Float[np.ndarray, " S"]


def within_segments(run: Run, name: str, steps: Sequence[Step], settings: Settings) -> Analysis:
    """The analysis of a run's recorded values and segments."""
    require_column(steps, "value", "the method has no critic.")
    method = method_of(run)
    gamma = getattr(method.credit, "gamma", None)
    if not isinstance(gamma, float):
        raise CannotAnalyseError("the method's credit is no generalised advantage estimation.")
    share, other, kept, left_out = [], [], [], 0
    longest = 0
    for step in steps:
        lam = _lam(method.credit, step)
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
        raise CannotAnalyseError("no recorded response has segments, finite values and a reward.")
    if longest == 1:
        raise CannotAnalyseError("every segment is one token, so nothing lies within.")
    shares, others = np.array(share), np.array(other)
    found = WithinSegments(
        np.array(kept),
        shares,
        smooth(shares, settings.window),
        others,
        smooth(others, settings.window),
    )
    return _analysis(name, found, gamma, method.credit, left_out, settings)


def _lam(credit: object, step: Step) -> "float | Float[np.ndarray, ' R']":
    """One λ, or VAPO's for each response's length."""
    if isinstance(lam := getattr(credit, "lam", None), float):
        return lam
    if not isinstance(alpha := getattr(credit, "alpha", None), float):
        raise CannotAnalyseError("the method's credit has no λ.")
    import torch

    from segcredit.core.advantages import length_adaptive_lambda

    length = np.bincount(step.owner, minlength=step.num_responses)
    return length_adaptive_lambda(torch.from_numpy(np.maximum(length, 1)), alpha).double().numpy()


def _analysis(
    name: str,
    found: WithinSegments,
    gamma: float,
    credit: object,
    left_out: int,
    settings: Settings,
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
            "a KL penalty, which is not recorded. What lies within segments is what one advantage "
            "per segment leaves out. With a critic trained at boundaries alone, V in between is "
            "arbitrary, and that part of the variance with it."
        ),
        draw=partial(draw_within, found),
        size=(6.4, 3.4),
    )
