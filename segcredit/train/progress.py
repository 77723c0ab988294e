"""Show progress, metrics and result of a run in a terminal, a notebook or a file."""

import html
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rich.console import Console, Group, RenderableType
from rich.jupyter import JupyterMixin
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from segcredit.config import Recipe
from segcredit.evaluate import Evaluation
from segcredit.printable import METRIC_FORMS, change_texts, stage_title, stage_title_and_key
from segcredit.runlog import resume_command
from segcredit.train.loop import warn_caller

if TYPE_CHECKING:
    from segcredit.train.trainer import Result

SHOWN_METRICS = (
    ("nll", "nll"),
    ("accuracy", "accuracy"),
    ("reward", "reward"),
    ("entropy", "entropy"),
    ("response_length", "length"),
    ("explained_variance", "critic"),
    ("tokens_per_second", "tok/s"),
)
COLUMNS = ("", "before", "after", "gain")
"""Columns of the table of held-out results."""
QUIET_SECONDS = 15.0
"""Seconds between two lines of output if it does not go to a terminal."""


class Bars(Progress):
    """Progress bars with the newest metrics of each stage: on a line of their own, which fits."""

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            yield self.make_tasks_table([task])
            if numbers := task.fields["numbers"]:
                yield Text(f"  {numbers}", style="dim")


class Terminal:
    """Draws a progress bar per stage on a terminal; writes lines at intervals to a file or pipe."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self._last_line = 0.0
        self._title = ""
        self._total = 0
        self._done = 0
        self._bar: TaskID | None = None
        self.run: Path | None = None
        """Run directory, once the run has started."""
        self.progress = Bars(
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        self.run = Path(facts["run"])
        for name, fact in facts.items():
            self._print(f"[dim]{name:<7}[/dim] {escape(fact)}", highlight=False)
        if step and step == recipe.total_steps:
            last = len(recipe.stages) - 1
            more = f"stages.{last}.steps={2 * recipe.stages[last].steps}"
            self._print(
                f"This run is complete ({step} of {step} steps). To train further, type: "
                f"{escape(resume_command(self.run, more))}",
                highlight=False,
            )
        elif step:
            self._print(f"Resuming after step {step} of {recipe.total_steps}.")
        if self.live:
            self._start()

    def _start(self) -> None:
        """Show the progress bars, which update themselves."""
        self.progress.start()

    def stage(self, number: int, name: str, steps: int, done: int) -> None:
        self._total, self._done = steps, done
        self._title = stage_title(number, name)
        if self.live:
            self._bar = self.progress.add_task(self._title, total=steps, completed=done, numbers="")
        else:
            title = stage_title_and_key(number, name)
            self.console.print(f"{title}: {steps} step{'s' * (steps != 1)}")
            self._last_line = time.monotonic()

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        self._done += 1
        numbers = "  ".join(
            f"{label} {metrics[key]:{METRIC_FORMS[key]}}"
            for key, label in SHOWN_METRICS
            if key in metrics
        )
        if metrics.get("no_verdict"):
            numbers += f"  no verdict {metrics['no_verdict']:{METRIC_FORMS['no_verdict']}}"
        if self.live and self._bar is not None:
            self.progress.update(self._bar, completed=self._done, numbers=numbers)
        elif time.monotonic() - self._last_line > QUIET_SECONDS or self._done == self._total:
            self.console.print(f"  {self._done}/{self._total}  {numbers}")
            self._last_line = time.monotonic()
        if metrics.get("policy/refused") or metrics.get("critic/refused"):
            self.note("a gradient was not finite: that update was skipped")

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        asked = f"[dim]({evaluation.prompts} prompt{'s' * (evaluation.prompts != 1)})[/dim]"
        if evaluation.sampled is None:
            measure, form = "reward", METRIC_FORMS["reward"]
            sampled, greedy = evaluation.reward, evaluation.greedy_reward
        else:
            measure, form = "accuracy", METRIC_FORMS["sampled"]
            sampled, greedy = evaluation.sampled, evaluation.greedy
        beside = "" if greedy is None else f", greedy {greedy:{form}}"
        if evaluation.no_verdict:
            beside += f", no verdict {evaluation.no_verdict:{METRIC_FORMS['no_verdict']}}"
        place = f"{self._title}, step {self._done}/{self._total}" if self._title else f"step {step}"
        self._print(
            f"[dim]{place}:[/dim] held-out {measure} sampled "
            f"[bold]{sampled:{form}}[/bold]{beside} {asked}"
        )

    def _print(self, line: str, highlight: bool = True) -> None:
        """Print a line with markup above the progress bars."""
        self.console.print(line, highlight=highlight)

    def saved(self, step: int, path: Path) -> None: ...

    def stop_reason(self) -> str | None:
        return None

    def note(self, text: str) -> None:
        whole_words = self.live  # a terminal would break lines inside words; a file keeps the line
        self.console.print(
            text, style="yellow", markup=False, highlight=False, soft_wrap=not whole_words
        )

    def end(self) -> None:
        if self.live:
            self.progress.stop()


class PythonProgress(Terminal):
    """Shows the progress of ``Trainer.train``; notes become Python warnings, as with ``Silent``."""

    def __init__(self, console: Console | None = None) -> None:
        # stdout is the script's own
        super().__init__(Console(stderr=True, soft_wrap=True) if console is None else console)

    def note(self, text: str) -> None:
        warn_caller(text)

    def show_result(self, result: "Result") -> None:
        """Print the table of held-out results and the paths of the run."""
        if result.stopped is not None:
            self.console.print(f"stopped: {result.stopped}", markup=False, highlight=False)
        if (table := result_table(result)) is not None:
            self.console.print(table)
        lines = [f"{name:<6}  {path}" for name, path in result.paths().items()]
        self.console.print("\n".join(lines), markup=False, highlight=False)


class NotebookProgress(PythonProgress, JupyterMixin):
    """Shows the progress in a notebook: one output that is updated in place.

    rich updates its own bars only with ipywidgets, so this uses IPython's display handle. Notes are
    part of the output.
    """

    SHOWN = 12
    """Number of lines to keep below the bars: the newest evaluations."""
    SECONDS = 0.2
    """Seconds between two updates."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self.live = True
        self._handle: Any = None
        self._facts: list[str] = []
        self._notes: list[str] = []
        self._lines: list[str] = []
        self._updated = 0.0

    def __rich__(self) -> Group:
        above, below = (
            [Text.from_markup(line) for line in lines]
            for lines in (self._facts, [*self._notes, *self._lines])
        )
        return Group(*above, self.progress.get_renderable(), *below)

    def _start(self) -> None:
        from IPython.display import display

        self._handle = display(self, display_id=True)  # type: ignore[no-untyped-call]

    def _print(self, line: str, highlight: bool = True) -> None:
        if self._handle is None:
            self._facts.append(line)
            return
        self._lines = [*self._lines, line][-self.SHOWN :]
        self._update()

    def stage(self, number: int, name: str, steps: int, done: int) -> None:
        super().stage(number, name, steps, done)
        self._update()

    def stepped(self, step: int, stage: str, metrics: dict[str, float]) -> None:
        super().stepped(step, stage, metrics)
        if time.monotonic() - self._updated > self.SECONDS:
            self._update()

    def note(self, text: str) -> None:
        self._notes.append(f"[yellow]{escape(text)}[/yellow]")
        self._update()

    def end(self) -> None:
        self._update()

    def _update(self) -> None:
        if self._handle is not None:  # the run has started
            self._updated = time.monotonic()
            self._handle.update(self)


