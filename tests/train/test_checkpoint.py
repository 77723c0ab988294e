"""A checkpoint is whole or not there: under kill -9, full disks, flipped bits."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import Tensor

from segcredit.train.checkpoint import (
    CheckpointError,
    find_latest,
    latest_complete,
    load_state,
    mark_unsaved,
    never_saved,
    save_checkpoint,
    save_state,
    verify,
)


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: the disk's own pace is not what is tested."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def writes(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(text * 100)
        (folder / "state.json").write_text(text)

    return write


def save(root: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(root, f"step-{step:06d}", writes(f"step {step} "), **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ── Saving and keeping ───────────────────────────────────────────────────────────────────────────


def test_a_saved_checkpoint_is_whole(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    assert latest_complete(root) is None
    path = save(root, 20)
    assert path == root / "step-000020"
    verify(path)
    assert latest_complete(root) == path
    assert sorted(json.loads((path / "manifest.json").read_text())["files"]) == [
        "policy/weights",
        "state.json",
    ]
    assert names(root) == ["step-000020"]


def test_a_folder_that_is_no_step_deletes_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    save_checkpoint(tmp_path, "initial", writes("weights"))
    assert names(tmp_path) == ["initial", *(f"step-{step:06d}" for step in (1, 2, 3, 4))]


def test_the_newest_are_kept_and_the_protected(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "best", writes("best"))
    for step in (5, 10, 999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, keep=2, protect=["step-000005"])
    assert names(tmp_path) == ["best", "step-000005", "step-1000000", "step-1000001"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keep=st.integers(1, 4),
    steps=st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=8),
    protect=st.sets(st.integers(0, 30), max_size=3),
)
def test_what_was_just_saved_and_what_is_protected_always_stays(
    quick: Path, keep: int, steps: list[int], protect: set[int]
) -> None:
    root = quick / "checkpoints"
    protected = {f"step-{step:06d}" for step in protect}
    for step in steps:  # in any order: one may resume from an old step
        saved = save(root, step, keep=keep, protect=protected)
        assert saved.is_dir()
    expected = {f"step-{step:06d}" for step in protect & set(steps)}
    assert expected <= set(names(root))
    assert len(set(names(root)) - expected) <= keep + 1
    shutil.rmtree(root)


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save_checkpoint(tmp_path, "step-000001", writes("again"))
    assert (tmp_path / "step-000001" / "state.json").read_text() == "again"
    verify(tmp_path / "step-000001")
    assert names(tmp_path) == ["step-000001"]


def test_a_folder_remembers_that_no_step_was_saved_yet(tmp_path: Path) -> None:
    assert not never_saved(tmp_path)
    mark_unsaved(tmp_path)
    save_checkpoint(tmp_path, "reference", writes("reference"))
    assert never_saved(tmp_path), "that is no step"
    save(tmp_path, 1)
    assert not never_saved(tmp_path)
    assert names(tmp_path) == ["reference", "step-000001"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    """Libraries that write through temporary files leave 0600, which nobody else could resume."""
    before = os.umask(umask)
    try:
        whole = save_checkpoint(
            tmp_path, "step-000001", lambda folder: save_state(folder, {"x": torch.ones(2)})
        )
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in files(whole)} == {mode}


def test_what_dead_processes_left_is_cleared_and_what_live_ones_write_is_not(
    tmp_path: Path,
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine, others = os.getpid(), os.getppid()
    for name in (
        f".tmp-step-000001-{dead.pid}",
        f".old-step-000001-{dead.pid}",
        f".tmp-step-000002-{mine}",  # of an earlier process with our number
        f".tmp-step-000003-{others}",
        ".tmp-mine",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    save(tmp_path, 4)
    assert names(tmp_path) == [".tmp-mine", f".tmp-step-000003-{others}", "step-000004"]


@each("name", ["", "../up", "a/b", ".hidden", "-x", "a\x00b"])
def test_names_stay_in_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name must be like step-000020"):
        save_checkpoint(tmp_path / "c", name, writes(""))
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save(tmp_path / "c", 1, keep=0)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda folder: None, "at least one file"),
        (lambda folder: (folder / "x").symlink_to("/etc/hosts"), "plain files only"),
        (lambda folder: os.mkfifo(folder / "x"), "plain files only"),
    ],
)
def test_folders_that_cannot_be_checkpoints(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, "step-000001", write)
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), FileNotFoundError()])
def test_other_failures_pass_through_and_leave_nothing(
    tmp_path: Path, error: BaseException
) -> None:
    def write(folder: Path) -> None:
        writes("half")(folder)
        raise error

    save(tmp_path, 1)
    with pytest.raises(type(error)):
        save_checkpoint(tmp_path, "step-000002", write)
    assert names(tmp_path) == ["step-000001"]


# ── Damage ───────────────────────────────────────────────────────────────────────────────────────


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_every_flipped_bit_and_every_lost_byte_is_found(quick: Path) -> None:
    whole = save(quick, 1)
    rng = random.Random(0)
    for path in files(whole):
        data = path.read_bytes()
        places = range(len(data)) if len(data) < 1000 else rng.sample(range(len(data)), 40)
        for place in places:
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=f"{path.name} .*was altered"):
                verify(whole)
        for length in {0, 1, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:length])
            with pytest.raises(CheckpointError, match=f"{path.name} is truncated"):
                verify(whole)
        path.write_bytes(data + b"x")
        with pytest.raises(CheckpointError, match=f"{path.name} .*was altered"):
            verify(whole)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
            verify(whole)
        path.write_bytes(data)
        verify(whole)


@each("text", ["", "[]", "{}", '{"files": 1}', '{"files": {"a": 1}}', "[" * 9999])
def test_strange_manifests_are_refused(tmp_path: Path, text: str) -> None:
    whole = save(tmp_path, 1)
    (whole / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is truncated or was altered"):
        verify(whole)


def test_a_damaged_checkpoint_is_refused_by_name_and_the_last_whole_one_used(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    weights = tmp_path / "step-000004" / "policy" / "weights"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "step-000003" / "manifest.json").unlink()
    (tmp_path / "step-000005").touch()  # not even a folder
    found = find_latest(tmp_path)
    assert found.path == tmp_path / "step-000002"
    fifth, fourth, third = found.refused
    assert "step-000005 is refused" in fifth
    assert "step-000004 is refused" in fourth
    assert "weights is truncated" in fourth
    assert "step-000003 is refused" in third
    with pytest.warns(UserWarning, match="is refused") as warned:
        assert latest_complete(tmp_path) == tmp_path / "step-000002"
    assert len(warned) == 3


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("name", ["manifest.json", "weights"])
def test_what_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    """It may be whole: going on from an older one would be wrong."""
    for step in (1, 2):
        save(tmp_path, step, keep=2)
    opened = Path.open

    def fail(path: Path, *options: Any, **others: Any) -> Any:
        if path.name == name and "step-000002" in path.parts:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *options, **others)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match=name) as raised:
        find_latest(tmp_path)
    assert raised.value.errno == number
    assert names(tmp_path) == ["step-000001", "step-000002"]


# ── Kill -9 ──────────────────────────────────────────────────────────────────────────────────────

LOOP = """
import sys
from pathlib import Path
from segcredit.train.checkpoint import latest_complete, save_checkpoint

