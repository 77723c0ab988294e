"""Ctrl-C: the first finishes the step and saves it, the second stops at once.

A terminal that closes is like the first; a pipe that closes, or a full disk behind stdout, disturbs
no run."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked_cli import Call, run, several, start
from tiny_runs import TITLE, assert_same_run, count_lines, write_recipe

from segcredit.train.checkpoint import find_latest
from segcredit.train.loop import StopSignals, interrupts

SHORT = {
    "stages": [
        {"kind": "warm_start", "steps": 3, "batch": 4},
        {"kind": "pretrain_critic", "steps": 2},
        {"kind": "optimize", "steps": 5},
    ],
    "save__every": 4,
}
MAIN = [sys.executable, "-c", "from segcredit.cli import main; main()"]
SLOW = """
import time
def by_length(num_tokens, **columns):
    if len(num_tokens) > 2:  # not in the trial before the run
        time.sleep({seconds})
    return [(n % 4) / 3 for n in num_tokens]
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, "train", write_recipe(folder, **SHORT), "--folder", "run")
    assert done.code == 0, done.complained
    return folder / "run"


def stop(call: Call, number: signal.Signals) -> int | None:
    """Press Ctrl-C as soon as it trains; after which step it stopped, None if it was quicker."""
    assert call.wait_until(lambda: TITLE.search(call.said) is not None), call.complained
    call.signal(number)
    assert call.wait() in (130, 0), call.said + call.complained
    assert call.complained == ""
    return int(step_of(call.said)[1]) if call.code else None


def step_of(said: str) -> re.Match[str]:
    """Where it says that it stopped, on a line that can be copied."""
    found = re.search(
        r"\nFinishing this step, then saving\. Press Ctrl-C again to stop at once\.\n(?:.*\n)*"
        r"stopped after step (\d+), which is saved\. To resume: "
        r"(segcredit train --resume \S+ --trust-run)\n$",
        said,
    )
    assert found is not None, said
    return found


