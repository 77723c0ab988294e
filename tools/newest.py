"""Try the newest releases of transformers, peft and datasets in an environment of its own.

``make test-newest`` runs this. It reports and does not block: the exit code is 0 unless
``--strict`` is given. torch stays the exact version of constraints.txt.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("transformers", "peft", "datasets")
"""Packages whose newest releases are tried."""
LOCK = "requirements-dev.lock"
Versions = dict[str, str]
"""Installed versions by package."""
SHOWN = 20
"""Maximum number of failed tests that are listed."""
LISTED = (
    "import json; from importlib.metadata import distributions; "
    "print(json.dumps({x.name.lower().replace('_', '-'): x.version for x in distributions()}))"
)


class InstallError(Exception):
    """The environment could not be made."""


@dataclass
class TestResult:
    """Counts of a test run, and the names of the tests that failed."""

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)


def torch_pin(text: str) -> str:
    """Return the line of constraints.txt that pins torch."""
    (line,) = [x for x in text.splitlines() if x.startswith("torch==")]
    return line


def install(environment: Path) -> tuple[Versions, Versions]:
    """Install the lock, then the newest releases; return the versions after each of the two."""
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not python.exists():
        _run([sys.executable, "-m", "venv", environment])
    _run([*pip, "--require-hashes", "--no-deps", "-r", LOCK])
    with tempfile.TemporaryDirectory(prefix="segcredit-newest-") as folder:
        constraint = Path(folder) / "torch.txt"
        constraint.write_text(torch_pin((ROOT / "constraints.txt").read_text()) + "\n")
        _run([*pip, "-c", constraint, "torch"])
        locked = json.loads(_run([python, "-c", LISTED]))
        _run([*pip, "-c", constraint, "--upgrade", *PACKAGES])
    _run([*pip, "--no-deps", "--no-build-isolation", "-e", "."])
    return locked, json.loads(_run([python, "-c", LISTED]))


def run_tests(environment: Path, tests: list[str]) -> TestResult:
    """Run the fast tests of these folders or files."""
    with tempfile.TemporaryDirectory(prefix="segcredit-newest-") as folder:
        report = Path(folder) / "report.xml"
        command = [
            *(environment / "bin" / "python", "-m", "pytest", *tests, "-m", "not slow"),
            *("-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", f"--junit-xml={report}"),
        ]
        done = subprocess.run(command, cwd=ROOT, env=_environment())
        if not report.is_file():
            return TestResult(failed=[f"pytest ended with exit code {done.returncode}"])
        return read_report(report.read_text(encoding="utf-8"))


def read_report(text: str) -> TestResult:
    """Read the counts and failures of a JUnit report."""
    result = TestResult()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.append(name)
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    if not result.passed and not result.failed:
        result.failed.append("no test ran")
    return result


def table(locked: Versions, newest: Versions, result: TestResult) -> str:
    """Return one line per package: those that are tried, and others that they changed."""
    changed = [name for name, x in newest.items() if name in locked and locked[name] != x]
    verdict = "failed" if result.failed else "passed"
    rows = [("package", "locked", "newest", "tests")]
    for name in dict.fromkeys([*PACKAGES, *sorted(changed)]):
        versions = locked.get(name, "none"), newest.get(name, "none")
        rows.append((name, *versions, verdict if name in changed else f"{verdict}, as locked"))
    widths = [max(len(row[x]) for row in rows) for x in range(3)]
    lines = [
        "  ".join([*(x.ljust(w) for x, w in zip(row[:3], widths, strict=True)), row[3]])
        for row in rows
    ]
    counts = f"{result.passed} passed, {len(result.failed)} failed, {result.skipped} skipped"
    failed = [f"failed: {name}" for name in result.failed[:SHOWN]]
    return "\n".join([*lines, counts, *failed])


def _environment() -> dict[str, str]:
    """Return the environment variables without another Python's paths, with one thread each."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {k: x for k, x in os.environ.items() if k not in left_out} | {"OMP_NUM_THREADS": "1"}


def _run(command: list[str | Path]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        words = " ".join(map(str, command))[:300]
        output = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-15:]
        raise InstallError("\n".join([f"{words} ended with exit code {done.returncode}", *output]))
    return done.stdout


def main() -> int:
    """Install, test and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a test fails")
    asked = parser.parse_args()
    started = time.monotonic()
    environment = asked.environment.absolute()  # its bin/python is a link: do not resolve it
    try:
        locked, newest = install(environment)
    except InstallError as error:
        print(f"the newest releases cannot be installed: {error}")
        return int(asked.strict)
    print(f"installed after {time.monotonic() - started:.0f} s", flush=True)
    result = run_tests(environment, asked.tests)
    print(f"\n{table(locked, newest, result)}\nafter {time.monotonic() - started:.0f} s")
    return int(asked.strict and bool(result.failed))


if __name__ == "__main__":
    sys.exit(main())
