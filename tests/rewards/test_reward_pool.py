import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grading import alive, children, eventually, needs_proc

from segcredit.rewards.checks import RewardError
from segcredit.rewards.pool import Failure, Pool
from segcredit.rewards.verify import Verifier

FUNCTIONS = """
import os, signal, subprocess, sys, time

def echo(completions):
    print("noise on stdout", flush=True)
    os.write(1, b'{"rewards": [666]}\\n')
    return completions

def pid(completions):
    return [os.getpid()]

def sleep(completions):
    time.sleep(completions[0])
    return completions

def leave(completions):
    os._exit(int(completions[0]))

def segfault(completions):
    os.kill(os.getpid(), signal.SIGSEGV)

def dies_if_used(completions, seen=[]):
    seen.append(1)
    if len(seen) > 1:
        os._exit(1)
    return completions

def grandchild(completions):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if completions[0]:
        time.sleep(60)
    return [child.pid]

def asks(completions):
    return [len(sys.stdin.read())]
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    pools = []

    def make(name: str, workers: int = 1, deadline: float = 10.0) -> Pool:
        pools.append(
            Pool(["function", str(file), name], role=name, workers=workers, deadline=deadline)
        )
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def ask(pool: Pool, *numbers: float) -> list[object]:
    replies = pool.ask([{"arguments": {"completions": [x]}, "unsendable": {}} for x in numbers])
    return [r if isinstance(r, Failure) else r["rewards"][0] for r in replies]


def test_order_is_kept_whoever_is_faster(serve: Callable[..., Pool]) -> None:
    times = [0.3, 0.0, 0.1, 0.0, 0.2, 0.0]
    assert ask(serve("sleep", workers=3), *times) == times


def test_prints_do_not_spoil_the_protocol(serve: Callable[..., Pool]) -> None:
    assert ask(serve("echo"), 1.0, 2.0, 3.0) == [1.0, 2.0, 3.0]


def test_reading_stdin_does_not_steal_requests(serve: Callable[..., Pool]) -> None:
    assert ask(serve("asks"), 1.0, 2.0) == [0.0, 0.0]


def test_a_request_larger_than_the_pipe(serve: Callable[..., Pool]) -> None:
    request = {"arguments": {"completions": [1.0] * 300_000}, "unsendable": {}}
    (reply,) = serve("echo").ask([request])
    assert reply["rewards"] == [1.0] * 300_000


@needs_proc
def test_late_workers_are_killed_and_replaced(serve: Callable[..., Pool]) -> None:
    before = children(os.getpid())
    pool = serve("sleep", workers=2, deadline=0.4)
    start = time.monotonic()
    late, fine = ask(pool, 60.0, 0.0)
    assert late == Failure("late", "was stopped after 0.4 s")
    assert fine == 0.0
    assert ask(pool, 0.01) == [0.01]
    assert time.monotonic() - start < 8.0
    pool.close()
    assert children(os.getpid()) == before


def test_a_worker_that_dies_says_how(serve: Callable[..., Pool]) -> None:
    assert ask(serve("leave"), 3) == [Failure("died", "ended with exit status 3")]
    assert ask(serve("leave"), 75) == [Failure("died", "ran out of memory")]
    (died,) = ask(serve("segfault"), 1)
    assert isinstance(died, Failure)
    assert "signal 11" in died.reason


def test_a_used_worker_that_dies_is_given_another_try(serve: Callable[..., Pool]) -> None:
    """It may have been the memory of a long life."""
    assert ask(serve("dies_if_used"), 1.0, 2.0, 3.0) == [1.0, 2.0, 3.0]


@pytest.mark.slow
@needs_proc
def test_a_late_workers_children_are_killed_too(serve: Callable[..., Pool]) -> None:
    pool = serve("grandchild", deadline=1.0)
    (pid,) = ask(pool, 0.0)
    assert alive(int(pid))
    assert isinstance(ask(pool, 1.0)[0], Failure)
    assert eventually(lambda: not alive(int(pid)))


def test_a_worker_outlives_the_thread_that_needed_it_first(serve: Callable[..., Pool]) -> None:
    """Linux kills a worker when the thread that started it ends."""
    pool, heard = serve("pid"), []
    thread = threading.Thread(target=lambda: heard.extend(ask(pool, 1.0)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert ask(pool, 2.0) == heard


def test_threads_may_share_a_pool(serve: Callable[..., Pool]) -> None:
    pool, heard = serve("echo", workers=2), {}
    threads = [
        threading.Thread(target=lambda i=i: heard.update({i: ask(pool, i, i + 0.5)}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {i: [i, i + 0.5] for i in range(4)}


@needs_proc
def test_nothing_starts_before_it_is_needed_and_nothing_stays(serve: Callable[..., Pool]) -> None:
    before = children(os.getpid())
    pool = serve("echo", workers=4)
    assert pool.ask([]) == []
    assert children(os.getpid()) == before
    with pool:
        ask(pool, 1.0)
        assert len(children(os.getpid()) - before) == 1  # as many as there are requests
    assert children(os.getpid()) == before
    assert ask(pool, 2.0) == [2.0]  # closed is not broken
    serve("echo")  # another, left to the garbage collector
    del pool


@needs_proc
def test_the_garbage_collector_stops_workers(tmp_path: Path) -> None:
    before = children(os.getpid())
    (tmp_path / "f.py").write_text(FUNCTIONS)
    pool = Pool(["function", str(tmp_path / "f.py"), "echo"], role="echo")
    ask(pool, 1.0)
    assert children(os.getpid()) != before
    del pool
    assert children(os.getpid()) == before


@needs_proc
def test_an_interrupt_leaves_no_worker_and_no_stale_answer(serve: Callable[..., Pool]) -> None:
    before = children(os.getpid())
    pool = serve("sleep")
    ask(pool, 0.0)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ask(pool, 1.0)
    timer.join()
    assert children(os.getpid()) == before
    assert ask(pool, 0.01) == [0.01]


HANGS = """
from segcredit.rewards.verify import Verifier
verifier = Verifier(deadline=60.0, workers=1)
print(verifier([("12", "24/2")])[0].reason, flush=True)
verifier([("12", r"\\binom{10^8}{5 \\cdot 10^7}")])
"""


@pytest.mark.slow
@needs_proc
def test_killing_the_parent_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGS)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "right: 24/2\n"
        (worker,) = children(parent.pid)
        time.sleep(0.3)  # now it is busy in C code, and reads no pipe
        parent.kill()
        parent.wait()
    assert eventually(lambda: not alive(worker))


AFTER_A_FORK = """
import os
from segcredit.rewards.verify import Verifier
verifier = Verifier(workers=1)
print(verifier([("12", "24/2")])[0].reason, flush=True)
if os.fork() == 0:
    print(verifier([("12", "36/3")])[0].reason, flush=True)
    raise SystemExit
