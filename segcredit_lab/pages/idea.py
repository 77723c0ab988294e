"""Draw docs/img/idea-light.svg and idea-dark.svg: one answer, three units of credit.

The chain of thought, its entropies and its values are made up; segcredit computes every advantage,
segment and value step. Run ``python -m segcredit_lab.pages.idea``; with ``--png FOLDER`` it also
writes bitmaps.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from segcredit.core.advantages import segment_gae, terminal_reward
from segcredit.core.group import group_zscore
from segcredit.core.segments import Segments
from segcredit.partition import tokens, top_entropy

# A correct answer with a slip in the middle (7 × 6 is not 48), noticed and repaired.
# Token, entropy H_t, and the critic's V of the prefix before it.
STORY = [
    ("17×6", 0.35, 0.50),
    (":", 1.30, 0.66),
    ("10×6", 0.55, 0.57),
    ("=", 0.05, 0.42),
    ("60", 0.10, 0.75),
    (",", 1.05, 0.55),
    ("7×6", 0.30, 0.74),
    ("=", 0.05, 0.88),
    ("48", 0.60, 0.58),
    (".", 1.20, 0.76),
    ("No", 0.70, 0.18),
    (",", 1.00, 0.47),
    ("7×6", 0.25, 0.60),
    ("=", 0.05, 0.86),
    ("42", 0.40, 0.55),
    (".", 0.95, 0.97),
    ("60+42", 0.30, 0.86),
    ("=", 0.05, 1.05),
    ("102", 0.15, 0.72),
    (".", 0.80, 0.95),
]
REMARKS = {8: "slip", 14: "repair"}
REWARD = 1.0
GROUP_REWARDS = [REWARD, 1.0, 1.0, 0.0]
"""Rewards of the answer and three other responses, for GRPO."""
FRACTION = 0.30
LAM_SEGMENT = 0.5
"""A short horizon, so that the segments differ visibly. At the paper's 0.99 every Â_m is close to
r − V(s_m), and a correct answer is blue throughout."""


@dataclass(frozen=True)
class Credits:
    """Credit per token, segment and response, shown in the three rows of the picture."""

    segments: Segments
    token: list[float]
    segment: list[float]
    response: float
    state_value: list[float]


def compute() -> Credits:
    """Compute credit by token, by segment and by response."""
    entropy = torch.tensor([[h for _, h, _ in STORY]])
    value = torch.tensor([[v for _, _, v in STORY]])
    mask = torch.ones_like(entropy, dtype=torch.bool)
    reward = terminal_reward(torch.tensor([REWARD]), mask)
    segments = top_entropy(entropy, mask, FRACTION)
    lam_token = LAM_SEGMENT ** (int(segments.num[0]) / len(STORY))  # the same horizon in tokens
    by_token = segment_gae(reward, value, tokens(mask), gamma=1.0, lam=lam_token)
    by_segment = segment_gae(reward, value, segments, gamma=1.0, lam=LAM_SEGMENT)
    group = torch.zeros(len(GROUP_REWARDS), dtype=torch.long)
    return Credits(
        segments=segments,
        token=by_token.advantage[0].tolist(),
        segment=segments.at_start(by_segment.advantage)[0].tolist(),
        response=group_zscore(torch.tensor(GROUP_REWARDS), group)[0].item(),
        state_value=segments.at_start(value)[0].tolist(),
    )


@dataclass(frozen=True)
class Theme:
    """Colors of one picture."""

    page: str
    ink: str
    soft: str
    faint: str
    cut: str
    line: str
    diverging: tuple[str, ...]
    """Colors from blame through zero to credit."""

    def shade(self, credit: float) -> tuple[float, float, float, float]:
        """Color of a cell."""
        scale = LinearSegmentedColormap.from_list("credit", self.diverging)
        return scale(Normalize(-LIMIT, LIMIT, clip=True)(credit))

    def on(self, fill: tuple[float, float, float, float]) -> str:
        """Readable text color on a cell."""
        red, green, blue = to_rgb(fill)
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.52
        return "#1b1f24" if bright else "#ffffff"


LIMIT = 0.65
LIGHT = Theme(
    page="#ffffff",
    ink="#1f2328",
    soft="#59636e",
    faint="#d5dae0",
    cut="#1f2328",
    line="#8c959f",
    diverging=("#b23c00", "#e8792b", "#f7c08a", "#f1f1ef", "#a3cdee", "#3f93d2", "#0a5ca0"),
)
DARK = Theme(
    page="#0d1117",
    ink="#e6edf3",
    soft="#9198a1",
    faint="#30363d",
    cut="#e6edf3",
    line="#6e7681",
    diverging=("#ff9a52", "#e0762c", "#96501f", "#262c34", "#1f5787", "#2f88cf", "#6fbcff"),
)

WIDTH, HEIGHT = 800, 436
GUTTER, GAP, RIGHT = 112, 2.0, 788
CELL = 28
TOP_PPO, TOP_SAPO, TOP_GRPO = 34, 164, 338
BARS, STAIRS = 66, 74
"""Heights of the entropies above SAPO's cells and of the values below them."""


