"""One run, one folder, one writer."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from each import each

from segcredit.runlog.folder import RunError, RunFolder, by_step, new_run_path, step_name, step_of


def begun(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    folder.config.write_text("seed: 1\n")
    return folder


def test_names_alone_touch_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.config == tmp_path / "run" / "config.yaml"
    assert not folder.path.exists()


def test_paths_survive_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("run")
    monkeypatch.chdir("/")
    assert folder.path == tmp_path / "run"


def test_create_makes_every_place(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "deep" / "run") as folder:
        for place in (
            "rollouts",
            "watched",
            "images",
            "evaluations",
            "checkpoints",
            "tensorboard",
            "plots",
        ):
            assert (folder.path / place).is_dir()


def test_create_refuses_a_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    begun(tmp_path / "my run").close()
    message = r"already contains a run \(config.yaml\).*segcredit train --resume '.*my run'"
    with pytest.raises(RunError, match=message):
        RunFolder.create(tmp_path / "my run")


@pytest.mark.parametrize("trace", ["metrics.jsonl", "rollouts/step-000001.jsonl", "plots/a.png"])
def test_create_refuses_the_rest_of_a_run(tmp_path: Path, trace: str) -> None:
    (tmp_path / trace).parent.mkdir(exist_ok=True)
    (tmp_path / trace).write_text("")
    with pytest.raises(RunError, match="choose another"):
        RunFolder.create(tmp_path)
    assert not (tmp_path / ".lock").exists(), "what is refused is not touched"


def test_create_takes_a_folder_whose_run_never_began(tmp_path: Path) -> None:
    RunFolder.create(tmp_path).close()
    RunFolder.create(tmp_path).close()


def test_create_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match="cannot create the run directory"):
            RunFolder.create(path)


def test_open_what_is_no_run_names_those_near_by(tmp_path: Path) -> None:
    begun(tmp_path / "runs" / "good").close()
    for path in (tmp_path / "runs", tmp_path / "runs" / "god"):
        with pytest.raises(RunError, match=r"is not a run: .* nearby: \S*/runs/good"):
            RunFolder.open(path)
    assert not (tmp_path / "runs" / ".lock").exists()


def test_open_clears_what_a_killed_writer_left(tmp_path: Path) -> None:
    with begun(tmp_path / "run") as folder:
        left = folder.rollouts / ".step-000001.jsonl.tmp-99"
        left.touch()
    with RunFolder.open(tmp_path / "run"):
        assert not left.exists()


def test_two_writers_are_refused(tmp_path: Path) -> None:
    with begun(tmp_path / "run"), pytest.raises(RunError, match=f"process {os.getpid()} is writ"):
        RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run").close()


def test_a_failed_opening_keeps_no_lock(tmp_path: Path) -> None:
    begun(tmp_path / "run").close()
    (tmp_path / "run" / "plots").rmdir()
    (tmp_path / "run" / "plots").touch()
    with pytest.raises(FileExistsError):
        RunFolder.open(tmp_path / "run")
    (tmp_path / "run" / "plots").unlink()
    RunFolder.open(tmp_path / "run").close()


HOLD = """
import os, sys, time
from segcredit.runlog.folder import RunFolder
folder = RunFolder.open(sys.argv[1])
orphan = os.fork()  # a worker, as multiprocessing makes them
if orphan == 0:
    time.sleep(60)
    os._exit(0)
print(orphan, flush=True)
time.sleep(60)
"""


def test_a_killed_writer_frees_the_run_even_if_its_workers_live_on(tmp_path: Path) -> None:
    begun(tmp_path / "run").close()
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(tmp_path / "run")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    try:
        with pytest.raises(RunError, match=f"process {holder.pid} is writing .*kill {holder.pid}"):
            RunFolder.open(tmp_path / "run")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        os.kill(orphan, 0)  # still there
        RunFolder.open(tmp_path / "run").close()
    finally:
        os.kill(orphan, signal.SIGKILL)
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_a_file_system_without_locks_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked on this file system"):
        RunFolder.create(tmp_path / "run").close()


def test_new_names_are_dated_and_unique(tmp_path: Path) -> None:
    paths = [new_run_path("sapo", root=tmp_path / "runs") for _ in range(5)]
    assert len(set(paths)) == 5
    assert all(re.fullmatch(r"sapo-\d{8}-\d{6}(-\d)?", path.name) for path in paths)
    for path in paths:
        RunFolder.create(path).close()


@each("name", ["../../etc/passwd", "a b/c", "", "..", "\ud800\x00", "名" * 500])
def test_hostile_names_stay_in_the_root(tmp_path: Path, name: str) -> None:
    path = new_run_path(name, root=tmp_path)
    assert path.parent == tmp_path
    assert path.is_dir()
    assert not path.name.startswith((".", "-"))


def test_steps_in_names(tmp_path: Path) -> None:
    assert step_name(12) == "step-000012"
    assert [step_of(name) for name in ("step-000012.jsonl", "step-12345678", "step-", "x")] == [
        12,
        12345678,
        None,
        None,
    ]
    for step in (9_999_999, 20, 3):
        (tmp_path / f"{step_name(step)}.jsonl").touch()
    (tmp_path / ".step-000004.jsonl.tmp-1").touch()
    assert [step for step, _ in by_step(tmp_path)] == [3, 20, 9_999_999]
    assert list(by_step(tmp_path / "nowhere")) == []
    with pytest.raises(ValueError, match="at least 0"):
        step_name(-1)
