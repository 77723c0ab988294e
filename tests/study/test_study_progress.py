"""What a person sees while a study runs."""

import io
from pathlib import Path

from rich.console import Console
from small import plan

from segcredit_lab.study.execute import (
    LineDisplay,
    RunState,
    RunStates,
    TableDisplay,
    make_display,
    table_of,
)


def states_of(tmp_path: Path) -> RunStates:
    made = plan(tmp_path)
    found = RunStates({run.digest: RunState(run, total=12) for run in made.runs(guess=True)})
    first, second, third, *_ = found.runs.values()
    first.status, first.step, first.accuracy = "done", 12, 0.5
    second.status, second.step = "running", 7
    third.status, third.message = "failed", "no memory\nleft [red]"
    return found


def drawn(states: RunStates) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(table_of(states))
    return console.export_text()


def test_the_table_has_every_run_and_the_sums(tmp_path: Path) -> None:
    text = drawn(states_of(tmp_path))
    assert "7/12" in text
    assert "50.0%" in text
    assert "1 running, 1 failed, 5 waiting, 1 done" in text
    assert text.index("running") < text.index("failed") < text.index("waiting")


def test_it_says_that_it_is_stopping(tmp_path: Path) -> None:
    states = states_of(tmp_path)
    states.stopping = True
    assert "finishing the current steps" in " ".join(drawn(states).split())


def test_lines_tell_of_beginnings_and_ends(tmp_path: Path) -> None:
    out = io.StringIO()
    lines = make_display(Console(file=out, width=60))
    assert type(lines) is LineDisplay
    states = states_of(tmp_path)
    done, running, failed, *_ = states.runs.values()
    lines.changed(states, running, "step")
    assert out.getvalue() == ""
    lines.changed(states, running, "begun")
    lines.changed(states, done, "done")
    lines.changed(states, failed, "failed")
    said = out.getvalue().splitlines()
    assert said[0] == f"[2/8] {running.run.name}: running"
    assert said[1] == f"[2/8] {done.run.name}: done, step 12/12, held-out accuracy 50.0%"
    assert said[2] == f"[2/8] {failed.run.name}: failed: no memory left [red]"


def test_a_terminal_gets_a_live_table(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    states = states_of(tmp_path)
    failed = [*states.runs.values()][2]
    with make_display(console) as live:
        assert type(live) is TableDisplay
        live.changed(states, failed, "failed")
    assert "no memory left [red]" in out.getvalue(), "it stays when the table is gone"
    assert "7/12" in out.getvalue()


def test_a_reward_that_does_not_say_what_is_correct_is_shown_as_reward(tmp_path: Path) -> None:
    states = states_of(tmp_path)
    first = next(iter(states.runs.values()))
    first.accuracy, first.reward = None, 0.625
    assert "reward 0.625" in drawn(states)
    assert "accuracy" not in drawn(states)
