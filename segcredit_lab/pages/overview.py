"""Draw docs/img/results-*.svg and chains-*.svg: methods compared with SAPO.

``results`` shows the differences on three tasks, ``chains`` the cost of a short horizon by chain
length. Numbers are those of docs/results/NAME/study.csv. Run ``python -m
segcredit_lab.pages.overview``; with ``--png FOLDER`` it also writes bitmaps.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from segcredit.printable import number_text
from segcredit_lab.pages.results import (
    COMPARED,
    DOCS,
    MARK,
    MATCHED,
    OWN,
    RATES,
    SHORT,
    TASKS,
    arms_of,
    difference,
    estimated,
    is_pending,
)
from segcredit_lab.study.summary import Estimate

REACH = 44
"""The x axis shows this many points to either side; it must contain every interval."""
RATE_MARKS = {RATES[0.5]: "*", RATES[2.0]: "**"}
"""Mark of a difference, by the note on its learning rate."""


@dataclass(frozen=True)
class Theme:
    """Colors of a page."""

    name: str
    ink: str
    dim: str
    faint: str
    page: str
    kinds: dict[str, str]


THEMES = (
    Theme(
        "light", "#333a45", "#9aa2ad", "#d4d8de", "#ffffff",
        {OWN: "#e07b39", MATCHED: "#3b6fd4", SHORT: "#a14fb5"},
    ),
    Theme(
        "dark", "#d7dce3", "#7d8794", "#3a414b", "#0d1117",
        {OWN: "#f0965a", MATCHED: "#6f9bf0", SHORT: "#c583d6"},
    ),
)  # fmt: skip


def draw_results(theme: Theme) -> Figure:
    """Draw one panel per task, one row per method."""
    figure = Figure(figsize=(10.4, 4.2), layout="constrained", facecolor=theme.page)
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for number, (axis, task) in enumerate(zip(panels, TASKS, strict=True)):
        panel(axis, theme, number)
        axis.set_title(task, fontsize=10.5, color=theme.ink)
    panels[0].set_yticks(range(len(COMPARED)), [label for _, label, _ in COMPARED])
    for text, (kind, _, _) in zip(panels[0].get_yticklabels(), COMPARED, strict=True):
        text.set_color(theme.kinds[kind])
    label = "points of held-out accuracy above SAPO, mean over the learning curve"
    places = [place for _, _, row in COMPARED for place in row if place is not None]
    for note in sorted({difference(place)[1] for place in places} - {""}):
        label += f"\n{RATE_MARKS[note]} tuned to {note}"
    if any(map(is_pending, places)):
        label += f"\n{MARK} run before a correction of the method, not repeated yet"
    panels[1].set_xlabel(label, color=theme.ink)
    handles = [
        panels[0].plot([], [], "o-", color=color, label=kind)[0]
        for kind, color in theme.kinds.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, labelcolor=theme.ink)
    return figure


def panel(axis: Axes, theme: Theme, task: int) -> None:
    """Draw points with 95 % intervals, and "not run" for missing ones."""
    prepare(axis, theme, len(COMPARED))
    for at, (kind, _, places) in enumerate(COMPARED):
        place, color = places[task], theme.kinds[kind]
        if place is None:
            axis.text(
                REACH - 1, at, "not run", color=theme.dim, ha="right", va="center", fontsize=8
            )
            continue
        found, note = difference(place)
        if max(abs(found.low), abs(found.high)) > REACH:
            raise ValueError(
                f"the interval of {place!r} exceeds the axis; increase REACH ({REACH})"
            )
        marks = [RATE_MARKS[note]] if note else []
        marks += [MARK] if is_pending(place) else []
        mark(axis, theme, color, at, found, "".join(f" {x}" for x in marks))


def prepare(axis: Axes, theme: Theme, rows: int) -> None:
    """Prepare a panel with this many rows; the x axis is points above or below SAPO."""
    axis.set_facecolor(theme.page)
    axis.set_xlim(-REACH, REACH)
    axis.set_xticks(range(-40, 41, 20), ["−40", "−20", "0", "+20", "+40"])
    axis.set_ylim(rows - 0.5, -0.6)
    axis.axvline(0.0, color=theme.ink, linewidth=1.1)
    axis.grid(True, axis="x", color=theme.faint, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(colors=theme.ink, length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def mark(
    axis: Axes,
    theme: Theme,
    color: str,
    at: float,
    found: Estimate,
    behind: str = "",
) -> None:
    """Draw a difference: mean as point and number, interval as line."""
    axis.plot([found.low, found.high], [at, at], color=color, linewidth=1.8, solid_capstyle="round")
    axis.plot(found.mean, at, "o", color=color, markersize=5.5)
    axis.annotate(
        number_text(found.mean, "+.1f") + behind,
        (found.mean, at),
        (0, 5.5),
        textcoords="offset points",
        ha="center",
        color=color,
        fontsize=8,
        bbox={"facecolor": theme.page, "edgecolor": "none", "pad": 0.6},
    )


def save(draw: Callable[[Theme], Figure], name: str, png: Path | None) -> None:
    """Save a picture to docs/img, light and dark, and as bitmaps if a folder is given."""
    settings: dict[Any, Any] = {
        "svg.hashsalt": "segcredit",  # reproducible bytes
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "legend.frameon": False,
    }
    with mpl.rc_context(settings):
        for theme in THEMES:
            figure = draw(theme)
            path = DOCS / "img" / f"{name}-{theme.name}.svg"
            figure.savefig(path, metadata={"Date": None})
            print(path)
            if png is not None:
                figure.savefig(png / f"{name}-{theme.name}.png", dpi=130)


CHAINS = {
    "chain-two-half": "2 decisions in 49 tokens",
    "chain-two": "2 decisions in 49 tokens",
    "chain-four": "4 decisions in 95 tokens",
    "chain-eight": "8 decisions in 220 tokens",
    "chain-two_padded": "2 decisions in 220 tokens",
}
CHAIN_ARMS = {"sapo_short": (SHORT, "SAPO with PPO's horizon"), "ppo": (OWN, "PPO")}
"""Kind (color) and label of each arm."""


def draw_chains(theme: Theme) -> Figure:
    """Draw one row per chain length with both methods at the short horizon."""
    figure = Figure(figsize=(7.8, 4.2), layout="constrained", facecolor=theme.page)
    axis = figure.subplots()
    prepare(axis, theme, len(CHAINS))
    axis.set_xlim(-28, 22)
    axis.set_xticks(range(-20, 21, 10), ["−20", "−10", "0", "+10", "+20"])
    axis.set_xlabel(
        "points of held-out accuracy above SAPO, mean over the learning curve", color=theme.ink
    )
    labels = []
    for at, (study, label) in enumerate(CHAINS.items()):
        rows = arms_of(study)
        rates = [f"{float(row['learning_rate']):g}" for row in rows.values()]
        rate = rates[0] if len({*rates}) == 1 else ", ".join(rates)
        labels.append(f"{label}\n{len(rows['sapo']['seeds'].split())} seeds, rate {rate}")
        for arm, offset in zip(CHAIN_ARMS, (-0.16, 0.2), strict=True):
            found = estimated(rows[arm], "area_difference", 100)
            mark(axis, theme, theme.kinds[CHAIN_ARMS[arm][0]], at + offset, found)
    axis.set_yticks(range(len(CHAINS)), labels)
    handles = [
        axis.plot([], [], "o-", color=theme.kinds[kind], label=label)[0]
        for kind, label in CHAIN_ARMS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, labelcolor=theme.ink)
    return figure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", type=Path, help="folder for bitmaps")
    png = parser.parse_args().png
    save(draw_results, "results", png)
    save(draw_chains, "chains", png)


if __name__ == "__main__":
    main()
