"""Bring every run of some studies to its end: what is missing runs, what was begun goes on."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Protocol, runtime_checkable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from segcredit.printable import printable
from segcredit_lab.study.plan import Plan
from segcredit_lab.study.store import Planned, Store
from segcredit_lab.study.workers import Order, Pool

Status = Literal["waiting", "running", "elsewhere", "done", "failed", "stopped"]
START_FAILED = "its start failed: "
MOMENT = 0.25
"""Seconds between two looks at the clock, for who draws."""


@dataclass
class RunState:
    """How far a run is."""

    planned: Planned
    status: Status = "waiting"
    step: int = 0
    total: int = 0
    accuracy: float | None = None
    """Held-out accuracy; None: no evaluation yet, or the reward does not report correctness."""
    reward: float | None = None
    """Held-out, at its last evaluation."""
    message: str = ""
    """Why it failed."""
    already: bool = False
    """Whether it was done before we began."""


@runtime_checkable
class Watch(Protocol):
    """Who shows it."""

    def changed(self, states: "States", state: RunState, event: str) -> None:
        """Something happened to a run."""
        ...

    def tick(self, states: "States") -> None:
        """A moment has passed."""
        ...


@dataclass
class States:
    """All runs by digest, and whether someone asked to stop."""

    runs: dict[str, RunState] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    """Beginnings that runs will need which are not known yet."""
    stopping: bool = False

    @property
    def failed(self) -> dict[str, str]:
        """Digest → why."""
        return {key: x.message for key, x in self.runs.items() if x.status == "failed"}

    def count(self, *statuses: Status) -> int:
        """How many runs are in such a state."""
        return sum(x.status in statuses for x in self.runs.values())


def execute(plans: Sequence[Plan], store: Store, jobs: int, logs: Path, watch: Watch) -> States:
    """Until nothing is left that can run. Ctrl-C lets running steps finish, and saves them."""
    states, pool = States(), Pool(jobs, logs)
    _take_in(states, plans, store)
    told = False
    with _interrupts(states):
        try:
            while True:
                if not states.stopping:
                    _begin(states, pool, store, watch)
                elif not told:
                    told = True
                    pool.stop()
                if pool.free == pool.jobs:
                    return states
                _hear(states, pool, plans, store, watch)
        finally:
            pool.close()


def recorded(plans: Sequence[Plan], store: Store) -> States:
    """How far everything is, without running anything."""
    states = States()
    while True:  # a rate whose run failed may leave another, and runs with it
        _take_in(states, plans, store)
        failed = [
            (state, why)
            for state in states.runs.values()
            if state.status == "waiting" and (why := store.failure(state.planned)) is not None
        ]
        if not failed:
            return states
        for state, why in failed:
            state.status, state.message = "failed", why


@contextmanager
def _interrupts(states: States) -> Iterator[None]:
    """The first Ctrl-C is noted, the second ends everything; only a main thread can."""

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


def _take_in(states: States, plans: Sequence[Plan], store: Store) -> None:
    """Runs that have become known: all at first; later those whose learning rate was found.

    What an earlier study needs comes before what a later one does, whenever it became known.
    """
    failed = states.failed
    states.early = {start.digest for plan in plans for start in plan.early(failed)}
    found: dict[str, RunState] = {}
    for plan in plans:
        for planned in [*plan.planned(failed), *plan.early(failed)]:
            if planned.digest not in found:
                found[planned.digest] = states.runs.get(planned.digest) or _state(planned, store)
    states.runs = found | {key: x for key, x in states.runs.items() if key not in found}


def _state(planned: Planned, store: Store) -> RunState:
    done = store.finished(planned)
    return RunState(planned, "done" if done else "waiting", total=planned.steps, already=done)


def _begin(states: States, pool: Pool, store: Store, watch: Watch) -> None:
    """As many runs as there is room for, of those whose start is there."""
    wanted = _wanted_starts(states, store)
    for state in [*states.runs.values()]:
        planned = state.planned
        idle = planned.kind == "warm" and planned.digest not in wanted
        if state.status != "waiting" or idle or not pool.free:
            continue
        before = None if planned.start is None else states.runs[planned.start.digest]
        if before is not None and before.status == "failed":
            reason = before.message.removeprefix(START_FAILED)
            state.status, state.message = "failed", START_FAILED + reason
            watch.changed(states, state, "failed")
        elif before is None or before.status == "done":
            order = Order(
                planned.digest,
                store.recipe(planned).as_dict(),
                store.folder(planned),
                planned.keeps,
            )
            state.status = "running"
            store.forget_failure(planned)
            watch.changed(states, state, "begun")
            pool.begin(order)


def _wanted_starts(states: States, store: Store) -> set[str]:
    """Beginnings that a run still waits for; one whose models are gone is run again."""
    runs = states.runs
    wanted: set[str] = set()
    asking = [
        x.planned for x in runs.values() if x.status == "waiting" and x.planned.kind != "warm"
    ]
    asking += [runs[digest].planned for digest in states.early if runs[digest].status == "waiting"]
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


def _hear(states: States, pool: Pool, plans: Sequence[Plan], store: Store, watch: Watch) -> None:
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
                store.note_failure(state.planned, state.message)
        watch.changed(states, state, what)
        if state.status in ("done", "failed"):
            _take_in(states, plans, store)
    watch.tick(states)


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
