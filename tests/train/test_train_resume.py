"""Killed at any moment and resumed, a run is the run that nobody killed, bit for bit."""

import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_cli import Call, Server, run, start
from safetensors.torch import load_file
from tiny_runs import TITLE, assert_same_run, count_lines, metrics, write_recipe

SPO = {
    "algorithm": "single_stream_spo",
    "data__size": 12,
    "stages": [{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 10}],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    return undisturbed(tmp_path_factory.mktemp("whole"))


def undisturbed(folder: Path, **changes: Any) -> Path:
    recipe = write_recipe(folder, **changes)
    done = run(folder, "train", recipe, "--folder", "run")
    assert done.code == 0, done.complained
    return folder / "run"


def begin(folder: Path) -> Call:
    """The run from its recipe, or on from where it was killed."""
    if (folder / "run" / "config.yaml").exists():
        return start(folder, "train", "--resume", "run")
    return start(folder, "train", "recipe.yaml", "--folder", "run")


def workers(folder: Path) -> list[int]:
    """Processes that serve the run's reward function."""
    name = str(folder / "reward.py").encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name in command:
            found.append(int(place.parent.name))
    return found


Moment = Callable[[Path, Call], bool]


def after_lines(number: int) -> Moment:
    """So many lines of metrics, and then a little."""

    return lambda run, call: TITLE.search(call.said) is not None and count_lines(run) >= number


def while_saving(pattern: str) -> Moment:
    """A checkpoint of that name is being written."""
    return lambda run, call: any((run / "checkpoints").glob(f".tmp-{pattern}-{call.pid}"))


def at_the_start(run: Path, call: Call) -> bool:
    """The model is being loaded, or soon."""
    return True


def kill(folder: Path, moment: Moment, delay: float) -> None:
    call = begin(folder)
    assert call.wait_until(lambda: moment(folder / "run", call)), call.said + call.complained
    time.sleep(delay)
    call.signal(signal.SIGKILL)
    assert call.wait() == -signal.SIGKILL, "it had ended before it could be killed"
    until = time.monotonic() + 10
    while workers(folder):
        assert time.monotonic() < until, "the reward's process outlives the run"
        time.sleep(0.01)


def finish(folder: Path) -> Call:
    call = begin(folder)
    assert call.wait() == 0, call.complained
    return call


def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path, whole: Path) -> None:
    write_recipe(tmp_path)
    kill(tmp_path, while_saving("step-*"), 0.0)
    kill(tmp_path, after_lines(10), random.uniform(0.0, 0.03))
    finish(tmp_path)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_killed_at_twelve_moments_it_is_the_same_run(tmp_path: Path, whole: Path) -> None:
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    write_recipe(tmp_path)
    moments: list[tuple[Moment, float]] = [
        (at_the_start, 0.3),
        (after_lines(1), 0.03),  # imitation
        (while_saving("step-*"), 0.0),
        (after_lines(3), 0.03),
        (after_lines(5), 0.03),  # the critic alone
        (while_saving("step-*"), 0.01),
        (at_the_start, 0.3),
        (while_saving("reference"), 0.0),
        (after_lines(8), 0.05),  # the evaluation before reinforcement learning
        (after_lines(10), 0.03),
        (while_saving("step-*"), 0.02),
        (after_lines(12), 0.03),
    ]
    for moment, longest in moments:
        kill(tmp_path, moment, rng.uniform(0.0, longest))
    finish(tmp_path)
    try:
        assert_same_run(tmp_path / "run", whole)
    except AssertionError as error:
        raise AssertionError(f"with random seed {seed}") from error
    assert not list((tmp_path / "run").rglob(".tmp-*")), "what was half-written is cleared away"


@pytest.mark.slow
def test_the_values_of_prompts_survive_too(tmp_path: Path) -> None:
    undisturbed_run = undisturbed(make(tmp_path / "whole"), **SPO)
    assert any("tracker/drift" in line for line in metrics(undisturbed_run))
    folder = make(tmp_path / "killed")
    write_recipe(folder, **SPO)
    for number in (3, 5, 7, 9):
        kill(folder, after_lines(number), random.uniform(0.0, 0.03))
    finish(folder)
    assert_same_run(folder / "run", undisturbed_run)


