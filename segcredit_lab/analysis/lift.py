"""Jumps of V at tokens of high entropy: how much likelier (Lift, Figure 3), how large (Eq. 14)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.printable import number_text
from segcredit.runlog import Run
from segcredit_lab.analysis.drawing import draw_jumps, draw_lift
from segcredit_lab.analysis.reading import (
    QUANTILES,
    Analysis,
    AnalysisSettings,
    CannotAnalyzeError,
    Step,
    Table,
    draws,
    interval_text,
    method_of,
    percentile_interval,
    plain,
    slope,
    slope_over_steps,
    smooth,
    spearman,
    tail_starts,
    with_interval,
)
from segcredit_lab.analysis.segments import unit_lengths, unit_of

STAGES = (("early", 0.3), ("middle", 0.6), ("late", 1.0))
"""Stages of training: the first 30 %, the next 30 % and the last 40 % of the recorded steps."""
ENTRIES = 2**21
"""Maximum size of the arrays (draws × tokens)."""
SHOWN = (0.7, 0.9, 0.95)
"""Quantiles in the table of Lift."""
JUMP_QUANTILES = (*(n / 10 for n in range(10)), 0.95)
"""q = 0, .1, …, .9, .95; at 0 the mean is that of all tokens."""
JUMPS_SHOWN = (0.5, 0.7, 0.9, 0.95)
"""Quantiles in the table of jumps."""
BOUNDARY_LIFT = (
    "This run's segments are longer than one token, and a critic that is trained only at segment "
    "boundaries is arbitrary between them: ΔV inside segments, and so this Lift, has no "
    "meaning. Use a value that is fitted at every token: --probe."
)
BOUNDARY_CRITIC = (
    "This run's critic is trained only at segment boundaries, and it is arbitrary between them, so "
    "V inside segments has no meaning. Use a run whose critic is trained at every token "
    "(value_everywhere, or PPO)."
)
READING = (
    "Above 1, large jumps of V are more frequent among tokens of high entropy than among all "
    "tokens. This is an association, not a cause."
)


@dataclass(frozen=True)
class TokenPool:
    """Tokens of one step, without the last token of every response."""

    owner: Int[np.ndarray, " N"]
    """Index of each token's response."""
    entropy: Float[np.ndarray, " N"]
    jump: Float[np.ndarray, " N"]
    """ΔV_t = |V_t − V_{t+1}|."""
    num_responses: int
    left_out: int = 0
    """Tokens whose H or ΔV is not finite."""

    @property
    def once(self) -> Int[np.ndarray, "1 R"]:
        """Bootstrap draw that contains every response exactly once."""
        return np.ones((1, self.num_responses), dtype=np.int64)


def make_pool(
    owner: Int[np.ndarray, " N"],
    entropy: Float[np.ndarray, " N"],
    value: Float[np.ndarray, " N"],
    num_responses: int,
) -> TokenPool:
    """Collect tokens that have a successor in their response.

    The last token has none: V after the end is 0, which would make every end a jump.
    """
    followed = np.flatnonzero(owner[:-1] == owner[1:])
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        jump = np.abs(value[followed] - value[followed + 1])
    entropy = entropy[followed]
    good = np.isfinite(jump) & np.isfinite(entropy)
    return TokenPool(
        owner[followed][good], entropy[good], jump[good], num_responses, int((~good).sum())
    )


def lift(
    pool: TokenPool, quantiles: Float[np.ndarray, " Q"], thresholds: Float[np.ndarray, " D"]
) -> Float[np.ndarray, "D Q"]:
    """Compute Lift(q) = P(D | A) / P(D), A = {H ≥ quantile_q(H)}, D = {ΔV ≥ quantile_d(ΔV)}.

    Quantiles are those of the pool, interpolated linearly. NaN for an empty pool.
    """
    return lift_of_draws(pool, pool.once, quantiles, thresholds)[0]