root = Path(sys.argv[1])
last = latest_complete(root)
step = 0 if last is None else int(last.name[5:])
while True:
    step += 1
    def write(folder):
        (folder / "policy").mkdir()
        for i in range(4):
            (folder / "policy" / f"part-{i}").write_bytes(bytes([step % 256]) * 20_000)
    save_checkpoint(root, f"step-{step:06d}", write, keep=2)
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_at_random_moments_nothing_reported_is_lost(quick: Path) -> None:
    rng = random.Random(1)
    reported = 0
    for _ in range(15):
        saver = subprocess.Popen(
            [sys.executable, "-c", LOOP, quick], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None
        first = saver.stdout.readline()
        time.sleep(rng.uniform(0, 0.06))
        saver.kill()
        out = first + saver.communicate()[0]
        *lines, _ = out.split("\n")  # whole lines
        reported = max(reported, *map(int, lines))
        found = find_latest(quick)
        assert found.refused == [], "half a checkpoint looked like a whole one"
        assert found.path is not None
        step = int(found.path.name.removeprefix("step-"))
        assert reported <= step <= reported + 1
        for part in (found.path / "policy").iterdir():
            assert part.read_bytes() == bytes([step % 256]) * 20_000
    left = [name for name in names(quick) if name.startswith(".")]
    assert left == [], "find_latest clears what the dead left"


EVERY_MOMENT = """
import os, shutil, signal, sys
from pathlib import Path
from segcredit.train.checkpoint import find_latest, save_checkpoint, verify

EVENTS = ("open", "os.", "shutil.")
start = Path(sys.argv[1])

def save(root, step, text, keep):
    def write(folder):
        (folder / "a").write_text(text * 10)
        (folder / "b").write_text(text)
    save_checkpoint(root, f"step-{step:06d}", write, keep=keep)

def dies_at(moment, root, step, keep):
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    count = 0
    def hook(event, args):
        nonlocal count
        if event.startswith(EVENTS):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    save(root, step, "new", keep)
    os._exit(0)

for case, (step, keep) in enumerate([(3, 2), (3, 1), (2, 2), (2, 1)]):
    moment, killed = 0, True
    while killed:
        moment += 1
        root = start / f"{case}-{moment}"
        save(root, 1, "old", 2)
        save(root, 2, "old", 2)
        killed = dies_at(moment, root, step, keep)
        found = find_latest(root)
        assert found.path is not None and not found.refused, (case, moment, found)
        for path in root.glob("step-*"):
            verify(path)  # raises: what has its name is whole
        text = (found.path / "b").read_text()
        latest = int(found.path.name[5:])
        # what was there is there, or the new one is
        assert (latest, text) in {(2, "old"), (step, "new")}, (case, moment, latest, text)
        save(root, 4, "next", 1)  # and one can go on
        assert sorted(os.listdir(root)) == ["step-000004"], (case, moment, os.listdir(root))
        shutil.rmtree(root)
    assert (latest, text) == (step, "new")
    print(case, moment - 1)
"""


@pytest.mark.slow
def test_killed_at_every_file_operation_one_is_always_whole(quick: Path) -> None:
    """Not by chance: a save dies before its first, second, … file operation, till it survives.

    Cases: a new step, and the same step again, each with two kept and with one.
    """
    done = subprocess.run(
        [sys.executable, "-c", EVERY_MOMENT, quick], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kills = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(kills) == 4
    assert min(kills) > 20, "the hook saw too little of what saving does"


# ── A full disk ──────────────────────────────────────────────────────────────────────────────────

MESSAGE = (
    r"at \S+/run/checkpoints: checkpoint step-000002 needs at least [\d.]+ MiB, [\d.]+ MiB are free"
    r".* the last complete checkpoint is \S+/run/checkpoints/step-000001\."
    r".* run: segcredit train --resume \S+/run$"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "x"), "disk full"),
        (OSError(errno.EDQUOT, "x"), r"disk full \(quota\)"),
        (OSError(errno.EIO, "x"), "Input/output error"),
        (PermissionError(errno.EACCES, "x"), "Permission denied"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "disk full"),
        (SafetensorError('IoError(Os { code: 5, kind: Other, message: "" })'), "Input/output er"),
    ],
)
@pytest.mark.parametrize("moment", ["writing", "sealing", "renaming"])
def test_a_failing_disk_is_one_message_and_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, moment: str
) -> None:
    root = tmp_path / "run" / "checkpoints"
    before = save(root, 1)

    def fail(*_: Any) -> None:
        raise error

    def write(folder: Path) -> None:
        writes("half")(folder)
        if moment == "writing":
            fail()
        name = "fsync" if moment == "sealing" else "rename"
        monkeypatch.setattr(os, name, fail)

    with pytest.raises(CheckpointError, match=f"^{reason}.* {MESSAGE}"):
        save_checkpoint(root, "step-000002", write)
    monkeypatch.undo()
    verify(before)
    assert names(root) == ["step-000001"]
    save(root, 2)


