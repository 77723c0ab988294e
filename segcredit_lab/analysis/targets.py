"""Test whether the value targets of long segments vary less (paper, Appendix C).

Eq. 16 claims that the variance of a segment's target is that of a token's target divided by the
number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from segcredit.printable import number_text
from segcredit.runlog import Run
from segcredit_lab.analysis.drawing import draw_targets
from segcredit_lab.analysis.lift import BOUNDARY_CRITIC, trained_at_every_token
from segcredit_lab.analysis.reading import (
    Analysis,
    AnalysisSettings,
    CannotAnalyzeError,
    Step,
    Table,
    draws,
    method_of,
    percentile_interval,
    plain,
    with_interval,
)
from segcredit_lab.analysis.segments import credit_lambda, token_advantages, unit_lengths, unit_of

FIXED = (1, 2, 4, 8, 16, 32, 64)
"""Lengths of the equal pieces into which responses are cut."""
BUCKETS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 16), (17, 32), (33, 2**62))
"""Lengths of recorded segments that are joined to one group."""


def segment_sums(
    owner: Int[np.ndarray, " N"],
    unit: Int[np.ndarray, " N"],
    target: Float[np.ndarray, " N"],
    segment_target: Float[np.ndarray, " M"],
    group: Int[np.ndarray, " M"],
    num_responses: int,
    num_groups: int,
) -> Float[np.ndarray, "R G 9"]:
    """Sum everything that variances need, for each response and group of segments.

    Counts, 1 / lengths, mean token targets and their squares, the segments' own targets and their
    squares, lengths, token targets and their squares.

    Args:
        owner: Index of each token's response.
        unit: Segment of each token, numbered over all responses.
        target: Value target of each token.
        segment_target: Value target of each segment.
        group: Group of each segment; −1: left out.
    """
    length = unit_lengths(unit)
    starts = np.flatnonzero(np.concatenate([[True], unit[1:] != unit[:-1]])[: len(unit)])
    total = np.bincount(unit, weights=target, minlength=len(length))
    mean = total / np.maximum(length, 1)
    columns = (
        np.ones(len(length)),
        1 / np.maximum(length, 1),
        mean,
        mean**2,
        segment_target,
        segment_target**2,
        length,
        total,
        np.bincount(unit, weights=target**2, minlength=len(length)),
    )
    kept = group >= 0
    cell = (owner[starts] * num_groups + group)[kept]
    size = num_responses * num_groups
    sums = [np.bincount(cell, weights=x[kept], minlength=size) for x in columns]
    found = np.stack(sums, axis=-1).astype(np.float64)  # counts of nothing are integers
    return found.reshape(num_responses, num_groups, len(columns))


@dataclass(frozen=True)
class TargetVariance:
    """Variances of targets by group, and ratios to the variance of token targets."""

    num: Float[np.ndarray, "B G"]
    """Number of segments."""
    token: Float[np.ndarray, "B G"]
    """Var(R̂_t) over the tokens of the group's segments."""
    mean_ratio: Float[np.ndarray, "B G"]
    """Var of the segments' mean token target, divided by Var(R̂_t)."""
    target_ratio: Float[np.ndarray, "B G"]
    """Var of the targets of segment-level GAE, divided by Var(R̂_t)."""
    claimed: Float[np.ndarray, "B G"]
    """Mean of 1 / |S_m|: the ratio that Eq. 16 claims."""

    @property
    def correlation(self) -> Float[np.ndarray, "B G"]:
        """Correlation of two token targets of one segment that explains the ratio.

        Var(mean of L) = Var · (1 + (L − 1) ρ) / L; Eq. 16 assumes ρ ≈ 0.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            return (self.mean_ratio - self.claimed) / (1 - self.claimed)


def target_variance(sums: Float[np.ndarray, "S B G 9"]) -> TargetVariance:
    """Average the variances within steps, weighted by the number of segments.

    V and the policy change between steps, so variance between steps does not count. Steps with
    fewer than two segments of a group are left out for it.
    """
    num, inverse, mean, mean2, target, target2, tokens, token, token2 = np.moveaxis(sums, -1, 0)
    weight = np.where(num >= 2, num, 0.0)

    def average(count: np.ndarray, total: np.ndarray, square: np.ndarray) -> np.ndarray:
        safe = np.maximum(count, 1)
        return np.asarray((weight * np.maximum(square / safe - (total / safe) ** 2, 0)).sum(axis=0))

    every = weight.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = average(tokens, token, token2)
        spread = np.where(variance > 1e-12 * every, variance, np.nan)  # nothing varies
        return TargetVariance(
            num=every,
            token=variance / every,
            mean_ratio=average(num, mean, mean2) / spread,
            target_ratio=average(num, target, target2) / spread,
            claimed=np.where(num >= 2, inverse, 0.0).sum(axis=0) / every,
        )


@dataclass(frozen=True)
class Horizon:
    """γ and λ of a run, per token; a unit of L tokens has their L-th powers."""

    gamma: float
    lam: "float | Float[np.ndarray, ' R']"
    """VAPO has one λ for each response."""

    def of(self, length: float) -> "Horizon":
        """Compute γ and λ of units of a given number of tokens; 1 / L tokens is the inverse."""
        return Horizon(self.gamma**length, self.lam**length)


def fixed_sums(step: Step, token: Horizon) -> Float[np.ndarray, "R G 9"]:
    """Sums for responses that are cut into pieces of each length in ``FIXED``."""
    target, good = _token_targets(step, token)
    owner, value, target = step.owner[good], step.value[good], target[good]
    first = np.searchsorted(owner, owner, side="left")
    at = np.arange(len(owner)) - first
    parts = []
    for length in FIXED:
        unit = unit_of(owner, at // length)
        whole = np.where(unit_lengths(unit) == length, 0, -1)
        made = _segment_targets(step, owner, value, unit, token.of(length))
        parts.append(segment_sums(owner, unit, target, made, whole, step.num_responses, 1))
    return np.concatenate(parts, axis=1)


def recorded_sums(step: Step, token: Horizon, segment: Horizon) -> Float[np.ndarray, "R G 9"]:
    """Sums for the recorded segments, grouped by length (``BUCKETS``)."""
    target, good = _token_targets(step, token)
    good &= step.segment >= 0
    owner, value, target = step.owner[good], step.value[good], target[good]
    unit = unit_of(owner, step.segment[good])
    ends = np.array([last for _, last in BUCKETS])
    group = np.searchsorted(ends, unit_lengths(unit))
    made = _segment_targets(step, owner, value, unit, segment)
    return segment_sums(owner, unit, target, made, group, step.num_responses, len(BUCKETS))


def _token_targets(
    step: Step, token: Horizon
) -> tuple[Float[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Return the token targets R̂_t = Â_t + V(s_t), and which tokens have one."""
    made, good = token_advantages(step.owner, step.value, step.reward, token.gamma, token.lam)
    return made + step.value, good