def columns() -> list[tuple[float, float]]:
    """Return the left edge and width of each token's cell: wider for longer tokens."""
    weight = [1.75 + len(text) for text, _, _ in STORY]
    space = RIGHT - GUTTER - GAP * (len(STORY) - 1)
    widths = [space * w / sum(weight) for w in weight]
    lefts = [GUTTER + sum(widths[:i]) + GAP * i for i in range(len(widths))]
    return list(zip(lefts, widths, strict=True))


def draw(theme: Theme) -> Figure:
    """Draw the picture."""
    credits, cells = compute(), columns()
    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=theme.page)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    ax.axis("off")

    _heading(ax, theme, TOP_PPO, "token", "PPO")
    for (left, width), credit in zip(cells, credits.token, strict=True):
        _box(ax, left, TOP_PPO, width, theme.shade(credit))
    _words(ax, theme, cells, TOP_PPO, lambda t: credits.token[t])
    for t, remark in REMARKS.items():
        _note(ax, theme, cells[t][0] + cells[t][1] / 2, TOP_PPO - 11, remark)

    _heading(ax, theme, TOP_SAPO, "segment", "SAPO")
    starts, ends = credits.segments.start[0].tolist(), credits.segments.end[0].tolist()
    owner = credits.segments.index[0].tolist()
    for start, end, credit in zip(starts, ends, credits.segment, strict=True):
        left, right = cells[start][0], sum(cells[end])
        _box(ax, left, TOP_SAPO, right - left, theme.shade(credit))
    _words(ax, theme, cells, TOP_SAPO, lambda t: credits.segment[owner[t]])
    _entropies(ax, theme, cells, ends)
    _staircase(ax, theme, cells, credits, starts, ends)

    _heading(ax, theme, TOP_GRPO, "response", "GRPO")
    _box(ax, GUTTER, TOP_GRPO, RIGHT - GUTTER, theme.shade(credits.response))
    _words(ax, theme, cells, TOP_GRPO, lambda t: credits.response)
    _note(ax, theme, (GUTTER + RIGHT) / 2, TOP_GRPO + CELL + 11, _signed(credits.response))

    _legend(ax, theme)
    return figure


def _heading(ax: Axes, theme: Theme, top: float, unit: str, method: str) -> None:
    middle = top + CELL / 2
    ax.text(12, middle - 8, unit, color=theme.ink, size=11.5, weight="bold", va="center")
    ax.text(12, middle + 8, method, color=theme.soft, size=9.5, va="center")


def _box(ax: Axes, left: float, top: float, width: float, fill: tuple[float, ...]) -> None:
    ax.add_patch(
        FancyBboxPatch(
            (left, top),
            width,
            CELL,
            boxstyle="round,pad=0,rounding_size=4",
            facecolor=fill,
            edgecolor="none",
        )
    )


def _words(
    ax: Axes,
    theme: Theme,
    cells: list[tuple[float, float]],
    top: float,
    credit: Callable[[int], float],
) -> None:
    for t, ((left, width), (text, _, _)) in enumerate(zip(cells, STORY, strict=True)):
        ax.text(
            left + width / 2,
            top + CELL / 2 + 0.5,
            text,
            color=theme.on(theme.shade(credit(t))),
            size=9.5,
            ha="center",
            va="center_baseline",
        )