def lift_of_draws(
    pool: TokenPool,
    counts: Int[np.ndarray, "B R"],
    quantiles: Float[np.ndarray, " Q"],
    thresholds: Float[np.ndarray, " D"],
) -> Float[np.ndarray, "B D Q"]:
    """Compute the lift of many bootstrap draws, each given by the count of every response in it.

    Tokens are sorted once; a draw's quantiles and counts then follow from cumulative sums.
    """
    found = np.full((len(counts), len(thresholds), len(quantiles)), np.nan)
    if not len(pool.owner):
        return found
    sorted_pool = _sort(pool)
    for part in _parts(len(counts), len(pool.owner)):
        found[part] = _lift(sorted_pool, counts[part], quantiles, thresholds)
    return found


def _parts(num_draws: int, num_tokens: int) -> Iterator[slice]:
    """Split the draws so that no array (draws × tokens) exceeds ``ENTRIES``."""
    rows = max(1, ENTRIES // num_tokens)
    for first in range(0, num_draws, rows):
        yield slice(first, first + rows)


@dataclass(frozen=True)
class _SortedPool:
    """A pool sorted by H and by ΔV."""

    owner_by_entropy: np.ndarray
    owner_by_jump: np.ndarray
    entropy_tie: np.ndarray
    jump_tie: np.ndarray
    jump_rank: np.ndarray
    """Rank by ΔV of the tokens sorted by H."""


def _sort(pool: TokenPool) -> _SortedPool:
    by_entropy = np.argsort(pool.entropy, kind="stable")
    by_jump = np.argsort(pool.jump, kind="stable")
    rank = np.empty(len(by_jump), dtype=np.int64)
    rank[by_jump] = np.arange(len(by_jump))
    return _SortedPool(
        owner_by_entropy=pool.owner[by_entropy],
        owner_by_jump=pool.owner[by_jump],
        entropy_tie=first_equal(pool.entropy[by_entropy]),
        jump_tie=first_equal(pool.jump[by_jump]),
        jump_rank=rank[by_entropy],
    )


def first_equal(x: np.ndarray) -> np.ndarray:
    """Return, for each of the sorted values, the index of the first value equal to it."""
    return np.searchsorted(x, x, side="left")


def _lift(
    tokens: _SortedPool, counts: np.ndarray, quantiles: np.ndarray, thresholds: np.ndarray
) -> np.ndarray:
    by_entropy = counts[:, tokens.owner_by_entropy].astype(np.int32)
    below = _sums(by_entropy, np.int32)
    total = below[:, -1:]
    empty = total[:, 0] == 0
    below[empty, -1] = 1  # any start works, since their Lift is NaN
    starts = tail_starts(tokens.entropy_tie, below[:, 1:], quantiles)
    in_a = total - np.take_along_axis(below, starts, axis=1)
    below_jump = _sums(counts[:, tokens.owner_by_jump], np.int32)
    below_jump[empty, -1] = 1
    jump_starts = tail_starts(tokens.jump_tie, below_jump[:, 1:], thresholds)
    in_d = total - np.take_along_axis(below_jump, jump_starts, axis=1)
    found = np.empty((len(counts), len(thresholds), len(quantiles)))
    with np.errstate(invalid="ignore", divide="ignore"):
        for number in range(len(thresholds)):
            large = tokens.jump_rank >= jump_starts[:, number, None]
            both = _sums(by_entropy * large, np.int32)
            in_both = both[:, -1:] - np.take_along_axis(both, starts, axis=1)
            found[:, number] = (in_both / in_a) / (in_d[:, number, None] / total)
    found[empty] = np.nan
    return found


def _sums(x: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Compute cumulative sums along the rows: 0, x₀, x₀ + x₁, …."""
    sums = np.zeros((x.shape[0], x.shape[1] + 1), dtype)
    np.cumsum(x, axis=1, dtype=dtype, out=sums[:, 1:])
    return sums


def stage_slices(num: int) -> dict[str, slice]:
    """Return the slices of the recorded steps by stage; fewer than three steps are one stage."""
    if num < len(STAGES):
        return {"all": slice(0, num)}
    found, first = {}, 0
    for name, share in STAGES:
        last = round(num * share)
        found[name] = slice(first, max(last, first + 1))
        first = found[name].stop
    return found


def lift_over_responses(
    pools: Sequence[TokenPool],
    quantiles: Float[np.ndarray, " Q"],
    thresholds: Float[np.ndarray, " D"],
    resamples: int,
    seed: int = 0,
) -> Float[np.ndarray, "S B D Q"]:
    """Bootstrap the Lift of every step over responses; each draw has its own quantiles."""
    found = []
    for number, pool in enumerate(pools):
        counts = draws([seed, number], pool.num_responses, resamples)
        found.append(lift_of_draws(pool, counts, quantiles, thresholds))
    return np.stack(found)


def mean_over_steps(
    x: Float[np.ndarray, "S *rest"], resamples: int, seed: int = 0
) -> Float[np.ndarray, "B *rest"]:
    """Bootstrap the mean over steps."""
    counts = draws(seed, len(x), resamples)
    known = np.isfinite(x)
    weight = np.tensordot(counts, known, axes=1)
    total = np.tensordot(counts, np.where(known, x, 0.0), axes=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weight > 0, total / weight, np.nan)


@dataclass(frozen=True)
class StageMean:
    """A quantity averaged over the steps of one stage."""

    name: str
    num_steps: int
    mean: Float[np.ndarray, "*rest"]
    over_responses: Float[np.ndarray, "2 *rest"]
    over_steps: Float[np.ndarray, "2 *rest"]
    """Interval over steps; NaN if the stage has only one step."""


def stage_means(
    points: Float[np.ndarray, "S *rest"],
    drawn: Float[np.ndarray, "S B *rest"],
    settings: AnalysisSettings,
) -> tuple[StageMean, ...]:
    """Average a quantity over the steps of every stage; ``drawn`` has its bootstrap draws."""
    stages = []
    for number, (name, part) in enumerate(stage_slices(len(points)).items()):
        num = len(points[part])
        again = mean_over_steps(points[part], settings.resamples, settings.seed + number)
        over_steps = percentile_interval(again)
        stages.append(
            StageMean(
                name,
                num,
                points[part].mean(axis=0),
                percentile_interval(drawn[part].mean(axis=0)),
                over_steps if num > 1 else np.full_like(over_steps, np.nan),
            )
        )
    return tuple(stages)


@dataclass(frozen=True)
class LiftTrend:
    """Mean over q of each step's Lift at the chosen threshold, over training."""

    step: Float[np.ndarray, " S"]
    lift: Float[np.ndarray, " S"]
    smoothed: Float[np.ndarray, " S"]
    window: int
    spearman: float
    """Spearman correlation of the smoothed curve with the step."""
    spearman_raw: float
    slope: float
    """Slope of the unsmoothed curve per step."""
    slope_over_responses: Float[np.ndarray, " 2"]
    slope_over_steps: Float[np.ndarray, " 2"]


@dataclass(frozen=True)
class LiftCurves:
    """All results on Lift."""

    quantiles: Float[np.ndarray, " Q"]
    thresholds: Float[np.ndarray, " D"]
    """Thresholds d, the chosen one first."""
    stages: tuple[StageMean, ...]
    """Lift(q) for every threshold d."""
    trend: LiftTrend
    cut: float | None
    """The quantile above which the run's method cuts segments, if it cuts by entropy."""


def measure(
    pools: Sequence[TokenPool],
    steps: Sequence[int],
    settings: AnalysisSettings,
    cut: float | None = None,
) -> LiftCurves:
    """Compute all curves and intervals from the pools of the recorded steps."""
    quantiles, thresholds = np.array(QUANTILES), np.array(settings.thresholds)
    points = np.stack([lift(pool, quantiles, thresholds) for pool in pools])
    drawn = lift_over_responses(pools, quantiles, thresholds, settings.resamples, settings.seed)
    trend = _trend(np.array(steps, dtype=np.float64), points[:, 0], drawn[:, :, 0], settings)
    return LiftCurves(quantiles, thresholds, stage_means(points, drawn, settings), trend, cut)


def _trend(
    step: Float[np.ndarray, " S"],
    points: Float[np.ndarray, "S Q"],
    drawn: Float[np.ndarray, "S B Q"],
    settings: AnalysisSettings,
) -> LiftTrend:
    mean, drawn_mean = points.mean(axis=1), drawn.mean(axis=2).T
    smoothed = smooth(mean, settings.window)
    once = np.ones_like(mean)
    return LiftTrend(
        step,
        mean,
        smoothed,
        settings.window,
        spearman(step, smoothed),
        spearman(step, mean),
        float(slope(step, mean, once)),
        percentile_interval(slope(step, drawn_mean, np.ones_like(drawn_mean))),
        percentile_interval(slope_over_steps(step, mean, settings.resamples, settings.seed)),
    )


def pools_of(steps: Sequence[Step]) -> tuple[list[TokenPool], list[int]]:
    """Return the pools of the steps that have tokens, and the numbers of these steps."""
    made = [make_pool(x.owner, x.entropy, x.value, x.num_responses) for x in steps]
    kept = [(pool, x.step) for pool, x in zip(made, steps, strict=True) if len(pool.owner)]
    if not kept:
        raise CannotAnalyzeError(
            "no recorded token has a finite entropy and finite values before and after it."
        )
    return [pool for pool, _ in kept], [step for _, step in kept]


def lift_of_critic(
    run: Run, name: str, steps: Sequence[Step], settings: AnalysisSettings
) -> Analysis:
    """Lift with the values of the run's critic."""
    everywhere = trained_at_every_token(run, steps)
    note = READING if everywhere else f"{BOUNDARY_LIFT} {READING}"
    more = {"critic": {"at_every_token": everywhere, "r_squared": _explained(steps)}}
    return lift_analysis("lift", "Lift", run, name, steps, settings, note, more)


def trained_at_every_token(run: Run, steps: Sequence[Step]) -> bool:
    """Whether the critic was trained at every token, by one-token segments or by the method."""
    if not any(np.isfinite(x.value).any() for x in steps):
        return False
    if not any((unit_lengths(unit_of(x.owner, x.segment)) > 1).any() for x in steps):
        return True
    try:
        return bool(getattr(method_of(run).critic, "everywhere", False))
    except CannotAnalyzeError:
        return False


def _explained(steps: Sequence[Step]) -> float:
    """Compute the explained variance, 1 − Var(R − V) / Var(R), over all recorded tokens."""
    value = np.concatenate([x.value for x in steps])
    reward = np.concatenate([x.reward[x.owner] for x in steps])
    known = np.isfinite(value) & np.isfinite(reward)
    spread = np.var(reward[known]) if known.any() else 0.0
    return float(1 - np.var((reward - value)[known]) / spread) if spread else float("nan")


def lift_analysis(
    name: str,
    title: str,
    run: Run,
    run_name: str,
    steps: Sequence[Step],
    settings: AnalysisSettings,
    note: str,
    more: dict[str, Any] | None = None,
) -> Analysis:
    """Analyze Lift for the values in these steps."""
    pools, numbers = pools_of(steps)
    curves = measure(pools, numbers, settings, cut_of(run))
    return Analysis(
        name=name,
        title=title,
        runs=(run_name,),
        numbers=plain({**(more or {}), **_numbers(curves, pools, settings)}),
        table=_table(curves),
        note=f"{note} {_trend_text(curves.trend)}",
        draw=partial(draw_lift, curves),
        size=(11.0, 3.7),
    )


def cut_of(run: Run) -> float | None:
    """Return 1 − k of a method that cuts after the share k of tokens with the highest entropy."""
    try:
        fraction = getattr(method_of(run).credit.over, "fraction", None)
    except CannotAnalyzeError:
        return None
    return 1.0 - fraction if isinstance(fraction, float) else None


def _numbers(
    curves: LiftCurves, pools: Sequence[TokenPool], settings: AnalysisSettings
) -> dict[str, Any]:
    trend = curves.trend
    return {
        "quantiles": curves.quantiles,
        "resamples": settings.resamples,
        "by_threshold": {
            f"{d:g}": {
                stage.name: {
                    "steps": stage.num_steps,
                    "lift": stage.mean[number],
                    "over_responses": _ends(stage.over_responses[:, number]),
                    "over_steps": _ends(stage.over_steps[:, number]),
                }
                for stage in curves.stages
            }
            for number, d in enumerate(curves.thresholds)
        },
        "trend": {
            "threshold": curves.thresholds[0],
            "window": trend.window,
            "spearman": trend.spearman,
            "spearman_without_smoothing": trend.spearman_raw,
            "slope_per_step": trend.slope,
            "slope_over_responses": _ends(trend.slope_over_responses),
            "slope_over_steps": _ends(trend.slope_over_steps),
        },
        "per_step": {
            "step": trend.step,
            "mean_lift": trend.lift,
            "smoothed": trend.smoothed,
            "responses": [pool.num_responses for pool in pools],
            "tokens": [len(pool.owner) for pool in pools],
        },
        "tokens_left_out": sum(pool.left_out for pool in pools),
    }


def _ends(interval: np.ndarray) -> dict[str, Any]:
    return {"low": interval[0], "high": interval[1]}


def _trend_text(trend: LiftTrend) -> str:
    ends = interval_text(100 * trend.slope_over_responses, "+.3f")
    over_steps = interval_text(100 * trend.slope_over_steps, "+.3f")
    return (
        f"Trend of the mean over q: Spearman {number_text(trend.spearman, '+.2f')} smoothed, "
        f"{number_text(trend.spearman_raw, '+.2f')} as measured; "
        f"slope {number_text(100 * trend.slope, '+.3f')} per 100 steps, "
        f"95 % interval over responses {ends}, over steps {over_steps}."
    )


def _table(curves: LiftCurves) -> Table:
    shown = [QUANTILES.index(q) for q in SHOWN]
    rows = []
    for number, d in enumerate(curves.thresholds):
        for stage in curves.stages:
            cells = [
                with_interval(stage.mean[number, at], stage.over_responses[:, number, at])
                for at in shown
            ]
            label = f"d = {d:g}" if stage is curves.stages[0] else ""
            rows.append((label, stage.name, *cells))
    columns = ("", "stage", *(f"q = {q:g}" for q in SHOWN))
    return Table(columns, tuple(rows))


def mean_jumps(
    pool: TokenPool, counts: Int[np.ndarray, "B R"], quantiles: Float[np.ndarray, " Q"]
) -> tuple[Float[np.ndarray, "B Q"], Float[np.ndarray, " B"]]:
    """Compute E[ΔV | H ≥ quantile_q(H)] and E[ΔV] for draws, given by each response's count.

    Quantiles are those of the draw, interpolated linearly. NaN for a draw without tokens.
    """
    order = np.argsort(pool.entropy, kind="stable")
    owner, jump, tie = pool.owner[order], pool.jump[order], first_equal(pool.entropy[order])
    above = np.full((len(counts), len(quantiles)), np.nan)
    overall = np.full(len(counts), np.nan)
    if not len(owner):
        return above, overall
    for part in _parts(len(counts), len(owner)):
        weight = counts[part][:, owner]
        num, total = _sums(weight, np.int64), _sums(weight * jump, np.float64)
        empty = num[:, -1] == 0
        num[empty, -1] = 1  # any start works, since the result is NaN
        starts = tail_starts(tie, num[:, 1:], quantiles)
        with np.errstate(invalid="ignore", divide="ignore"):
            tail = total[:, -1:] - np.take_along_axis(total, starts, axis=1)
            above[part] = tail / (num[:, -1:] - np.take_along_axis(num, starts, axis=1))
            overall[part] = total[:, -1] / num[:, -1]
        above[part][empty], overall[part][empty] = np.nan, np.nan
    return above, overall


@dataclass(frozen=True)
class JumpStage:
    """Mean jump of V above each entropy quantile, averaged over the steps of one stage."""

    overall: float
    """E[ΔV]."""
    above: Float[np.ndarray, " Q"]
    """E[ΔV | H ≥ quantile_q(H)]."""
    ratio: StageMean
    """The latter divided by the former, of every step; Eq. 14 claims more than 1."""


def jump_stages(pools: Sequence[TokenPool], settings: AnalysisSettings) -> tuple[JumpStage, ...]:
    """Measure the jumps of every stage of training, with intervals of the ratio."""
    quantiles = np.array(JUMP_QUANTILES)
    above, overall, drawn = [], [], []
    for number, pool in enumerate(pools):
        each, mean = mean_jumps(pool, pool.once, quantiles)
        above.append(each[0])
        overall.append(mean[0])
        counts = draws([settings.seed, number], pool.num_responses, settings.resamples)
        drawn.append(_ratio(*mean_jumps(pool, counts, quantiles)))
    points, means = np.stack(above), np.array(overall)
    stages = stage_means(_ratio(points, means), np.stack(drawn), settings)
    return tuple(
        JumpStage(float(means[part].mean()), points[part].mean(axis=0), ratio)
        for ratio, part in zip(stages, stage_slices(len(pools)).values(), strict=True)
    )


def _ratio(
    above: Float[np.ndarray, "B Q"], overall: Float[np.ndarray, " B"]
) -> Float[np.ndarray, "B Q"]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return above / overall[:, None]


def jumps_of_critic(
    run: Run, name: str, steps: Sequence[Step], settings: AnalysisSettings
) -> Analysis:
    """Mean jumps (Eq. 14) with the values of the run's critic."""
    everywhere = trained_at_every_token(run, steps)
    pools, numbers = pools_of(steps)
    if not any(pool.jump.any() for pool in pools):
        raise CannotAnalyzeError("V is the same at all tokens of every recorded response.")
    stages = jump_stages(pools, settings)
    places = [JUMP_QUANTILES.index(q) for q in JUMPS_SHOWN]
    rows = tuple(
        (
            stage.ratio.name,
            number_text(stage.overall, ".3g"),
            *(
                with_interval(stage.ratio.mean[at], stage.ratio.over_responses[:, at])
                for at in places
            ),
        )
        for stage in stages
    )
    return Analysis(
        name="jumps",
        title="Jumps of V above each entropy quantile",
        runs=(name,),
        numbers=plain(
            {
                "critic": {"at_every_token": everywhere},
                "quantiles": JUMP_QUANTILES,
                "resamples": settings.resamples,
                "steps": numbers,
                "stages": {stage.ratio.name: _of_stage(stage) for stage in stages},
                "tokens": [len(pool.owner) for pool in pools],
                "tokens_left_out": sum(pool.left_out for pool in pools),
            }
        ),
        table=Table(("stage", "mean |ΔV|", *(f"× above q = {q:g}" for q in JUMPS_SHOWN)), rows),
        note=(
            ("" if everywhere else f"{BOUNDARY_CRITIC} ")
            + "Mean |ΔV| of the tokens above each entropy quantile, divided by the mean of all "
            "tokens. Eq. 14 claims a ratio above 1. Intervals over responses."
        ),
        draw=partial(draw_jumps, np.array(JUMP_QUANTILES), stages, cut_of(run)),
        size=(8.8, 3.6),
    )


def _of_stage(stage: JumpStage) -> dict[str, Any]:
    return {
        "steps": stage.ratio.num_steps,
        "overall": stage.overall,
        "above": stage.above,
        "ratio": stage.ratio.mean,
        "over_responses": _ends(stage.ratio.over_responses),
        "over_steps": _ends(stage.ratio.over_steps),
    }
