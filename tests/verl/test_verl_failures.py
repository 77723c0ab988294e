"""A worker is killed: one readable message, and the same command goes on from the checkpoint."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
from running import base, finish, run, start
from toy import make_model, make_rows

from segcredit.integrations.verl.dumps import TOKENS
from segcredit.runlog.files import read_lines

MESSAGE = "segcredit: the run stopped"


def workers(pid: int) -> list[int]:
    """Processes of the FSDP workers that belong to a run."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        title = " ".join(process.info["cmdline"] or [])
        if title.startswith("ray::WorkerDict") and os.getsid(process.info["pid"]) == pid:
            found.append(process.info["pid"])
    return sorted(found)


def test_kill_a_worker_and_resume(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    make_rows(tmp_path / "rows.jsonl")
    folder = tmp_path / "run"
    settings = base(folder, tmp_path / "model", tmp_path / "rows.jsonl", 5) | {
        "trainer.v1.trainer_mode": "segment_sync",
        "trainer.save_freq": 2,
        "trainer.rollout_data_dir": folder / "dumps",
        "+segment.recorded_responses": 3,
        "+segment.recorded_every": 2,
    }
    note = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    process = start(folder, settings)
    try:
        deadline = time.time() + 300
        while not (note.exists() and note.read_text() == "2"):
            assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
            assert time.time() < deadline
            time.sleep(0.2)
        os.kill(workers(process.pid)[0], signal.SIGKILL)
    finally:
        ran = finish(process, folder, seconds=150)
    assert ran.code not in (0, -1), "it neither went on nor hung"
    lines = [x for x in ran.output.splitlines() if MESSAGE in x]
    assert lines, ran.output[-3000:]
    said = lines[-1]
    assert "because a worker" in said
    assert "is complete: run the same command again" in said
    assert str(folder / "checkpoints") in said
    # the last that the command itself says, other processes' lines aside
    own = [x for x in ran.output.splitlines() if x.strip() and not re.search(r"pid=\d+\)", x)]
    assert own[-1].startswith(f"RuntimeError: {MESSAGE}")
    assert len(own[-1]) < 700

    saved = int(note.read_text())
    again = run(folder, settings)
    assert again.code == 0, again.output[-3000:]
    assert f"Resuming from {folder / 'checkpoints'}/global_step_{saved}" in again.output
    steps = [row["training/global_step"] for row in again.metrics]
    assert steps == list(range(saved + 1, 6))
    earlier = folder / "metrics-001.jsonl"
    assert earlier.exists(), "the log of the first part is kept"
    for step in range(saved + 1, 6):
        dumped = read_lines(folder / "dumps" / f"{step}.jsonl")
        assert len(dumped) == 32
        with_tokens = [row[TOKENS] for row in dumped if row.get(TOKENS)]
        assert len(with_tokens) == (3 if step % 2 == 0 else 0)
        assert all(len(x["segment"]) == len(x["tokens"]) for x in with_tokens)