os.wait()
if os.fork() == 0:
    raise SystemExit  # without having graded anything
os.wait()
(worker,) = verifier.pool._workers
before = worker.process.pid
print(verifier([("12", "48/4")])[0].reason, before == verifier.pool._workers[0].process.pid)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_may_fork(tmp_path: Path) -> None:
    """The child gets workers of its own, the parent keeps its own, and both end by themselves."""
    script = tmp_path / "script.py"
    script.write_text(AFTER_A_FORK)
    program = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["right: 24/2", "right: 36/3", "right: 48/4 True"]
    assert (done.returncode, done.stderr) == (0, "")


def verifier_with(tmp_path: Path, module: str) -> Verifier:
    """A verifier whose processes find this instead of math-verify."""
    (tmp_path / "math_verify.py").write_text(module)
    verifier = Verifier(workers=1)
    verifier.pool.environment["PYTHONPATH"] = str(tmp_path)
    return verifier


def test_missing_math_verify_says_what_to_install(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'math_verify'\", name='math_verify')"
    verifier = verifier_with(tmp_path, missing)
    with pytest.raises(RewardError, match=r"cannot start.*pip install 'math-verify"):
        verifier([("12", "24/2")])
    assert verifier([("12", "12")])[0].right  # which needs no process


def test_workers_that_always_die_at_start_are_given_up(tmp_path: Path) -> None:
    verifier = verifier_with(tmp_path, "import os; os._exit(9)")
    with pytest.raises(RewardError, match=r"cannot start: its process ended with exit status 9, 3"):
        verifier([("12", "24/2")])


def test_a_worker_that_dies_at_start_is_survived(tmp_path: Path) -> None:
    once = f"""
import os, sys
marker = {str(tmp_path / "marker")!r}
if not os.path.exists(marker):
    open(marker, "w").close()
    os._exit(9)
sys.path.remove({str(tmp_path)!r})
del sys.modules["math_verify"]
import math_verify
"""
    verifier = verifier_with(tmp_path, once)
    assert verifier([("12", "24/2")])[0].right
    verifier.close()


@needs_proc
def test_the_verifiers_process_is_light_and_confined() -> None:
    with Verifier(workers=1).pool as pool:
        start = time.monotonic()
        assert pool.ask([{"gold": "1", "answer": "2/2"}])[0]["right"]
        assert time.monotonic() - start < 5.0  # about half a second when nothing else runs
        (worker,) = pool._workers
        loaded = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "torch" not in loaded
        limits = Path(f"/proc/{worker.process.pid}/limits").read_text().splitlines()
        soft = {line[:26].strip(): line[26:].split()[0] for line in limits}
        assert soft["Max address space"] == str(2 << 30)
        assert soft["Max file size"] == "0"
        assert soft["Max processes"] == "0"