def test_replacing_a_step_on_a_failing_disk_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.startswith(".tmp-"):
            raise OSError(errno.EIO, "x")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="the last complete checkpoint is"):
        save_checkpoint(tmp_path, "step-000001", writes("new"))
    assert names(tmp_path) == ["step-000001"]
    assert (tmp_path / "step-000001" / "state.json").read_text() == "step 1 "


def test_the_first_checkpoint_may_fail_too(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "x")

    with pytest.raises(CheckpointError, match="There is no complete checkpoint yet"):
        save_checkpoint(tmp_path / "run" / "checkpoints", "step-000001", write)


def test_an_old_one_that_cannot_be_deleted_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def fail(path: Path, target: Path) -> Path:
        if target.name.startswith(".old-"):
            raise OSError(errno.EPERM, "not yours")
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.warns(UserWarning, match="cannot delete the old checkpoint .*not yours"):
        saved = save(tmp_path, 2, keep=1)
    verify(saved)


LIMITED = """
import resource, sys
from pathlib import Path
from segcredit.train.checkpoint import CheckpointError, save_checkpoint, verify
root = Path(sys.argv[1], "run", "checkpoints")
save_checkpoint(root, "step-000001", lambda folder: (folder / "a").write_bytes(b"1" * 1000))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(root, "step-000002", lambda folder: (folder / "a").write_bytes(b"1" * 200_000))
except CheckpointError as error:
    print(error, end="")
verify(root / "step-000001")
assert [path.name for path in root.iterdir()] == ["step-000001"]
"""


