"""Tables of a study in Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from segcredit.printable import number_text, printable
from segcredit.runlog.files import write_text_atomically
from segcredit_lab.analysis import Analysis
from segcredit_lab.analysis import write as write_figure
from segcredit_lab.analysis.reading import Table
from segcredit_lab.study.definition import corrections_of
from segcredit_lab.study.figures import figures
from segcredit_lab.study.store import LAST_STEPS, Measurement
from segcredit_lab.study.summary import ArmSummary, Estimate, Summary

DIGITS = 10
"""Significant digits in CSV."""


def results_table(summary: Summary) -> Table:
    """Make a table of the results in percent, next to the paper's numbers."""
    paper = summary.study.paper_columns
    reference = summary.reference
    rows = []
    for arm in summary.arms:
        against = arm.name != reference.name
        rows.append(
            (
                arm.label,
                _rate(arm),
                f"{len(arm.runs)}",
                percent_text(arm.of(lambda run: run.accuracy[0]), interval=False),
                percent_text(arm.of(lambda run: run.area)),
                percent_text(arm.against(reference, lambda run: run.area), "+") if against else "",
                percent_text(arm.of(lambda run: run.final)),
                percent_text(arm.against(reference, lambda run: run.final), "+") if against else "",
                *(_published(numbers.get(arm.name)) for numbers in paper.values()),
            )
        )
    than = f"− {summary.study.label(summary.study.reference)}"
    columns = ("", "rate", "seeds", "start", "mean over curve", than, "final", than)
    return Table((*columns, *(f"paper: {name}" for name in paper)), tuple(rows))


def cost_table(summary: Summary) -> Table:
    """Make a table of the cost and behavior of the runs."""

    def mean(arm: ArmSummary, name: str) -> float:
        return arm.of(attrgetter(name)).mean

    columns: tuple[tuple[str, Callable[[ArmSummary], float], str], ...] = (
        ("sampled tokens (M)", lambda arm: mean(arm, "tokens") / 1e6, ".3g"),
        ("× reference", summary.budget, ".2f"),
        ("to pretrain (M)", lambda arm: mean(arm, "pretraining_tokens") / 1e6, ".3g"),
        ("minutes", lambda arm: mean(arm, "seconds") / 60, ".2g"),
        ("clipped (%)", lambda arm: 100 * mean(arm, "clip_fraction"), ".2g"),
        ("explained variance, pretrained", lambda arm: mean(arm, "explained_before"), ".2f"),
        ("explained variance", lambda arm: mean(arm, "explained_variance"), ".2f"),
        ("tokens per segment", lambda arm: mean(arm, "segment_length"), ".3g"),
        ("entropy", lambda arm: mean(arm, "entropy"), ".2g"),
        ("length", lambda arm: mean(arm, "response_length"), ".3g"),
    )
    rows = tuple(
        (arm.label, *(number_text(value(arm), form) for _, value, form in columns))
        for arm in summary.arms
    )
    return Table(("", *(heading for heading, _, _ in columns)), rows)


_TRAINING: tuple[Callable[[Measurement], float], ...] = (
    lambda run: run.training_reward[0],
    lambda run: run.training_reward[1],
)


def sets_table(summary: Summary) -> Table:
    """Make a table of the results on each test set, and of the reward in training, in percent."""
    rows: list[tuple[str, ...]] = []
    for name in summary.sets:
        found = summary.of_set(name)
        for row in results_table(found).rows:
            rows.append((row[0], printable(name, 60), *row[3:8]))
    for arm in summary.arms:
        cells = []
        for read in _TRAINING:
            cells.append(percent_text(arm.of(read)))
            against = percent_text(arm.against(summary.reference, read), "+")
            cells.append(against if arm.name != summary.reference.name else "")
        rows.append((arm.label, "reward in training", "–", *cells))
    than = f"− {summary.study.label(summary.study.reference)}"
    columns = ("", "test set", "start", "mean over curve", than, "final", than)
    return Table(columns, tuple(rows))


def tuning_table(summary: Summary) -> Table:
    """Make a table of all learning rates tried and their results, in percent."""
    rows = []
    for arm in summary.arms if summary.study.tune == "each" else (summary.reference,):
        for rate in sorted({*arm.tuned.tried, *arm.tuned.failed}) if arm.tuned else ():
            assert arm.tuned is not None
            measured = arm.tuned.tried.get(rate, math.nan)
            marks = {
                "chosen": rate == arm.tuned.rate,
                "failed": rate in arm.tuned.failed,
                "loses accuracy": rate in arm.tuned.losing,
            }
            text = ", ".join(name for name, holds in marks.items() if holds)
            rows.append((arm.label, f"{rate:.3g}", number_text(100 * measured, ".1f"), text))
    return Table(("", "rate", "mean over curve", ""), tuple(rows))