@pytest.mark.slow
def test_half_precision_survives_too(tmp_path: Path) -> None:
    half = {"model__dtype": "bfloat16"}
    undisturbed_run = undisturbed(make(tmp_path / "whole"), **half)
    (last,) = sorted((undisturbed_run / "checkpoints").glob("step-*"))[-1:]
    kept = load_file(last / "policy" / "model.safetensors")
    assert {x.dtype for x in kept.values()} == {torch.bfloat16}
    folder = make(tmp_path / "killed")
    write_recipe(folder, **half)
    for number in (2, 5, 9):
        kill(folder, after_lines(number), random.uniform(0.0, 0.03))
    finish(folder)
    assert_same_run(folder / "run", undisturbed_run)


# ── Damaged checkpoints ──────────────────────────────────────────────────────────────────────────


def copied(whole: Path, folder: Path) -> Path:
    """The finished run, in a folder where it can be damaged and resumed."""
    write_recipe(folder)
    shutil.copytree(whole, folder / "run")
    return folder / "run"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("policy/model.safetensors", alter, "model.safetensors was altered: its SHA-256 differs"),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                (
                    "state.safetensors",
                    truncate,
                    r"state.safetensors is truncated: \d+ of \d+ bytes",
                ),
                ("manifest.json", remove, "manifest.json is missing"),
            )
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_used(
    tmp_path: Path, whole: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    resumed = copied(whole, tmp_path)
    damage(resumed / "checkpoints" / "step-000015" / name)
    call = finish(tmp_path)
    assert re.search(f"checkpoint step-000015 is refused: .*{said}", call.said), call.said
    assert "Resuming after step 14 of 15." in call.said
    assert_same_run(resumed, whole)


def contents(folder: Path) -> dict[str, bytes]:
    """All files, but for the lock."""
    found = {str(x.relative_to(folder)): x for x in folder.rglob("*") if x.is_file()}
    return {name: x.read_bytes() for name, x in found.items() if not name.endswith(".lock")}


def damage_all(run: Path) -> None:
    for step in (14, 15):
        truncate(run / "checkpoints" / f"step-{step:06d}" / "critic" / "model.safetensors")


def move_all(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "elsewhere")


def move_steps(run: Path) -> None:
    (run.parent / "elsewhere").mkdir()
    for path in (run / "checkpoints").glob("step-*"):
        path.rename(run.parent / "elsewhere" / path.name)


def lose_the_disk(run: Path) -> None:
    """The checkpoints were a link to a disk that is not mounted."""
    move_all(run)
    (run / "checkpoints").symlink_to(run.parent / "disk")
    (run.parent / "disk").mkdir()


@pytest.mark.parametrize(
    "lose",
    [
        damage_all,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (move_all, move_steps, lose_the_disk)),
    ],
)
def test_without_a_whole_checkpoint_nothing_is_touched(
    tmp_path: Path, whole: Path, lose: Callable[[Path], None]
) -> None:
    resumed = copied(whole, tmp_path)
    lose(resumed)
    before = contents(tmp_path)
    for arguments in (["--resume", "run"], ["--resume", "run", "save.every=1"]):
        call = run(tmp_path, "train", *arguments)
        assert call.code == 2, call.said
        assert call.complained.startswith(
            f"error: expected a checkpoint in {resumed}/checkpoints to resume from; "
        )
        assert "nothing was changed or deleted" in call.complained
        assert f"segcredit train --resume {resumed} --trust-run. " in call.complained
        assert f"segcredit train {resumed}/config.yaml" in call.complained
        after = contents(tmp_path)
        assert {name: after[name] for name in before} == before
    if lose is move_steps:  # what the message says: put them back
        for path in (tmp_path / "elsewhere").iterdir():
            path.rename(resumed / "checkpoints" / path.name)
        finish(tmp_path)
        assert_same_run(resumed, whole)