def python_progress() -> PythonProgress:
    """Return the progress display for a notebook or for a script."""
    progress = PythonProgress()
    return NotebookProgress() if progress.console.is_jupyter else progress


def result_rows(result: "Result") -> tuple[str, list[tuple[str, ...]]]:
    """Return a title, and held-out results before and after training with their difference."""
    known = "sampled" in result.before and "sampled" in result.after
    title = "Held-out accuracy" if known else "Held-out reward"  # correctness not reported
    if result.prompts is not None:
        title += f", {result.prompts:,} prompt{'s' * (result.prompts != 1)}"
    rows: list[tuple[str, ...]] = []
    for how, key in (("sampled", "reward"), ("greedy", "greedy_reward")):
        key = how if known else key
        if key in result.before and key in result.after:
            old, new, change = change_texts(result.before[key], result.after[key], known)
            unclear = " (within noise)" if key in result.noise else ""
            rows.append((how, old, new, change + unclear))
    return title, rows


def result_table(result: "Result") -> Table | None:
    """Make a table of held-out results before and after training."""
    if not result.before or not result.after:
        return None
    title, rows = result_rows(result)
    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        table.add_row(*row)
    return table


def result_page(result: "Result") -> str:
    """Show a result in a notebook: held-out results before and after, and the paths of the run."""
    parts = []
    if result.stopped is not None:
        parts.append(f"<p>Stopped: {html.escape(result.stopped)}</p>")
    title, rows = result_rows(result)
    if rows:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>" for row in rows
        )
        parts.append(
            f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )
    for name, path in result.paths().items():
        shown = f"<code>{html.escape(str(path))}</code>"
        if name == "report":
            shown = f'<a href="{html.escape(_link(path))}" target="_blank">{shown}</a>'
        parts.append(f"<div>{name}: {shown}</div>")
    return f"<div>{''.join(parts)}</div>"


class MetricsTable(list[dict[str, Any]]):
    """Lines of metrics.jsonl; a notebook shows the newest of them with a column per metric."""

    SHOWN = 50

    def _repr_html_(self) -> str:
        rows = self[-self.SHOWN :]
        names = list(dict.fromkeys(name for row in rows for name in row))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(row.get(name, ''))}</td>" for name in names) + "</tr>"
            for row in rows
        )
        left_out = len(self) - len(rows)
        above = f"<caption>The first {left_out:,} lines are not shown.</caption>" * (left_out > 0)
        return (
            f"<div style='overflow-x: auto'><table>{above}<thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text)


def _link(path: Path) -> str:
    """Return a link: relative to the notebook's folder, because Jupyter refuses file addresses."""
    here = Path.cwd()
    inside = path.is_relative_to(here)
    return quote(path.relative_to(here).as_posix()) if inside else path.as_uri()
