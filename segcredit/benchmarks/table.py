"""Tables of scores in the layout of the paper, with the paper's numbers, in four formats."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

import yaml

from segcredit.benchmarks.benchmark import BENCHMARKS, Score
from segcredit.printable import one_line
from segcredit.registry import nearest

TEXT = ("gsm8k", "math500")
"""Text-only sets; the paper shows their results in a figure."""
NONE = "–"


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: sets, and rows of accuracies in percent."""

    number: int
    title: str
    columns: tuple[str, ...]
    average: bool
    rows: Mapping[str, tuple[float, ...]]
    """With an average, it is the last number."""


@cache
def paper_tables() -> dict[int, PaperTable]:
    """Load the numbers of the paper's Tables 1 to 6."""
    text = (files("segcredit.benchmarks") / "paper.yaml").read_text(encoding="utf-8")
    return {
        number: PaperTable(
            number,
            x["title"],
            tuple(x["columns"]),
            x["average"],
            {name: tuple(values) for name, values in x["rows"].items()},
        )
        for number, x in yaml.safe_load(text).items()
    }


def set_names(wanted: Sequence[str]) -> list[str]:
    """Replace ``paper``, ``table1`` … ``table6`` and ``text`` by the names of their sets."""
    groups = {f"table{x.number}": x.columns for x in paper_tables().values()}
    groups |= {"paper": tuple(BENCHMARKS), "text": TEXT}
    found: list[str] = []
    for name in (part for x in wanted for part in x.split(",") if part):
        try:
            found += groups.get(name) or (BENCHMARKS.check_name(name),)
        except ValueError:
            raise ValueError(
                f"unknown set {one_line(name)!r}.{nearest(name, [*BENCHMARKS, *groups])} The sets "
                f"are: {', '.join(BENCHMARKS)}; or several: {', '.join(groups)}. Write your own "
                f"as 'file.py:Name' (docs/extending.md)."
            ) from None
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class ModelScores:
    """Scores of one model: for each set all metrics, the main one first."""

    model: str
    scores: Mapping[str, Mapping[str, Score]]
    note: str = ""
    """Note on these numbers, added to the model's name in the table."""

    def main(self, name: str) -> Score | None:
        """Return the score that the paper reports; None if the set was not run."""
        metrics = self.scores.get(name)
        return None if not metrics else next(iter(metrics.values()))


@dataclass(frozen=True)
class TableRow:
    """A row of a table; None where a set was not run."""

    name: str
    values: tuple[float | None, ...]
    """Percent, one per column, then the average."""
    intervals: tuple[tuple[float, float] | None, ...]
    """95 % confidence intervals of our own scores."""
    paper: bool = False
    """Whether these are numbers of the paper."""


@dataclass(frozen=True)
class Table:
    """One table: our models, then the rows of the paper."""

    number: int | None
    """Number of the paper's table; None: sets that are in none."""
    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]

    @property
    def caption(self) -> str:
        """The title, with the number that the paper gives it."""
        return self.title if self.number is None else f"Table {self.number}: {self.title}"


def title(name: str) -> str:
    """Return the title of a built-in set; the name of any other."""
    return BENCHMARKS[name].title if name in BENCHMARKS else name


def make_tables(results: Sequence[ModelScores], numbers: Sequence[int] = ()) -> list[Table]:
    """Make the tables of the paper for which some set was run, and one for all other sets.

    Args:
        numbers: Tables of the paper. Empty: Table 1 and Table 4, which have all its sets.
    """
    measured = list(dict.fromkeys(name for x in results for name in x.scores))
    tables = []
    for number in numbers or (1, 4):
        paper = paper_tables()[number]
        if set(paper.columns) & set(measured):
            tables.append(_paper_layout(paper, results))
    used = {name for table in tables for name in paper_tables()[table.number or 1].columns}
    if rest := [name for name in measured if name not in used]:
        columns = tuple(title(name) for name in rest)
        rows = tuple(_row(x, rest, average=False) for x in results)
        tables.append(Table(None, "Other sets", columns, rows))
    return tables


def _paper_layout(paper: PaperTable, results: Sequence[ModelScores]) -> Table:
    rows = [_row(x, paper.columns, paper.average) for x in results]
    for name, values in paper.rows.items():
        rows.append(TableRow(name, values, (), paper=True))
    columns = [title(x) for x in paper.columns] + ["Avg."] * paper.average
    return Table(paper.number, paper.title, tuple(columns), tuple(rows))


def _row(result: ModelScores, columns: Sequence[str], average: bool) -> TableRow:
    """Make a row; the average needs all sets."""
    scores = [result.main(name) for name in columns]
    values = [None if x is None else x.value for x in scores]
    intervals = [None if x is None or math.isnan(x.low) else (x.low, x.high) for x in scores]
    if average:
        known = [x for x in values if x is not None]
        values.append(sum(known) / len(known) if len(known) == len(values) else None)
        intervals.append(None)
    name = f"{result.model} ({result.note})" if result.note else result.model
    return TableRow(name, tuple(values), tuple(intervals))


def markdown(tables: Sequence[Table]) -> str:
    """Write tables as Markdown."""
    parts = []
    for table in tables:
        lines = [f"**{table.caption}**", ""]
        lines.append(f"| Model | {' | '.join(_cell(x) for x in table.columns)} |")
        lines.append(f"|---|{'---:|' * len(table.columns)}")
        for row in table.rows:
            name = _cell(row.name) + (" *(paper)*" if row.paper else "")
            lines.append(f"| {name} | {' | '.join(percent_text(x) for x in row.values)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """Write tables as LaTeX, with the rules of the package booktabs."""
    parts = []
    for table in tables:
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_escaped(table.title)}}}",  # LaTeX numbers its tables
            rf"  \begin{{tabular}}{{l{'c' * len(table.columns)}}}",
            r"    \toprule",
            rf"    Model & {' & '.join(_escaped(x) for x in table.columns)} \\",
            r"    \midrule",
        ]
        before = False
        for row in table.rows:
            if row.paper and not before:
                lines.append(r"    \midrule")
            before = row.paper
            name = _escaped(row.name) + (" (paper)" if row.paper else "")
            values = " & ".join("--" if x is None else f"{x:.2f}" for x in row.values)
            lines.append(rf"    {name} & {values} \\")
        lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def comma_separated(tables: Sequence[Table]) -> str:
    """Write all tables as CSV, one line per score."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["table", "model", "source", "column", "score", "low", "high"])
    for table in tables:
        for row in table.rows:
            intervals = row.intervals or (None,) * len(row.values)
            cells = zip(table.columns, row.values, intervals, strict=True)
            for column, value, interval in cells:
                if value is None:
                    continue
                ends = ["", ""] if interval is None else [f"{x:.4f}" for x in interval]
                source = "paper" if row.paper else "measured"
                start = ["" if table.number is None else table.number, one_line(row.name)]
                writer.writerow([*start, source, column, f"{value:.4f}", *ends])
    return file.getvalue()


def as_json(tables: Sequence[Table]) -> str:
    """Write tables as JSON."""
    return json.dumps([asdict(x) for x in tables], indent=2) + "\n"


FORMATS = {"md": markdown, "tex": latex, "csv": comma_separated, "json": as_json}
"""Functions that write tables, by file suffix."""


def percent_text(x: float | None) -> str:
    """Write a score, or a dash if there is none."""
    return NONE if x is None else f"{x:.2f}"


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")


def _escaped(text: str) -> str:
    marks = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    plain = one_line(text)
    return "".join(marks.get(x, f"\\{x}" if x in "&%$#_{}" else x) for x in plain)
