"""Short runs of every method give the recorded results, bit for bit; see record.py."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from identity.record import (
    CASES,
    ENVIRONMENT,
    EXPECTED,
    METHODS,
    OLD_RUNS_STEPS,
    ROUNDED,
    differences,
    machine,
    share_apart,
)

import segcredit
from segcredit.algorithms import ALGORITHMS

pytestmark = pytest.mark.slow
RECORDING: dict[str, Any] = json.loads(EXPECTED.read_text())
ADVICE = "If this change is meant: python tests/identity/record.py --write"


@pytest.fixture(scope="module")
def record() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Record a case in processes of its own, without the suite's shape checks."""
    root = Path(segcredit.__file__).parents[1]
    script = Path(__file__).with_name("record.py")
    server = subprocess.Popen(
        [sys.executable, str(script), "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(root)},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    known: dict[str, dict[str, Any]] = {}

    def ask(case: str) -> dict[str, Any]:
        if case not in known:
            print(case, file=server.stdin, flush=True)
            known[case] = json.loads(server.stdout.readline())
        assert "error" not in known[case], known[case]["error"]
        return known[case]["found"]

    yield ask
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


def test_every_method_is_recorded() -> None:
    assert METHODS.keys() == ALGORITHMS.keys()
    assert RECORDING["cases"].keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_results_are_the_recorded_ones(case: str, record: Callable[[str], dict[str, Any]]) -> None:
    here, there = machine(), RECORDING["machine"]
    expected = RECORDING["cases"][case]
    if here == there:
        lines = list(differences(expected, record(case)))
        assert not lines, "\n".join([f"{len(lines)} differences", *lines[:40], ADVICE])
        return
    reason = f"recorded with {there}, this is {here}"
    versions = ("torch", "transformers")
    if case in ROUNDED or any(here[key] != there[key] for key in versions):
        pytest.skip(reason)
    assert share_apart(expected, record(case)) < 0.02, f"{reason}. {ADVICE}"


@pytest.mark.parametrize("name", OLD_RUNS_STEPS)
def test_old_runs_load_resume_evaluate_and_report(
    name: str, record: Callable[[str], dict[str, Any]]
) -> None:
    """On every machine and with every version of the dependencies."""
    found = record(f"old_run/{name}")
    steps = found["metrics"]["optimize"]["step"]
    assert steps == RECORDING["cases"][f"old_run/{name}"]["metrics"]["optimize"]["step"]
    assert found["evaluate"]["prompts"] == 4
    assert found["report"]["results"]