def test_what_a_resume_takes_back_is_moved_and_not_deleted(tmp_path: Path, whole: Path) -> None:
    resumed = copied(whole, tmp_path)
    damaged = resumed / "checkpoints" / "step-000015" / "policy" / "model.safetensors"
    alter(damaged)
    lost = {name: x for name, x in contents(resumed).items() if "step-000015" in name}
    assert len(lost) > 5
    lines = (resumed / "metrics.jsonl").read_bytes().splitlines()
    call = finish(tmp_path)
    assert_same_run(resumed, whole)
    (aside,) = (resumed / "rolled_back").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-step-000014", aside.name)
    assert f"moved   everything after step 14 to {aside}\n" in call.said
    moved = contents(aside)
    assert moved.pop("metrics.jsonl").splitlines() == lines[-2:]
    assert moved == lost


def test_few_rollbacks_are_kept(tmp_path: Path, whole: Path) -> None:
    resumed = copied(whole, tmp_path)
    for day in range(1, 6):
        (resumed / "rolled_back" / f"2020010{day}-000000-step-000001").mkdir(parents=True)
    truncate(resumed / "checkpoints" / "step-000015" / "manifest.json")
    finish(tmp_path)
    names = sorted(x.name for x in (resumed / "rolled_back").iterdir())
    assert names[:-1] == ["20200104-000000-step-000001", "20200105-000000-step-000001"]


def test_a_damaged_reference_model_cannot_be_replaced(tmp_path: Path, whole: Path) -> None:
    resumed = copied(whole, tmp_path)
    alter(resumed / "checkpoints" / "reference" / "model.safetensors")
    before = (resumed / "metrics.jsonl").read_bytes()
    call = begin(tmp_path)
    assert call.wait() == 2
    assert re.fullmatch(
        r"error: the only copy of the reference model .* reference/model.safetensors was "
        r"altered: .* start again: "
        r"segcredit train .*/config.yaml\n",
        call.complained.replace("checkpoints/reference", " reference"),
    ), call.complained
    assert (resumed / "metrics.jsonl").read_bytes() == before


# ── Full disks ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A tmpfs that only one server and its processes see: it ends with them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, *mount], capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk needs user namespaces")
    server = Server([*alone, "sh", "-c", f'{" ".join(mount)} && exec "$@"', "sh"])
    yield server, disk
    server.stop()


def resize(server: Server, disk: Path, size: str) -> None:
    assert server.ask({"shell": f"mount -o remount,size={size} {disk}"}) == 0


@pytest.mark.slow
def test_on_a_full_disk_it_stops_and_goes_on_when_there_is_room(
    tmp_path: Path, whole: Path, small_disk: tuple[Server, Path]
) -> None:
    server, disk = small_disk
    recipe = write_recipe(tmp_path)
    resize(server, disk, "700k")  # a checkpoint, then a second one, then no third beside them
    call = server.run(tmp_path, "train", recipe, "--folder", "disk/run")
    assert call.code == 2
    found = re.fullmatch(
        r"error: disk full at .*/run/checkpoints: checkpoint step-\d+ needs at least .* MiB, .* "
        r"MiB are free\. Nothing finished is lost: the last complete checkpoint is .*/(step-\d+)\. "
        rf".* then run: segcredit train --resume {disk}/run --trust-run\n",
        call.complained,
    )
    assert found is not None, call.complained

    resize(server, disk, "8m")  # room for a while: then no line of metrics fits any more
    call = server.start(tmp_path, "train", "--resume", "disk/run", "save.every=1000")
    call.wait_until(lambda: TITLE.search(call.said) is not None)
    server.ask({"shell": f"dd if=/dev/zero of={disk}/fill bs=1k 2> /dev/null"})
    assert call.wait() == 2
    assert f"Resuming after step {int(found[1][5:])} of 15." in call.said
    last = call.complained.splitlines()[-1]
    assert re.match(r"error: (\[Errno 28\] No space left on device|disk full at )", last), last
    assert f"type: segcredit train --resume {disk}/run" in last
    assert "Traceback" not in call.complained

    assert server.ask({"shell": f"rm {disk}/fill"}) == 0
    call = server.run(tmp_path, "train", "--resume", "disk/run", "save.every=2")
    assert call.code == 0, call.complained
    assert server.ask({"shell": f"cp -r {disk}/run {tmp_path}/run"}) == 0
    assert_same_run(tmp_path / "run", whole)


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