def _segment_targets(
    step: Step,
    owner: Int[np.ndarray, " N"],
    value: Float[np.ndarray, " N"],
    unit: Int[np.ndarray, " N"],
    horizon: Horizon,
) -> Float[np.ndarray, " M"]:
    """Return the segment targets R̂_m = Â_m + V(s_m), with V read before each segment."""
    starts = np.concatenate([[True], unit[1:] != unit[:-1]])[: len(unit)]
    of, read = owner[starts], value[starts]
    made, _ = token_advantages(of, read, step.reward, horizon.gamma, horizon.lam)
    return made + read


def target_variances(
    run: Run, name: str, steps: Sequence[Step], settings: AnalysisSettings
) -> Analysis:
    """Analyze Eq. 16: how the variance of value targets falls with the length of segments."""
    credit = method_of(run).credit
    gamma = getattr(credit, "gamma", None)
    if not isinstance(gamma, float):
        raise CannotAnalyzeError("the method's credit is not generalized advantage estimation.")
    lengths = np.concatenate([unit_lengths(unit_of(x.owner, x.segment)) for x in steps])
    length = float(lengths.mean()) if len(lengths) else 1.0
    pieces, segments = [], []
    for step in steps:
        own = Horizon(gamma, credit_lambda(credit, step))
        token = own.of(1 / length)
        pieces.append(fixed_sums(step, token))
        segments.append(recorded_sums(step, token, own))
    fixed = _measure(pieces, [str(x) for x in FIXED], settings)
    names = [str(a) if a == b else f"{a}–{b}" if b < 2**62 else f"{a} or more" for a, b in BUCKETS]
    recorded = _measure(segments, names, settings) if length > 1 else []
    if not fixed:
        raise CannotAnalyzeError(
            "no step has two responses with finite values and rewards whose targets differ."
        )
    lam = getattr(credit, "lam", None)
    kinds = (("equal pieces", fixed), ("recorded", recorded))
    return Analysis(
        name="targets",
        title="Variance of value targets by segment length",
        runs=(name,),
        numbers=plain(
            {
                "gamma": gamma,
                "lam": lam,
                "tokens_per_segment": length,
                "lam_per_token": lam ** (1 / length) if isinstance(lam, float) else None,
                "resamples": settings.resamples,
                "equal_pieces": fixed,
                "recorded": recorded,
            }
        ),
        table=Table(
            ("", "tokens", "segments", "Eq. 16: 1 / L", "mean target", "its ρ", "segment target"),
            tuple(_row(kind, x, x is found[0]) for kind, found in kinds for x in found),
        ),
        note=(
            "Variance of the targets of segments with L tokens, divided by the variance of their "
            "tokens' targets: of the mean of token targets, and of the target of segment-level "
            "GAE with the same horizon. Eq. 16 claims 1 / L, for independent token targets. ρ is "
            "their correlation within a segment; at λ = 1 and γ = 1 all targets of a response are "
            "equal, so ρ = 1 and nothing falls."
            + ("" if trained_at_every_token(run, steps) else f" {BOUNDARY_CRITIC}")
        ),
        draw=partial(draw_targets, fixed, recorded),
        size=(9.6, 3.7) if recorded else (6.0, 3.7),
    )


