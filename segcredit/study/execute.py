"""Bring every run of some studies to its end: what is missing runs, what was begun goes on."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, runtime_checkable

from segcredit.study.plan import Plan
from segcredit.study.pool import Order, Pool
from segcredit.study.store import Planned, Store

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