@pytest.mark.slow
def test_interrupted_again_and_again_it_is_the_same_run(tmp_path: Path, whole: Path) -> None:
    """Every process makes a step or two: all kinds of stage, and their last steps, are met."""
    recipe = write_recipe(tmp_path, **SHORT)
    call = start(tmp_path, "train", recipe, "--folder", "run")
    steps = [0]
    while (
        step := stop(call, random.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
    ) is not None:
        assert step > steps[-1]
        steps.append(step)
        saved = find_latest(tmp_path / "run" / "checkpoints").path
        assert saved is not None
        assert saved.name == f"step-{step:06d}"
        call = start(tmp_path, "train", "--resume", "run")
        if step == 10:
            break
    assert call.wait() == 0, call.complained
    done = "This run is complete (10 of 10 steps)."  # the last one may come in the last step
    assert (done if steps[-1] == 10 else f"Resuming after step {steps[-1]} of 10.") in call.said
    assert len(steps) > 3
    assert_same_end(tmp_path / "run", whole)


def assert_same_end(run: Path, whole: Path) -> None:
    keep_only_last(run)
    keep_only_last(whole)
    assert_same_run(run, whole)


def keep_only_last(folder: Path) -> None:
    """Which older steps are saved depends on where it was stopped."""
    *older, _ = sorted((folder / "checkpoints").glob("step-*"))
    for path in older:
        path.rename(folder / path.name)


@pytest.mark.slow
def test_from_a_shell_and_back(tmp_path: Path) -> None:
    """The real command in a process group of its own, as a terminal starts it."""
    recipe = write_recipe(tmp_path, **SHORT, rollout__prompts=2, evaluation__prompts=1)
    process = subprocess.Popen(
        [*MAIN, "train", str(recipe), "--folder", "run", "stages.2.steps=10000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while count_lines(tmp_path / "run") < 8:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said, complained = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complained == ""
    step, command = step_of(said).groups()
    assert command == f"segcredit train --resume {tmp_path / 'run'} --trust-run"
    done = run(tmp_path, *command.split()[1:], f"stages.2.steps={int(step) - 4}")
    assert done.code == 0, done.complained
    assert f"Resuming after step {step} of {int(step) + 1}." in done.said


@pytest.mark.slow
def test_processes_that_train_together_stop_and_go_on_together(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    for call in several(tmp_path, 2, "train", recipe, "--folder", "whole"):
        assert call.wait() == 0, call.complained
    calls = several(tmp_path, 2, "train", recipe, "--folder", "run")
    assert calls[0].wait_until(lambda: count_lines(tmp_path / "run") >= 2), calls[0].complained
    for call in calls:  # one after the other, and still they must agree on the step
        call.signal(signal.SIGINT)
        time.sleep(0.005)
    assert [call.wait() for call in calls] == [130, 130], [x.complained for x in calls]
    step = step_of(calls[0].said)[1]
    assert f"stopped after step {step}; rank 0 saves it." in calls[1].said
    for call in several(tmp_path, 2, "train", "--resume", "run"):
        assert call.wait() == 0, call.complained
    for name in ("run", "whole"):
        keep_only_last(tmp_path / name)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    (tmp_path / "reward.py").write_text(SLOW.format(seconds=60))
    call = start(tmp_path, "train", recipe, "--folder", "run")
    assert call.wait_until(lambda: "2 train critic (stages.1):" in call.said), call.complained
    assert call.wait_until(lambda: bool(children(call.pid))), call.complained
    workers = children(call.pid)
    call.signal(signal.SIGINT)
    assert call.wait_until(lambda: "Press Ctrl-C again" in call.said)
    time.sleep(0.3)
    assert call.alive(), "the first only asks"
    begun = time.monotonic()
    call.signal(signal.SIGINT)
    assert call.wait() == 130
    assert time.monotonic() - begun < 30
    go_on = f"segcredit train --resume {tmp_path}/run --trust-run"
    assert re.search(rf"Stopped at once, .* To resume from there: {go_on}$", call.said.rstrip()), (
        call.said
    )
    assert call.complained == ""
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    saved = find_latest(tmp_path / "run" / "checkpoints")
    assert saved.path is not None
    assert (saved.path.name, saved.refused) == ("step-000003", [])


def test_many_quick_ctrl_c_end_without_a_traceback(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    for delay in (0.0, 0.002, 0.02):
        folder = f"run-{delay}"
        call = start(tmp_path, "train", recipe, "--folder", folder, "stages.0.steps=100000")
        assert call.wait_until(lambda: "1 imitate (stages.0):" in call.said), call.complained  # noqa: B023
        for _ in range(6):
            if call.alive():
                call.signal(signal.SIGINT)
            time.sleep(delay)
        assert call.wait() == 130, call.said + call.complained
        assert call.complained == ""
        assert "topped" in call.said


@pytest.mark.parametrize("twice", [False, True])
def test_a_terminal_that_closes_saves_even_if_it_says_so_twice(tmp_path: Path, twice: bool) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    call = start(tmp_path, "train", recipe, "--folder", "run", "stages.0.steps=100000")
    assert call.wait_until(lambda: count_lines(tmp_path / "run") > 1), call.complained
    for _ in range(1 + twice):
        call.signal(signal.SIGHUP)
        time.sleep(0.001)
    assert call.wait() == 130, call.said + call.complained
    step = int(step_of(call.said)[1])
    saved = find_latest(tmp_path / "run" / "checkpoints").path
    assert saved is not None
    assert saved.name == f"step-{step:06d}"


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts() as interrupted:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupted()
    finally:
        signal.signal(signal.SIGHUP, before)


# ── Nobody listens ───────────────────────────────────────────────────────────────────────────────

LOST = (
    r"warning: standard output is lost \({}\)\. Training continues; the run directory has all "
    r"metrics\.\n"
)


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path, whole: Path) -> None:
    """``segcredit train … | head -1``."""
    recipe = write_recipe(tmp_path, **SHORT)
    os.mkfifo(tmp_path / "pipe")
    call = start(tmp_path, "train", recipe, "--folder", "run", out=tmp_path / "pipe")
    with (tmp_path / "pipe").open() as pipe:
        assert pipe.readline().startswith("run ")
    assert call.wait() == 0, call.complained
    assert re.fullmatch(LOST.format("Broken pipe"), call.complained), call.complained
    assert_same_end(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_full_disk_behind_stdout_does_not_end_the_run(tmp_path: Path, whole: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    recipe = write_recipe(tmp_path, **SHORT)
    call = start(tmp_path, "train", recipe, "--folder", "run", out=full)
    assert call.wait() == 0, call.complained
    assert re.fullmatch(LOST.format("No space left on device"), call.complained), call.complained
    assert_same_end(tmp_path / "run", whole)
    call = start(tmp_path, "train", "--resume", "run", "seed=x", out=full, err=full)
    assert call.wait() == 2, "an error that nobody can read"


def test_stopped_where_nobody_listens_it_is_saved(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    os.mkfifo(tmp_path / "pipe")
    call = start(
        tmp_path,
        *("train", recipe, "--folder", "run", "stages.0.steps=100000"),
        out=tmp_path / "pipe",
        err=Path("/dev/full"),
    )
    with (tmp_path / "pipe").open() as pipe:
        assert pipe.readline().startswith("run ")
    assert call.wait_until(lambda: count_lines(tmp_path / "run") > 1), call.wait()
    call.signal(signal.SIGTERM)
    assert call.wait() == 130
    assert find_latest(tmp_path / "run" / "checkpoints").path is not None


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts() as interrupted:
        assert signal.getsignal(signal.SIGINT) == interrupted.handle
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_thread_does_without() -> None:
    def train() -> bool:
        with interrupts() as interrupted:
            return interrupted()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train).result() is False


def test_a_print_that_fails_in_the_handler_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Busy:
        """As a stream answers that is interrupted in the middle of a write."""

        def write(self, text: str) -> None:
            raise RuntimeError("reentrant call inside a buffered writer")

    monkeypatch.setattr(sys, "stdout", Busy())
    pressed = StopSignals()
    pressed.handle(signal.SIGINT, None)
    assert pressed()
