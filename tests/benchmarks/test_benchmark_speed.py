"""benchmarks/benchmark_speed.py at its smallest size, against a stub of the server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench import write_logicvista
from stub_server import stub_server
from test_driver import HERE, constant, executable

ROOT = HERE.parents[1]


@pytest.mark.slow
def test_both_loops_are_measured(tmp_path: Path) -> None:
    data = write_logicvista(tmp_path / "bench")
    fake = f"exec {sys.executable} {HERE / 'fake_toolkit.py'}"
    script = f'#!/bin/sh\n[ "$1" = -c ] && {fake} "$@"\nshift\n{fake} -m vlmeval.run "$@"\n'
    executable(tmp_path / "environment" / "bin" / "python", script)
    typed = [sys.executable, str(ROOT / "benchmarks" / "benchmark_speed.py"), "--size", "small"]
    typed += ["--engine", "hf", "--sets", "logicvista", "--limit", "4", "--tokens", "3"]
    typed += ["--data", str(data), "--environment", str(tmp_path / "environment")]
    with stub_server(constant) as (url, seen):
        done = subprocess.run(
            [*typed, "--server", url],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([x for x in seen.bodies if "messages" in x]) == 4
    rows = [x.split() for x in done.stdout.splitlines()[-2:]]
    assert [x[:3] for x in rows] == [[x, "logicvista", "4"] for x in ("segcredit", "VLMEvalKit")]
    assert float(rows[0][3]) > 0
    assert re.search(r"the command above|Traceback", done.stdout + done.stderr) is None