def test_a_limit_on_file_sizes_is_a_failing_disk(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_matches(done.stdout, f"File too large {MESSAGE}")


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(text)


TINY_DISK = """
import os, sys, torch
from pathlib import Path
from segcredit.train.checkpoint import CheckpointError, save_checkpoint, save_state, verify
root = Path(sys.argv[1], "run", "checkpoints")
def saves(num):
    return lambda folder: save_state(folder, {"x": torch.zeros(num)})
save_checkpoint(root, "step-000001", saves(250_000))
ways = {
    "python": lambda folder: (folder / "a").write_bytes(bytes(8_000_000)),
    "safetensors": saves(2_000_000),
    "torch": lambda folder: torch.save(torch.zeros(2_000_000), folder / "a.pt"),
    "manifest": lambda folder: (folder / "a").write_bytes(bytes(
        os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize)),
}
for way, write in ways.items():
    try:
        save_checkpoint(root, "step-000002", write)
    except CheckpointError as error:
        print(error)
    verify(root / "step-000001")
    assert [path.name for path in root.iterdir()] == ["step-000001"]
save_checkpoint(root, "step-000002", saves(250_000))
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a tmpfs of 4 MB, mounted in a namespace of its own that ends with the process."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, *mount], capture_output=True).returncode
    ):
        pytest.skip("mounting a small disk needs user namespaces")
    script = f'{" ".join(mount)} && exec "$@"'
    command = [*alone, "sh", "-c", script, "sh", sys.executable, "-c", TINY_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == 4
    for message in messages:
        assert_matches(message, f"^disk full {MESSAGE}")
        free = float(message.split(" MiB are free")[0].split()[-1])
        assert 2.9 < free < 3.1, "counted after the unfinished one was removed"


# ── State without pickle ─────────────────────────────────────────────────────────────────────────


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    assert type(a) is type(b), where
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert raw(a) == raw(b), where
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b)), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert repr(a) == repr(b), where


def raw(x: Tensor) -> bytes:
    plain = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).tolist())


DTYPES = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]
STORED = {str(x): x for x in DTYPES if not str(x).removeprefix("torch.").startswith(("q", "bits"))}


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    num = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(num)
    size = (num * dtype.itemsize,)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, size, dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [pytest.param(x, id=name) for name, x in sorted(STORED.items())])
def test_every_type_keeps_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    try:
        state = {
            "many": random_bits(dtype, 3, 5),
            "one": random_bits(dtype),
            "no": random_bits(dtype, 0, 2),
        }
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"torch makes no {dtype}")
    save_state(tmp_path, state)
    loaded = load_state(tmp_path)
    for key, x in state.items():
        assert (loaded[key].dtype, loaded[key].shape) == (x.dtype, x.shape)
        assert loaded[key].view(-1).view(torch.uint8).equal(x.view(-1).view(torch.uint8))


def test_odd_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    state = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "whole": base,
        "part": base[1:3],
        "same": base,
        "conjugated": z.conj(),
        "negative": z.conj().imag,
        "nan with a payload": torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32),
    }
    save_state(tmp_path, state)
    loaded = load_state(tmp_path)
    assert_same(state, loaded)
    assert all(x.is_contiguous() for x in loaded.values())
    loaded["same"].zero_()
    assert loaded["whole"].sum() > 0, "each has its own memory"


def test_a_parameter_comes_back_as_a_tensor(tmp_path: Path) -> None:
    save_state(tmp_path, {"x": torch.nn.Parameter(torch.ones(2))})
    assert_same({"x": torch.ones(2)}, load_state(tmp_path))


def test_what_was_loaded_does_not_hang_on_the_file(tmp_path: Path) -> None:
    save_state(tmp_path, {"x": torch.ones(100_000)})
    loaded = load_state(tmp_path)
    with (tmp_path / "state.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(bytes(300_000))
    assert loaded["x"].eq(1).all()


def test_structure_comes_back_exactly(tmp_path: Path) -> None:
    state = {
        "tuple": (0.9, 0.999),
        "nested": [(), [], {}, ((1,), [2])],
        0: {"int key": 1},
        "0": {"string key": 2},
        (1, "a"): "tuple key",
        None: None,
        True: False,
        2.5: -0.0,
        "floats": [float("nan"), float("inf"), float("-inf"), 5e-324, 0.1, 1e308],
        "ints": [2**200, -(2**63), 0],
        "text": "\ud800\x00\n",
        "looks like ours": {"tensor": "0", "tuple": [1], "dict": [], "float": "x"},
    }
    save_state(tmp_path, state)
    assert_same(state, load_state(tmp_path))
    assert json.loads((tmp_path / "state.json").read_text()), "plain JSON"


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
TENSORS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda s: random_bits(dtype, *s))
)
STATES = st.dictionaries(
    st.text() | st.integers(),
    st.recursive(
        PLAIN | TENSORS,
        lambda x: st.lists(x) | st.lists(x).map(tuple) | st.dictionaries(st.integers(), x),
        max_leaves=8,
    ),
    max_size=4,
)


@given(state=STATES)
def test_any_state_comes_back(tmp_path_factory: pytest.TempPathFactory, state: dict) -> None:
    folder = tmp_path_factory.mktemp("state")
    save_state(folder, state)
    assert_same(state, load_state(folder))
    shutil.rmtree(folder)


def steps(model: torch.nn.Module, optimizer: Any, schedule: Any, generator: Any, num: int) -> None:
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_training_goes_on_bit_for_bit(tmp_path: Path, amsgrad: bool) -> None:
    def fresh() -> tuple[Any, Any, Any, torch.Generator]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=amsgrad)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return model, optimizer, schedule, torch.Generator().manual_seed(3)

    whole = fresh()
    steps(*whole, num=7)
    model, optimizer, schedule, generator = first = fresh()
    steps(*first, num=3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "generator": generator.get_state(),
        "python": random.Random(5).getstate(),
        "step": 3,
    }
    save_checkpoint(tmp_path, "step-000003", lambda folder: save_state(folder, state))
    loaded = load_state(tmp_path / "step-000003")
    assert isinstance(state["model"], OrderedDict)
    assert_same({**state, "model": dict(state["model"])}, loaded)
    random.Random().setstate(loaded["python"])
    model, optimizer, schedule, generator = second = fresh()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["schedule"])
    generator.set_state(loaded["generator"])
    steps(*second, num=4)
    assert_same(dict(whole[0].state_dict()), dict(model.state_dict()))


class Pair(tuple):
    pass


@each(
    ("bad", "message"),
    [
        (print, r"state\['a'\]\[1\] must be .* got a builtin_function_or_method"),
        (b"x", "got a bytes"),
        ({1}, "got a set"),
        (1j, "got a complex"),
        (Pair((1,)), "got a Pair"),
        (torch.eye(2).to_sparse(), "dense tensor"),
        (torch.empty(2, device="meta"), "dense tensor with data; got .* on meta"),
        ({frozenset(): 1}, r"a key of state\['a'\]\[1\]"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, bad: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_state(tmp_path, {"a": [1, bad]})
    assert names(tmp_path) == [], "nothing half-written"


def test_a_state_that_holds_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(ValueError, match="contains itself"):
        save_state(tmp_path, state)


@each(
    "text",
    [
        *("", "[", "1", "[]", "{}", '{"dict": 1}', '{"dict": [[1]]}', '{"dict": [[[], 1]]}'),
        *('{"tensor": "9", "dtype": "float32", "shape": []}', '{"float": "zz"}', '{"float": "00"}'),
        '{"dict": [["x", {"tensor": "0", "dtype": "nn", "shape": []}]]}',
        '{"dict": [["x", {"tensor": "0", "dtype": "float32", "shape": [7]}]]}',
        "[" * 100_000,
    ],
)
def test_strange_structures_are_refused(tmp_path: Path, text: str) -> None:
    save_state(tmp_path, {"x": torch.ones(2)})
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged or not a saved state"):
        load_state(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"critic\.json is missing"):
        load_state(tmp_path, "critic")
    save_state(tmp_path, {"x": torch.ones(2)}, "critic")
    tensors = tmp_path / "critic.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(tmp_path, "critic")
    tensors.unlink()
    with pytest.raises(CheckpointError, match=r"critic\.safetensors is missing"):
        load_state(tmp_path, "critic")


def test_saving_and_finding_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nsys.modules['torch'] = None\n"
        "from segcredit.train.checkpoint import latest_complete\n"
        "assert latest_complete(Path(sys.argv[1])).name == 'step-000001'\n"
    )
    save(tmp_path, 1)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
