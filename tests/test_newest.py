"""``make test-newest``: what it reads, what it prints and when it blocks."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="x"/></testcase>
<testcase classname="tests.a" name="broken"><error message="x"/></testcase>
<testcase classname="tests.a" name="left"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, "newest", raising=False)
    import newest

    return newest


def test_the_table_names_what_changed(newest: ModuleType) -> None:
    locked = {"transformers": "5.22.2", "peft": "0.21.2", "tokenizers": "0.23.3"}
    result = newest.read_report(REPORT)
    assert (result.passed, result.skipped) == (1, 1)
    assert result.failed == ["tests.a.bad", "tests.a.broken"]
    installed = {"transformers": "6.0.0", "peft": "0.21.2", "tokenizers": "0.24.0", "extra": "1"}
    assert newest.table(locked, installed, result).splitlines() == [
        "package       locked  newest  tests",
        "transformers  5.22.2  6.0.0   failed",
        "peft          0.21.2  0.21.2  failed, as locked",
        "datasets      none    none    failed, as locked",
        "tokenizers    0.23.3  0.24.0  failed",
        "1 passed, 2 failed, 1 skipped",
        "failed: tests.a.bad",
        "failed: tests.a.broken",
    ]
    assert newest.read_report("<testsuites/>").failed == ["no test ran"]


def test_torch_stays_the_exact_version(newest: ModuleType) -> None:
    assert newest.torch_pin((ROOT / "constraints.txt").read_text()) == "torch==2.13.0"


@pytest.mark.parametrize("strict", [False, True])
def test_it_blocks_only_if_strict(
    newest: ModuleType,
    strict: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["newest.py", "environment", "tests/models", *(["--strict"] if strict else [])]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(newest, "install", lambda environment: ({}, {"transformers": "6.0.0"}))
    failing = newest.TestResult(passed=1, failed=["tests.a.bad"])
    monkeypatch.setattr(newest, "run_tests", lambda environment, tests: failing)
    assert newest.main() == int(strict)
    assert "failed: tests.a.bad" in capsys.readouterr().out
    monkeypatch.setattr(newest, "run_tests", lambda environment, tests: newest.TestResult(3))
    assert newest.main() == 0

    def unreachable(environment: Path) -> None:
        raise newest.InstallError("no index")

    monkeypatch.setattr(newest, "install", unreachable)
    assert newest.main() == int(strict)
    assert "cannot be installed: no index" in capsys.readouterr().out


def test_make_passes_strict_and_tests_on() -> None:
    def made(*settings: str) -> str:
        command = ["make", "--dry-run", "test-newest", *settings]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "tools/newest.py .venv-newest tests/models tests/rollout" in made()
    assert "--strict" not in made()
    assert "tests/train --strict" in made("TESTS=tests/train", "STRICT=1")


def test_ci_reports_on_the_newest_releases_and_on_what_it_skips(tmp_path: Path) -> None:
    """A copy of .ci/run whose ``make`` only notes what it is asked for."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    note = 'echo "made $*"; [ "$1" != test-newest ] || exit 1'
    for name, line in {"make": note, "chromium": "true"}.items():
        tool = tmp_path / "bin" / name
        tool.write_text(f"#!/bin/sh\n{line}\n")
        tool.chmod(0o755)

    def ran(**more: str) -> str:
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **more}
        command = ["bash", str(script)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    said = ran()
    assert "made test-newest TESTS=tests/models" in said
    assert "did not finish within 5 minutes" in said
    assert "skipped: tests with real pretrained models" in said
    assert "skipped: tests with the real VLMEvalKit" in said
    assert "skipped" not in ran(SEGCREDIT_REAL_MODELS="x", SEGCREDIT_VLMEVALKIT="x")