def _entropies(ax: Axes, theme: Theme, cells: list[tuple[float, float]], ends: list[int]) -> None:
    floor = TOP_SAPO - 7
    _label(ax, theme, floor - 30, "entropy $H_t$")
    tallest = max(h for _, h, _ in STORY)
    for t, ((left, width), (_, entropy, _)) in enumerate(zip(cells, STORY, strict=True)):
        height = (BARS - 10) * entropy / tallest
        bar = min(width - 4, 11)
        ax.add_patch(
            Rectangle(
                (left + (width - bar) / 2, floor - height),
                bar,
                height,
                facecolor=theme.cut if t in ends else theme.faint,
            )
        )


def _staircase(
    ax: Axes,
    theme: Theme,
    cells: list[tuple[float, float]],
    credits: Credits,
    starts: list[int],
    ends: list[int],
) -> None:
    top = TOP_SAPO + CELL + 32
    floor = top + STAIRS
    _label(ax, theme, (top + floor) / 2 + 4, "value $V(s_m)$")

    def level(value: float) -> float:
        return floor - (floor - top) * value

    middles = [left + width / 2 for left, width in cells]
    ax.plot(middles, [level(v) for _, _, v in STORY], color=theme.faint, lw=1.2, zorder=1)
    xs, ys = [], []
    for start, end, value in zip(starts, ends, credits.state_value, strict=True):
        left, right = cells[start][0] - GAP / 2, sum(cells[end]) + GAP / 2
        xs += [left, right]
        ys += [level(value)] * 2
    xs.append(xs[-1])
    ys.append(level(REWARD))
    ax.plot(xs, ys, color=theme.ink, lw=2.0, solid_joinstyle="miter", zorder=3)
    ax.plot(xs[-1], ys[-1], "o", color=theme.ink, ms=5, zorder=4)
    ax.text(xs[-1] - 9, ys[-1] - 2, "$r=1$", color=theme.soft, size=9, ha="right", va="center")
    for end in ends[:-1]:
        x = sum(cells[end]) + GAP / 2
        ax.plot(
            [x, x], [TOP_SAPO - 4, floor + 2], color=theme.line, lw=0.9, ls=(0, (2, 2.5)), zorder=2
        )
    for start, end, credit in zip(starts, ends, credits.segment, strict=True):
        middle = (cells[start][0] + sum(cells[end])) / 2
        _note(ax, theme, middle, TOP_SAPO + CELL + 11, _signed(credit))


def _signed(credit: float) -> str:
    return f"{credit:+.2f}".replace("-", "−")


def _note(ax: Axes, theme: Theme, x: float, y: float, text: str) -> None:
    ax.text(x, y, text, color=theme.soft, size=9, ha="center", va="center")


def _label(ax: Axes, theme: Theme, y: float, text: str) -> None:
    ax.text(12, y, text, color=theme.soft, size=9.5, va="center")


def _legend(ax: Axes, theme: Theme) -> None:
    y, steps, width = HEIGHT - 25, 60, 150
    left = (GUTTER + RIGHT - width) / 2
    for i in range(steps):  # each reaches to the right end, to avoid seams
        credit = LIMIT * (2 * (i + 0.5) / steps - 1)
        ax.add_patch(
            Rectangle(
                (left + width * i / steps, y),
                width * (1 - i / steps),
                8,
                facecolor=theme.shade(credit),
                lw=0,
            )
        )
    ax.text(left - 8, y + 4, "blame", color=theme.soft, size=9.5, ha="right", va="center")
    ax.text(left + width + 8, y + 4, "credit", color=theme.soft, size=9.5, va="center")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="folder for bitmaps")
    arguments = parser.parse_args()
    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "segcredit"})
    folder = Path(__file__).resolve().parents[2] / "docs" / "img"
    folder.mkdir(exist_ok=True)
    for name, theme in (("light", LIGHT), ("dark", DARK)):
        figure = draw(theme)
        figure.savefig(folder / f"idea-{name}.svg", metadata={"Date": None, "Creator": None})
        if arguments.png:
            arguments.png.mkdir(parents=True, exist_ok=True)
            figure.savefig(arguments.png / f"idea-{name}.png", dpi=100)


if __name__ == "__main__":
    main()
