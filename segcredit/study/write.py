"""A study's files: tables, curves and figures in one folder."""

from collections.abc import Callable
from pathlib import Path

from segcredit.analysis import Analysis
from segcredit.analysis import write as write_figure
from segcredit.runlog.atomic import write_text_atomically
from segcredit.study.figures import figures
from segcredit.study.summary import Summary
from segcredit.study.tables import (
    arms_csv,
    cost_table,
    curves_csv,
    latex,
    markdown,
    results_table,
    runs_csv,
    times_csv,
    tuning_table,
)

MEASURE = (
    "Measured is held-out accuracy of sampled responses: its mean over the curve (the area under "
    "it by trapezoids, divided by the steps), and its last value. Numbers are per cent; in "
    "brackets the 95 % interval by Student's t over seeds. Differences are paired by seed: every "
    "arm begins from the same warm start of its seed."
)


def _measure_text(summary: Summary) -> str:
    if summary.measure == "accuracy":
        return MEASURE
    return MEASURE.replace(
        "held-out accuracy of sampled responses",
        f"held-out {summary.measure} of sampled responses (the reward does not report "
        f"correctness, so there is no accuracy)",
    ).replace("Numbers are per cent", "Numbers are multiplied by 100")


def write_study(
    summary: Summary, folder: Path, watch: Callable[[str], None] = lambda what: None
) -> list[str]:
    """All tables, curves and figures; returned is what could not be drawn, and why."""
    folder.mkdir(parents=True, exist_ok=True)
    made, lacking = figures(summary, watch)
    for figure in made:
        write_figure(figure, folder)
    texts = {
        "study.csv": arms_csv(summary),
        "runs.csv": runs_csv(summary),
        "curves.csv": curves_csv(summary),
        "times.csv": times_csv(summary),
        "study.tex": _tex(summary),
        "study.md": _page(summary, made, lacking),
    }
    for name, text in texts.items():
        write_text_atomically(folder / name, text)
    return lacking


def _page(summary: Summary, drawn: list[Analysis], lacking: list[str]) -> str:
    study = summary.study
    seeds = ", ".join(map(str, summary.seeds))
    parts = [
        f"# {study.title}",
        f"{study.asks} Scale {summary.scale}, seeds {seeds}.",
        *([f"Settings of all runs: {', '.join(summary.overrides)}."] if summary.overrides else []),
        *_incomplete(summary),
        markdown(results_table(summary)),
        " ".join([_measure_text(summary), *_tuning_text(summary)]),
        *([study.note] if study.note else []),
        *([f"The paper's numbers: {study.published.source}."] if study.published else []),
        "## Cost and behaviour",
        markdown(cost_table(summary)),
        _budget(summary),
    ]
    if summary.measure_tuned:
        parts += ["## Learning rates", markdown(tuning_table(summary))]
    if drawn or lacking:
        parts += ["## Figures", *lacking]
    for figure in drawn:
        parts.append(f"![{figure.title}]({figure.name}.png)")
        if figure.table.rows:
            parts.append(markdown(figure.table))
        if left_out := figure.numbers.get("left_out"):
            parts.append(f"Without {'; '.join(left_out)}.")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _incomplete(summary: Summary) -> list[str]:
    """What a reader must know before the numbers."""
    parts = []
    missing = sum(len(arm.missing) for arm in summary.arms)
    if missing:
        total = len(summary.arms) * len(summary.seeds)
        parts.append(f"**Incomplete: {missing} of {total} runs are not there.**")
    if summary.failed:
        lines = [f"- {name}: {' '.join(why.split())}" for name, why in summary.failed.items()]
        parts.append("\n".join(["Failed:", "", *lines]))
    return parts


def _tuning_text(summary: Summary) -> list[str]:
    if not summary.measure_tuned:
        return ["Learning rates are the recipes'."]
    whose = (
        "Each arm's learning rate was tuned with the same budget, on other seeds"
        if summary.study.tune == "each"
        else f"All arms have the learning rate that was tuned for "
        f"{summary.study.label(summary.study.reference)}, on other seeds"
    )
    edge = any(arm.tuned is not None and arm.tuned.at_edge for arm in summary.arms)
    return [f"{whose}.", *(["(edge): the best rate was the last that was tried."] if edge else [])]


def _budget(summary: Summary) -> str:
    unequal = summary.unequal()
    text = (
        "Sampled tokens are those of optimisation, continuations included; what was drawn to "
        "pretrain the critic, once per seed for all arms that begin from it, stands beside them. "
        "Minutes are of optimisation, as long as the machine took with whatever else ran on it."
    )
    if not unequal:
        return f"{text} Budgets of optimisation are equal within 5 %."
    names = ", ".join(f"{arm.label} ({summary.budget(arm):.2f} ×)" for arm in unequal)
    return f"{text} **Budgets of optimisation are not equal** within 5 %: {names}."


def _tex(summary: Summary) -> str:
    head = f"% {summary.study.title}; scale {summary.scale}. Needs booktabs.\n"
    return head + latex(results_table(summary)) + "\n" + latex(cost_table(summary))