def markdown(table: Table) -> str:
    """Format a table as Markdown."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---", *("---:" for _ in table.columns[1:])]
    return "\n".join([line(table.columns), line(rule), *(line(row) for row in table.rows)]) + "\n"


_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "−": "$-$",
    "±": "$\\pm$",
    "×": "$\\times$",
    "λ": "$\\lambda$",
    "…": "\\dots{}",
    "–": "--",
    "=": "$=$",
}


def latex(table: Table) -> str:
    """Format a table as LaTeX tabular with booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join("".join(_LATEX.get(x, x) for x in cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            line(table.columns),
            r"\midrule",
            *(line(row) for row in table.rows),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def arms_csv(summary: Summary) -> str:
    """Format one line per arm, without times, so that the same runs give the same bytes."""
    area, final = attrgetter("area"), attrgetter("final")
    return _csv(
        [
            {
                "study": summary.study.name,
                "scale": summary.scale,
                "arm": arm.name,
                "label": arm.label,
                "learning_rate": arm.tuned.rate if arm.tuned else None,
                "seeds": " ".join(str(seed) for seed in arm.runs),
                "corrections": " ".join(
                    x.name for x in corrections_of(summary.study.name, arm.name)
                ),
                "start": arm.of(lambda run: run.accuracy[0]).mean,
                **_columns("area", arm.of(area)),
                **_columns("area_difference", arm.against(summary.reference, area)),
                **_columns("final", arm.of(final)),
                **_columns("final_difference", arm.against(summary.reference, final)),
                "sampled_tokens": arm.of(lambda run: run.tokens).mean,
                "tokens_of_reference": summary.budget(arm),
                "pretraining_tokens": arm.of(lambda run: run.pretraining_tokens).mean,
                **{name: arm.of(attrgetter(name)).mean for name in _RECORDED},
                **{
                    f"paper: {column}": numbers.get(arm.name)
                    for column, numbers in summary.study.paper_columns.items()
                },
            }
            for arm in summary.arms
        ]
    )


_RECORDED = (
    *("clip_fraction", "explained_before", "explained_variance"),
    *("segment_length", "entropy", "response_length"),
)


def runs_csv(summary: Summary) -> str:
    """Format one line per run."""
    return _csv(
        [
            {
                "arm": arm.name,
                "seed": seed,
                "learning_rate": arm.tuned.rate if arm.tuned else None,
                "start": run.accuracy[0],
                "area": run.area,
                "final": run.final,
                "sampled_tokens": run.tokens,
                "pretraining_tokens": run.pretraining_tokens,
                **{name: getattr(run, name) for name in _RECORDED},
                "run": arm.folders[seed].name,
            }
            for arm in summary.arms
            for seed, run in arm.runs.items()
        ]
    )


def curves_csv(summary: Summary) -> str:
    """Format one line per evaluation."""
    return _csv(
        [
            {"arm": arm.name, "seed": seed, "step": step, summary.measure: value}
            for arm in summary.arms
            for seed, run in arm.runs.items()
            for step, value in zip(run.steps, run.accuracy, strict=True)
        ]
    )


def sets_csv(summary: Summary) -> str:
    """Format one line per evaluation and test set."""
    return _csv(
        [
            {"arm": arm.name, "seed": seed, "set": name, "step": step, summary.measure: value}
            for arm in summary.arms
            for seed, run in arm.runs.items()
            for name, curve in run.by_set.items()
            for step, value in zip(run.steps, curve, strict=True)
        ]
    )


def times_csv(summary: Summary) -> str:
    """Format the seconds of optimization of each run; they depend on the machine."""
    return _csv(
        [
            {"arm": arm.name, "seed": seed, "seconds": run.seconds}
            for arm in summary.arms
            for seed, run in arm.runs.items()
        ]
    )


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    file = io.StringIO()
    if rows:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(x) for key, x in row.items()})
    return file.getvalue()


def _cell(x: Any) -> Any:
    if isinstance(x, float):
        return f"{x:.{DIGITS}g}" if math.isfinite(x) else ""
    return "" if x is None else x


def _columns(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}


