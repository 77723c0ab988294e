"""Runs of a study are spread over the visible GPUs; the test machine needs none."""

import subprocess
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
from each import each

from segcredit_lab.study import workers as pool_module
from segcredit_lab.study.workers import VISIBLE, Order, WorkerPool, start_worker, visible_devices


@each(
    ("environment", "count", "expected"),
    [
        ({}, 0, ()),
        ({}, 3, ("0", "1", "2")),
        ({VISIBLE: ""}, 0, ()),
        ({VISIBLE: "-1"}, 0, ()),
        ({VISIBLE: "0,1"}, 0, ()),
        ({VISIBLE: "2, 5"}, 2, ("2", "5")),
        ({VISIBLE: "1,99,0"}, 1, ("1",)),
        ({VISIBLE: "GPU-8932f937,GPU-0a"}, 2, ("GPU-8932f937", "GPU-0a")),
        ({VISIBLE: "MIG-11,MIG-22,MIG-33"}, 1, ("MIG-11", "MIG-22", "MIG-33")),
        ({VISIBLE: "MIG-GPU-8932f937/1/0,MIG-GPU-8932f937/2/0"}, 1,
         ("MIG-GPU-8932f937/1/0", "MIG-GPU-8932f937/2/0")),
    ],
)  # fmt: skip
def test_which_gpus_are_visible(
    environment: dict[str, str], count: int, expected: tuple[str, ...]
) -> None:
    assert visible_devices(environment, count) == expected


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The device of each process, in the order of their starts; they take orders in silence."""
    found: list[str | None] = []

    def start(log: Path, threads: int, device: str | None = None) -> "subprocess.Popen[str]":
        found.append(device)
        return subprocess.Popen(["cat"], stdin=PIPE, stdout=DEVNULL, text=True)

    monkeypatch.setattr(pool_module, "start_worker", start)
    monkeypatch.setattr(WorkerPool, "_listen", lambda self, worker: None)
    return found


def order(name: str, **model: Any) -> Order:
    return Order(name, {"model": model}, Path(name), ())


def running(pool: WorkerPool) -> dict[str, str | None]:
    return {x.order.name: x.device for x in pool.workers if x.order is not None}


def end(pool: WorkerPool, name: str) -> None:
    worker = next(x for x in pool.workers if x.order is not None and x.order.name == name)
    pool._events.put((worker, {"event": "done"}))
    assert [(x.name, event["event"]) for x, event in pool.events(1.0)] == [(name, "done")]


def test_eight_jobs_are_on_eight_gpus(started: list[str | None], tmp_path: Path) -> None:
    devices = tuple(map(str, range(8)))
    pool = WorkerPool(8, tmp_path, devices)
    for number in range(8):
        pool.begin(order(f"r{number}"))
    assert sorted(started) == sorted(devices)
    pool.close()


def test_more_jobs_than_gpus_go_round_and_a_freed_gpu_is_used_again(
    started: list[str | None], tmp_path: Path
) -> None:
    pool = WorkerPool(4, tmp_path, ("GPU-a", "GPU-b"))
    for number in range(4):
        pool.begin(order(f"r{number}"))
    assert running(pool) == {"r0": "GPU-a", "r1": "GPU-b", "r2": "GPU-a", "r3": "GPU-b"}
    end(pool, "r3")
    end(pool, "r1")
    end(pool, "r0")
    pool.begin(order("r4"))
    assert running(pool) == {"r2": "GPU-a", "r4": "GPU-b"}, "not where one runs already"
    assert len(started) == 4, "an idle process took it"
    pool.close()


def test_a_process_that_is_replaced_leaves_its_gpu_to_the_next(
    started: list[str | None], tmp_path: Path
) -> None:
    pool = WorkerPool(2, tmp_path, ("0", "1"))
    pool.begin(order("r0"))
    pool.begin(order("r1"))
    worker = next(x for x in pool.workers if x.device == "1")
    pool._events.put((worker, {"event": "gone", "message": ""}))
    list(pool.events(1.0))
    pool.begin(order("r2"))
    assert running(pool) == {"r0": "0", "r2": "1"}
    assert started == ["0", "1", "1"]
    pool.close()


def test_a_recipe_that_names_its_gpu_sees_all(started: list[str | None], tmp_path: Path) -> None:
    pool = WorkerPool(2, tmp_path, ("0", "1"))
    pool.begin(order("r0", device="cuda:1"))
    assert running(pool) == {"r0": None}
    end(pool, "r0")
    pool.begin(order("r1", device="cuda"))
    pool.begin(order("r2"))
    assert running(pool) == {"r1": "0", "r2": "1"}
    assert len(pool.workers) == 2
    pool.close()


def test_a_recipe_that_names_a_gpu_for_sampling_sees_all(
    started: list[str | None], tmp_path: Path
) -> None:
    pool = WorkerPool(1, tmp_path, ("0", "1"))
    ahead = {"model": {}, "rollout": {"ahead": 1, "device": "cuda:1"}}
    pool.begin(Order("r0", ahead, Path("r0"), ()))
    assert running(pool) == {"r0": None}
    pool.close()


def test_without_gpus_nothing_is_set(started: list[str | None], tmp_path: Path) -> None:
    pool = WorkerPool(2, tmp_path, ())
    pool.begin(order("r0"))
    pool.begin(order("r1"))
    assert started == [None, None]
    pool.close()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
@pytest.mark.parametrize("device", ["GPU-8932f937", None])
def test_a_real_worker_sees_one_gpu(
    device: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-0a,GPU-8932f937")
    worker = start_worker(tmp_path / "log.txt", 1, device)
    try:
        deadline = time.monotonic() + 20
        while not (seen := Path(f"/proc/{worker.pid}/environ").read_bytes()):  # filled after exec
            assert time.monotonic() < deadline
        found = seen.split(b"\0")
        assert [x for x in found if x.startswith(VISIBLE.encode())] == [
            f"{VISIBLE}={device or 'GPU-0a,GPU-8932f937'}".encode()
        ]
    finally:
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            pipe.close()