def _measure(
    sums: Sequence[Float[np.ndarray, "_ G 9"]], names: Sequence[str], settings: AnalysisSettings
) -> list[dict[str, Any]]:
    """Measure every group, with bootstrap intervals over responses; without empty groups."""
    point = target_variance(np.stack([x.sum(axis=0)[None] for x in sums]))
    resampled = []
    for number, x in enumerate(sums):
        counts = draws([settings.seed, number], len(x), settings.resamples)
        resampled.append(np.tensordot(counts.astype(np.float64), x, axes=1))
    drawn = target_variance(np.stack(resampled))
    found = []
    for at, name in enumerate(names):
        if not np.isfinite(point.mean_ratio[0, at]):
            continue
        row: dict[str, Any] = {
            "length": name,
            "segments": int(point.num[0, at]),
            "token_variance": float(point.token[0, at]),
            "claimed": float(point.claimed[0, at]),
            "correlation": float(point.correlation[0, at]),
        }
        for key in ("mean_ratio", "target_ratio"):
            ends = percentile_interval(getattr(drawn, key)[:, at])
            row[key] = float(getattr(point, key)[0, at])
            row[f"{key}_low"], row[f"{key}_high"] = (float(x) for x in ends)
        found.append(row)
    return found


def _row(kind: str, x: dict[str, Any], first: bool) -> tuple[str, ...]:
    def cell(key: str) -> str:
        ends = np.array([x[f"{key}_low"], x[f"{key}_high"]])
        return with_interval(x[key], ends)

    return (
        kind if first else "",
        x["length"],
        str(x["segments"]),
        number_text(x["claimed"], ".2f"),
        cell("mean_ratio"),
        number_text(x["correlation"], ".2f"),
        cell("target_ratio"),
    )
