"""A study's numbers as Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from segcredit.analysis.result import Table
from segcredit.printable import number_text
from segcredit.study.definition import corrections_of
from segcredit.study.summary import ArmSummary, Estimate, Summary

DIGITS = 10
"""Of numbers in CSV."""


def results_table(summary: Summary) -> Table:
    """What was measured, in per cent, with the paper's numbers beside it."""
    published = summary.study.published
    paper = published.columns if published else {}
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
    """What it took, and how the runs behaved."""
    rows = []
    for arm in summary.arms:
        rows.append(
            (
                arm.label,
                number_text(arm.of(lambda run: run.tokens).mean / 1e6, ".3g"),
                number_text(summary.budget(arm), ".2f"),
                number_text(arm.of(lambda run: run.pretraining_tokens).mean / 1e6, ".3g"),
                number_text(arm.of(lambda run: run.seconds).mean / 60, ".2g"),
                number_text(100 * arm.of(lambda run: run.clip_fraction).mean, ".2g"),
                number_text(arm.of(lambda run: run.explained_before).mean, ".2f"),
                number_text(arm.of(lambda run: run.explained_variance).mean, ".2f"),
                number_text(arm.of(lambda run: run.segment_length).mean, ".3g"),
                number_text(arm.of(lambda run: run.entropy).mean, ".2g"),
                number_text(arm.of(lambda run: run.response_length).mean, ".3g"),
            )
        )
    columns = (
        *("", "sampled tokens (M)", "× reference", "to pretrain (M)", "minutes"),
        *(
            "clipped (%)",
            "explained variance, pretrained",
            "explained variance",
            "tokens per segment",
        ),
        *("entropy", "length"),
    )
    return Table(columns, tuple(rows))


def tuning_table(summary: Summary) -> Table:
    """Every rate that was tried, and the measure there, in per cent."""
    rows = []
    for arm in summary.arms if summary.study.tune == "each" else (summary.reference,):
        for rate in sorted({*arm.tuned.tried, *arm.tuned.failed}) if arm.tuned else ():
            assert arm.tuned is not None
            measured = arm.tuned.tried.get(rate, math.nan)
            failed = "failed" if rate in arm.tuned.failed else ""
            chosen = "chosen" if rate == arm.tuned.rate else failed
            rows.append((arm.label, f"{rate:.3g}", number_text(100 * measured, ".1f"), chosen))
    return Table(("", "rate", "mean over curve", ""), tuple(rows))


def markdown(table: Table) -> str:
    """A table of Markdown."""

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
    """A tabular in the manner of booktabs."""

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
    """One line per arm; no times, so that the same runs give the same bytes."""
    rows = []
    for arm in summary.arms:
        row: dict[str, Any] = {
            "study": summary.study.name,
            "scale": summary.scale,
            "arm": arm.name,
            "label": arm.label,
            "learning_rate": arm.tuned.rate if arm.tuned else None,
            "seeds": " ".join(str(seed) for seed in arm.runs),
            "corrections": " ".join(x.name for x in corrections_of(summary.study.name, arm.name)),
            "start": arm.of(lambda run: run.accuracy[0]).mean,
        }
        for name in ("area", "final"):
            row |= _columns(name, arm.of(attrgetter(name)))
            against = arm.against(summary.reference, attrgetter(name))
            row |= _columns(f"{name}_difference", against)
        row |= {"sampled_tokens": arm.of(lambda run: run.tokens).mean}
        row |= {"tokens_of_reference": summary.budget(arm)}
        row |= {"pretraining_tokens": arm.of(lambda run: run.pretraining_tokens).mean}
        for name in _RECORDED:
            row[name] = arm.of(attrgetter(name)).mean
        for column, numbers in (
            summary.study.published.columns if summary.study.published else {}
        ).items():
            row[f"paper: {column}"] = numbers.get(arm.name)
        rows.append(row)
    return _csv(rows)


_RECORDED = (
    *("clip_fraction", "explained_before", "explained_variance"),
    *("segment_length", "entropy", "response_length"),
)


def runs_csv(summary: Summary) -> str:
    """One line per run."""
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
    """One line per evaluation."""
    return _csv(
        [
            {"arm": arm.name, "seed": seed, "step": step, summary.measure: value}
            for arm in summary.arms
            for seed, run in arm.runs.items()
            for step, value in zip(run.steps, run.accuracy, strict=True)
        ]
    )


def times_csv(summary: Summary) -> str:
    """Seconds of optimisation, which no two machines share."""
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
    """12.3 (10.1 … 14.5), of shares; a dash where there is nothing."""
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
