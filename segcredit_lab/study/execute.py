"""Execute the runs of some studies: start missing runs, resume unfinished ones, show progress."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, runtime_checkable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from segcredit.printable import printable
from segcredit_lab.study.store import Store, StudyPlan, StudyRun
from segcredit_lab.study.workers import Order, WorkerPool

Status = Literal["waiting", "running", "elsewhere", "done", "failed", "stopped"]
START_FAILED = "its start failed: "
MOMENT = 0.25
"""Seconds between two updates of the display."""


@dataclass
class RunState:
    """Progress of a run."""

    run: StudyRun
    status: Status = "waiting"
    step: int = 0
    total: int = 0
    accuracy: float | None = None
    """Held-out accuracy; None: no evaluation yet, or the reward does not report correctness."""
    reward: float | None = None
    """Held-out reward at the last evaluation."""
    message: str = ""
    """Why it failed."""


@runtime_checkable
class Display(Protocol):
    """Shows the progress of runs."""

    def changed(self, states: "RunStates", state: RunState, event: str) -> None:
        """Called after an event of a run."""
        ...

    def tick(self, states: "RunStates") -> None:
        """Called periodically."""
        ...


@dataclass
class RunStates:
    """State of every run, by the digest of its recipe, and whether the user asked to stop."""

    runs: dict[str, RunState] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    """Digests of runs from which others will start whose learning rate is not tuned yet."""
    stopping: bool = False

    @property
    def failed(self) -> dict[str, str]:
        """Digests of failed runs and reasons."""
        return {key: x.message for key, x in self.runs.items() if x.status == "failed"}

    def count(self, *statuses: Status) -> int:
        """Count the runs with one of these statuses."""
        return sum(x.status in statuses for x in self.runs.values())


def execute(
    plans: Sequence[StudyPlan], store: Store, jobs: int, logs: Path, display: Display
) -> RunStates:
    """Run everything that can run. Ctrl-C lets current steps finish and saves checkpoints."""
    states, pool = RunStates(), WorkerPool(jobs, logs)
    _add_known_runs(states, plans, store)
    stopped = False
    with _interrupts(states):
        try:
            while True:
                if not states.stopping:
                    _begin(states, pool, store, display)
                elif not stopped:
                    stopped = True
                    pool.stop()
                if pool.free == pool.jobs:
                    return states
                _handle_events(states, pool, plans, store, display)
        finally:
            pool.close()


def recorded(plans: Sequence[StudyPlan], store: Store) -> RunStates:
    """Read the status of all runs without running anything."""
    states = RunStates()
    while True:  # after a failed rate another one is chosen, which adds runs
        _add_known_runs(states, plans, store)
        failed = [
            (state, why)
            for state in states.runs.values()
            if state.status == "waiting" and (why := store.failure(state.run)) is not None
        ]
        if not failed:
            return states
        for state, why in failed:
            state.status, state.message = "failed", why


@contextmanager
def _interrupts(states: RunStates) -> Iterator[None]:
    """Stop after the current steps at the first Ctrl-C, at once at the second."""

    def handle(number: int, frame: FrameType | None) -> None:
        if states.stopping:
            raise KeyboardInterrupt
        states.stopping = True

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, handle) for number in numbers]
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _add_known_runs(states: RunStates, plans: Sequence[StudyPlan], store: Store) -> None:
    """Add runs that became known, such as those whose learning rate has been tuned.

    Runs are ordered by study, regardless of when they became known.
    """
    failed = states.failed
    states.early = {start.digest for plan in plans for start in plan.early(failed)}
    found: dict[str, RunState] = {}
    for plan in plans:
        for run in [*plan.runs(failed), *plan.early(failed)]:
            if run.digest not in found:
                found[run.digest] = states.runs.get(run.digest) or _state(run, store)
    states.runs = found | {key: x for key, x in states.runs.items() if key not in found}


def _state(run: StudyRun, store: Store) -> RunState:
    return RunState(run, "done" if store.finished(run) else "waiting", total=run.steps)


def _begin(states: RunStates, pool: WorkerPool, store: Store, display: Display) -> None:
    """Start as many runs as the pool has free processes, if their starting runs are finished."""
    wanted = _wanted_starts(states, store)
    for state in [*states.runs.values()]:
        run = state.run
        idle = run.kind == "warm" and run.digest not in wanted
        if state.status != "waiting" or idle or not pool.free:
            continue
        before = None if run.start is None else states.runs[run.start.digest]
        if before is not None and before.status == "failed":
            reason = before.message.removeprefix(START_FAILED)
            state.status, state.message = "failed", START_FAILED + reason
            display.changed(states, state, "failed")
        elif before is None or before.status == "done":
            recipe = store.recipe(run).as_dict()
            order = Order(run.digest, recipe, store.folder(run), run.keeps)
            state.status = "running"
            store.forget_failure(run)
            display.changed(states, state, "begun")
            pool.begin(order)


def _wanted_starts(states: RunStates, store: Store) -> set[str]:
    """Find the starting runs that other runs wait for; those with deleted models run again."""
    runs = states.runs
    wanted: set[str] = set()
    asking = [x.run for x in runs.values() if x.status == "waiting" and x.run.kind != "warm"]
    asking += [runs[digest].run for digest in states.early if runs[digest].status == "waiting"]
    while asking:
        start = asking.pop().start
        if start is None or start.digest in wanted:
            continue
        wanted.add(start.digest)
        state = runs[start.digest]
        if state.status == "done" and not store.has_models(start):
            store.reopen(start)
            state.status = "waiting"
        if state.status == "waiting":
            asking.append(start)
    return wanted | states.early


def _handle_events(
    states: RunStates, pool: WorkerPool, plans: Sequence[StudyPlan], store: Store, display: Display
) -> None:
    for order, event in pool.events(MOMENT):
        state, what = states.runs[order.name], event["event"]
        if what == "step":
            state.status, state.step, state.total = "running", event["step"], event["total"]
        elif what == "evaluated":
            state.accuracy, state.reward = event["accuracy"], event["reward"]
        elif what == "elsewhere":
            state.status = "elsewhere"
        elif what in ("done", "stopped"):
            state.status = what
        else:  # failed, gone
            stopped = states.stopping and what == "gone"
            state.status = "stopped" if stopped else "failed"
            state.message = event["message"]
            if not stopped:
                store.note_failure(state.run, state.message)
        display.changed(states, state, what)
        if state.status in ("done", "failed"):
            _add_known_runs(states, plans, store)
    display.tick(states)


REDRAW = 0.5
"""Seconds between two redraws of the table."""
MOST = 24
"""Maximum number of rows: running, then failed, then waiting runs."""
COLORS = {"running": "cyan", "elsewhere": "yellow", "done": "green", "failed": "red"}


class LineDisplay:
    """Prints one line for each run that starts or ends."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> "LineDisplay":
        return self

    def __exit__(self, *exception: object) -> None: ...

    def changed(self, states: RunStates, state: RunState, event: str) -> None:
        """Print a line when a run starts or ends."""
        if event not in ("begun", "elsewhere", "done", "failed", "gone", "stopped"):
            return
        ended = states.count("done", "failed")
        line = f"[{ended}/{len(states.runs)}] {state.run.name}: {status_text(state)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def tick(self, states: RunStates) -> None:
        """Do nothing."""


