"""Draw a run's curves as one image: results, and the health of training."""

import math
from pathlib import Path
from typing import Any

from segcredit.runlog import Run
from segcredit.runlog.files import replacing

PANELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Held-out accuracy",
        (("evaluation", "sampled", "sampled"), ("evaluation", "greedy", "greedy")),
    ),
    (
        "Held-out reward",
        (("evaluation", "reward", "sampled"), ("evaluation", "greedy_reward", "greedy")),
    ),
    ("Training reward", (("optimize", "reward", "reward"),)),
    ("Entropy (nats per token)", (("optimize", "entropy", "entropy"),)),
    ("Response length (tokens)", (("optimize", "response_length", "mean"),)),
    ("Clip fraction", (("optimize", "clip_fraction", "clip fraction"),)),
    (
        "Critic: explained variance",
        (
            ("pretrain_critic", "explained_variance", "pretraining"),
            ("optimize", "explained_variance", "optimization"),
        ),
    ),
    (
        "Critic: value loss",
        (
            ("pretrain_critic", "value_loss", "pretraining"),
            ("optimize", "value_loss", "optimization"),
        ),
    ),
    ("Segments per response", (("optimize", "segments", "segments"),)),
    ("Imitation: −log π per token", (("warm_start", "nll", "warm start"),)),
)
LARGEST = 1e100
"""Larger numbers are not drawn, because their differences would be infinite."""
INK, GRID = "#333a45", "#e3e6ea"
COLORS = ("#3b6fd4", "#e07b39", "#2c9c79")


def draw_curves(run: Run, path: Path) -> Path | None:
    """Draw every panel for which the run has numbers; return None if there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(title, found) for title, lines in PANELS if (found := _known(run, lines))]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.4 * columns, 2.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(run.path.name, fontsize=11, color=INK, parse_math=False)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, lines) in zip(axes, panels, strict=False):
        _panel(axis, run, title, lines)
    for axis in axes[len(panels) :]:
        axis.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=130)
    return path


def _known(run: Run, lines: tuple[tuple[str, str, str], ...]) -> list[tuple[str, str, str]]:
    return [line for line in lines if _series(run, line[1], line[0])[0]]


def _series(run: Run, key: str, stage: str) -> tuple[list[int], list[float]]:
    """Return the steps and values to draw; infinite, NaN and very large values become gaps."""
    try:
        steps, values = run.series(key, stage)
    except ValueError:
        return [], []
    return steps, [x if abs(x) < LARGEST else math.nan for x in values]


def _panel(axis: Any, run: Run, title: str, lines: list[tuple[str, str, str]]) -> None:
    for color, (stage, key, label) in zip(COLORS, lines, strict=False):
        steps, values = _series(run, key, stage)
        if stage == "evaluation":
            axis.plot(steps, values, color=color, marker="o", markersize=3.5, label=label)
            _interval(axis, run, key, color)
        elif len(values) > 30:
            axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            axis.plot(steps, _smooth(values), color=color, label=label)
        else:  # a marker, because a single point has no line
            axis.plot(steps, values, color=color, marker=".", markersize=4, label=label)
    axis.set_title(title, fontsize=10, color=INK, loc="left")
    axis.set_xlabel("step", fontsize=8, color=INK)
    axis.tick_params(labelsize=8, colors=INK)
    axis.grid(color=GRID, linewidth=0.7)
    axis.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axis.legend(fontsize=8, frameon=False)


def _interval(axis: Any, run: Run, key: str, color: str) -> None:
    """Draw the 95 % interval over prompts, where it was measured."""
    if not {f"{key}_low", f"{key}_high"} <= set(run.keys("evaluation")):
        return
    steps, low = _series(run, f"{key}_low", "evaluation")
    others, high = _series(run, f"{key}_high", "evaluation")
    if steps != others:
        return
    axis.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0)


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    """Compute an exponential moving average, as TensorBoard does."""
    smooth, last, norm = [], 0.0, 0.0
    for x in values:
        last = weight * last + (1 - weight) * x
        norm = weight * norm + (1 - weight)
        smooth.append(last / norm)
    return smooth
