"""How a study's runs are shown while they run: a live table on a terminal, lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from segcredit.printable import printable
from segcredit.study.execute import RunState, States

REDRAW = 0.5
"""Seconds between two pictures of the table."""
MOST = 24
"""Rows of the table: running ones, then failed ones, then those that wait."""
COLOURS = {"running": "cyan", "elsewhere": "yellow", "done": "green", "failed": "red"}


class Lines:
    """One line for each run that begins or ends."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> "Lines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def changed(self, states: States, state: RunState, event: str) -> None:
        """Tell of beginnings and ends."""
        if event not in ("begun", "elsewhere", "done", "failed", "gone", "stopped"):
            return
        ended = states.count("done", "failed")
        said = f"[{ended}/{len(states.runs)}] {state.planned.name}: {said_of(state)}"
        self.console.print(said, markup=False, highlight=False, soft_wrap=True)

    def tick(self, states: States) -> None:
        """Nothing to say."""


class LiveTable(Lines):
    """A table that is drawn again and again; failures stay above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "LiveTable":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def changed(self, states: States, state: RunState, event: str) -> None:
        """Say what failed at once; the rest is in the table."""
        if state.status == "failed":
            text = Text(f"{state.planned.name}: {said_of(state)}", style="red")
            self._live.console.print(text, soft_wrap=True)
        self.tick(states)

    def tick(self, states: States) -> None:
        """Draw, if it is time."""
        if time.monotonic() - self._drawn > REDRAW:
            self._drawn = time.monotonic()
            self._live.update(table_of(states), refresh=True)


def table_of(states: States) -> RenderableType:
    """The runs that someone waits for, and how many there are of each kind."""
    kinds = ("running", "elsewhere", "failed", "waiting", "stopped", "done")
    counts = {kind: sum(x.status == kind for x in states.runs.values()) for kind in kinds}
    caption = ", ".join(f"{num} {kind}" for kind, num in counts.items() if num)
    if states.stopping:
        caption += "; finishing these steps, then saving (Ctrl-C again: at once)"
    table = Table(caption=caption, caption_justify="left")
    for name in ("run", "seed", "", "step", "held out"):
        table.add_column(name, justify="right" if name in ("seed", "step", "held out") else "left")
    rows = sorted(states.runs.values(), key=lambda x: kinds.index(x.status))
    for state in rows[:MOST]:
        planned = state.planned
        what = planned.arm if planned.kind == "run" else f"{planned.kind} {planned.arm}"
        table.add_row(
            Text(what),
            str(planned.seed),
            Text(state.status, style=COLOURS.get(state.status, "")),
            f"{state.step}/{state.total}" if state.step or state.status == "running" else "",
            _held_out(state),
        )
    return table


def _held_out(state: RunState) -> str:
    """Format the accuracy, or the mean reward if correctness is not reported."""
    if state.accuracy is not None:
        return f"accuracy {state.accuracy:.1%}"
    return "" if state.reward is None else f"reward {state.reward:.3f}"


def said_of(state: RunState) -> str:
    """In a few words."""
    if state.status == "failed":
        return f"failed: {printable(' '.join(state.message.split()), 600)}"
    if state.status == "elsewhere":
        return "another process is writing it; waiting for that"
    found = _held_out(state)
    accuracy = f", held-out {found}" if found else ""
    if state.status == "running":
        return "running"
    return f"{state.status}, step {state.step}/{state.total}{accuracy}"


def watcher(console: Console) -> Lines:
    """What fits the terminal, or the lack of one."""
    return LiveTable(console) if console.is_terminal else Lines(console)