class TableDisplay(LineDisplay):
    """Redraws a table in place; failures are printed above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "TableDisplay":
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def changed(self, states: RunStates, state: RunState, event: str) -> None:
        """Print failures at once; the table shows the rest."""
        if state.status == "failed":
            text = Text(f"{state.run.name}: {status_text(state)}", style="red")
            self._live.console.print(text, soft_wrap=True)
        self.tick(states)

    def tick(self, states: RunStates) -> None:
        """Redraw the table if it is time."""
        if time.monotonic() - self._drawn > REDRAW:
            self._drawn = time.monotonic()
            self._live.update(table_of(states), refresh=True)


def table_of(states: RunStates) -> RenderableType:
    """Make a table of unfinished runs with a count of each status."""
    kinds: tuple[Status, ...] = ("running", "elsewhere", "failed", "waiting", "stopped", "done")
    caption = ", ".join(f"{num} {kind}" for kind in kinds if (num := states.count(kind)))
    if states.stopping:
        caption += "; finishing the current steps, then saving (Ctrl-C again: stop at once)"
    table = Table(caption=caption, caption_justify="left")
    for name in ("run", "seed", "", "step", "held out"):
        table.add_column(name, justify="right" if name in ("seed", "step", "held out") else "left")
    rows = sorted(states.runs.values(), key=lambda x: kinds.index(x.status))
    for state in rows[:MOST]:
        run = state.run
        what = run.arm if run.kind == "run" else f"{run.kind} {run.arm}"
        table.add_row(
            Text(what),
            str(run.seed),
            Text(state.status, style=COLORS.get(state.status, "")),
            f"{state.step}/{state.total}" if state.step or state.status == "running" else "",
            _held_out(state),
        )
    return table


def _held_out(state: RunState) -> str:
    """Format the accuracy, or the mean reward if correctness is not reported."""
    if state.accuracy is not None:
        return f"accuracy {state.accuracy:.1%}"
    return "" if state.reward is None else f"reward {state.reward:.3f}"


def status_text(state: RunState) -> str:
    """Describe a run's status in a few words."""
    if state.status == "failed":
        return f"failed: {printable(' '.join(state.message.split()), 600)}"
    if state.status == "elsewhere":
        return "another process is running it; waiting for it to finish"
    found = _held_out(state)
    accuracy = f", held-out {found}" if found else ""
    if state.status == "running":
        return "running"
    return f"{state.status}, step {state.step}/{state.total}{accuracy}"


def make_display(console: Console) -> LineDisplay:
    """Make the progress display: a table on a terminal, plain lines elsewhere."""
    return TableDisplay(console) if console.is_terminal else LineDisplay(console)