def percent_text(found: Estimate, sign: str = "", interval: bool = True) -> str:
    """Format a share as percent with its interval, 12.3 (10.1 … 14.5); a dash if undefined."""
    form = f"{sign}.1f"
    mean = number_text(100 * found.mean, form)
    if not interval or not math.isfinite(found.low):
        return mean
    low, high = (number_text(100 * x, form) for x in (found.low, found.high))
    return f"{mean} ({low} … {high})"


def _rate(arm: ArmSummary) -> str:
    if arm.tuned is None:
        return "–"
    return f"{arm.tuned.rate:.3g}" + (" (edge)" if arm.tuned.at_edge else "")


def _published(x: float | None) -> str:
    return "–" if x is None else number_text(x, ".1f")


MEASURE = (
    "The measure is held-out accuracy of sampled responses: its mean over the curve (the area "
    "under it by trapezoids, divided by the steps), and its last value. Numbers are percent, with "
    "the 95 % interval by Student's t over seeds in parentheses. Differences are paired by seed: "
    "all arms of a seed start from the same warm start."
)


def _measure_text(summary: Summary) -> str:
    if summary.measure == "accuracy":
        return MEASURE
    return MEASURE.replace(
        "held-out accuracy of sampled responses",
        f"held-out {summary.measure} of sampled responses (the reward does not report "
        f"correctness, so there is no accuracy)",
    ).replace("Numbers are percent", "Numbers are multiplied by 100")


def write_study(summary: Summary, folder: Path) -> list[str]:
    """Write all tables, curves and figures; return why some could not be drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    made, lacking = figures(summary)
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
    if summary.sets:
        texts["sets.csv"] = sets_csv(summary)
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
        *_by_set(summary),
        "## Cost and behavior",
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


def _by_set(summary: Summary) -> list[str]:
    """Return the table of test sets, if there are several."""
    if not summary.sets:
        return []
    return [
        "## Test sets",
        markdown(sets_table(summary)),
        "The table above pools all prompts. The reward in training is the mean over all "
        f"optimization steps, and over the last {LAST_STEPS}.",
    ]


def _incomplete(summary: Summary) -> list[str]:
    """Return the missing and failed runs."""
    parts = []
    missing = sum(len(arm.missing) for arm in summary.arms)
    if missing:
        total = len(summary.arms) * len(summary.seeds)
        parts.append(f"**Incomplete: {missing} of {total} runs are missing.**")
    if summary.failed:
        lines = [f"- {name}: {' '.join(why.split())}" for name, why in summary.failed.items()]
        parts.append("\n".join(["Failed:", "", *lines]))
    return parts


def _tuning_text(summary: Summary) -> list[str]:
    if not summary.measure_tuned:
        return ["Learning rates are those of the recipes."]
    whose = (
        "Each arm's learning rate was tuned with the same budget, on other seeds"
        if summary.study.tune == "each"
        else f"All arms use the learning rate that was tuned for "
        f"{summary.study.label(summary.study.reference)}, on other seeds"
    )
    rule = [summary.rule.text, *_losing_runs(summary)] if summary.rule.text else []
    edge = any(arm.tuned is not None and arm.tuned.at_edge for arm in summary.arms)
    return [
        f"{whose}.",
        *rule,
        *(["(edge): the best rate was the smallest or largest one tried."] if edge else []),
    ]


def _losing_runs(summary: Summary) -> list[str]:
    """List runs that lose accuracy. The rule checked only tuning runs, which may be shorter."""
    found = [
        f"{arm.label} (seed {seed})"
        for arm in summary.arms
        for seed, run in arm.runs.items()
        if summary.rule.loses(run)
    ]
    return [f"Runs of the table that lose accuracy by this measure: {', '.join(found) or 'none'}."]


def _budget(summary: Summary) -> str:
    unequal = summary.unequal()
    text = (
        "Sampled tokens are those of optimization, including continuations. Tokens sampled to "
        "pretrain the critic, once per seed for all arms that start from it, are listed next to "
        "them. Minutes are the wall-clock time of optimization; other work may have run on the "
        "machine."
    )
    if not unequal:
        return f"{text} Budgets of optimization are equal within 5 %."
    names = ", ".join(f"{arm.label} ({summary.budget(arm):.2f} ×)" for arm in unequal)
    return f"{text} **Budgets of optimization are not equal** within 5 %: {names}."


def _tex(summary: Summary) -> str:
    head = f"% {summary.study.title}; scale {summary.scale}. Needs booktabs.\n"
    return head + latex(results_table(summary)) + "\n" + latex(cost_table(summary))
