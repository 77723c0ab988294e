"""Show the progress of a run in a terminal, a notebook or a file: steps, time and metrics."""

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
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

from segcredit.config import Recipe
from segcredit.evaluate import Evaluation
from segcredit.printable import METRIC_FORMS, STAGE_NAMES, change_texts

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
QUIET_SECONDS = 15.0
"""Seconds between two lines of output if it does not go to a terminal."""


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
        self.progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[numbers]}"),
            console=console,
        )

    def begin(self, recipe: Recipe, step: int, facts: dict[str, str]) -> None:
        self.run = Path(facts["run"])
        for name, fact in facts.items():
            self.console.print(f"[dim]{name:<6}[/dim]  {escape(fact)}", highlight=False)
        if step:
            self.console.print(f"Resuming after step {step} of {recipe.total_steps}.")
        if self.live:
            self.progress.start()

    def stage(self, number: int, name: str, steps: int, done: int) -> None:
        self._total, self._done = steps, done
        self._title = f"{number + 1} {STAGE_NAMES.get(name, name)}"
        if self.live:
            self._bar = self.progress.add_task(self._title, total=steps, completed=done, numbers="")
        else:
            self.console.print(f"{self._title}: {steps} steps")
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
        asked = f"[dim]({evaluation.prompts} prompts)[/dim]"
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
        self.console.print(
            f"[dim]{place}:[/dim] held-out {measure} sampled "
            f"[bold]{sampled:{form}}[/bold]{beside} {asked}"
        )

    def note(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False, highlight=False)

    def end(self) -> None:
        if self.live:
            self.progress.stop()


class PythonProgress(Terminal):
    """Shows the progress of ``Trainer.train``; notes become Python warnings, as with ``Silent``."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True, soft_wrap=True))  # stdout is the script's own

    def note(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)


def result_table(result: "Result") -> Table | None:
    """Make a table of held-out results before and after training."""
    if not result.before or not result.after:
        return None
    known = "sampled" in result.before and "sampled" in result.after
    title = "Held-out accuracy" if known else "Held-out reward"  # correctness not reported
    table = Table(title=title, title_justify="left")
    for name in ("", "before", "after", "gain"):
        table.add_column(name, justify="left" if not name else "right")
    for how, key in (("sampled", "reward"), ("greedy", "greedy_reward")):
        key = how if known else key
        if key in result.before and key in result.after:
            table.add_row(how, *change_texts(result.before[key], result.after[key], known))
    return table
