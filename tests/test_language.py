"""The project is written in plain technical English (CONTRIBUTING.md, "Language")."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACES = [
    *("segcredit", "segcredit_lab", "docs", "benchmarks", "examples", "tools"),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
]
SUFFIXES = {".py", ".md", ".yaml", ".js", ".html"}

PRIVATE = {
    # phrase: what to write instead
    "asks nothing": "defaults apply when the attribute is missing",
    "asleep": "in sleep mode",
    "by hand": "manually",
    "cannot be told from": "is not distinguishable from",
    "everything a run is": "one YAML file defines a run",
    "float32 original": "fp32 master weights",
    "float32 originals": "fp32 master weights",
    "in no time": "immediately",
    "in one breath": "with a single device synchronization",
    "knows no chat": "a base model without a chat template",
    "knows nothing of": "does not use",
    "main memory": "CPU memory",
    "mend that": "fix that",
    "of one's own": "of your own",
    "of so many prompts": "maximum number of prompts",
    "of the run's folder": "name of the run; used for its directory",
    "one watches": "the metrics to log",
    "one way of cutting": "no partition outperformed another",
    "outgrows it": "if you outgrow it",
    "passes are everyone's": "every rank must take part in the forward pass",
    "reads one row more": "runs one extra row with zero loss",
    "row the model cannot take": "a row the model cannot process",
    "run folder": "run directory",
    "run folders": "run directories",
    "same dice": "the same random seed",
    "share of chance": "skip the random numbers that belong to other ranks",
    "somebody": "name the process or user",
    "stands twice": "duplicate key",
    "the way out": "say what to type",
    "typed goes first": "command-line options override the settings",
    "whoever": "name the process or user",
    "whomever": "name the process or user",
}
BETWEEN = r"[\s#/*\"]+"  # words may be on two lines of a comment or of a string
PATTERN = re.compile(
    r"\b(" + "|".join(BETWEEN.join(map(re.escape, x.split())) for x in PRIVATE) + r")\b",
    re.IGNORECASE,
)


BRITISH = re.compile(
    r"\w*(colour|behaviour|favour|neighbour|honour|(normal|initial|optim|general|serial|recogn|"
    r"minim|maxim|summar|organ|synchron|vector)is(e|ed|es|ing|ation))\w*",
    re.IGNORECASE,
)
EARLIER_NAMES = ("RENAMED = ", '.replace("normalize=", "normalise=")')
"""Lines that read settings of runs from before their names were American."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every file of the project."""
    command = ["git", "ls-files", "-z", *PLACES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in SUFFIXES and path.exists():
            yield name, path.read_text(encoding="utf-8")


def test_spelling_is_american() -> None:
    found = [
        f"{name}:{number}: {match[0]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        if not any(x in line for x in EARLIER_NAMES)
        for match in BRITISH.finditer(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_no_private_phrases() -> None:
    found = []
    for name, text in texts():
        for match in PATTERN.finditer(text):
            phrase = " ".join(re.split(BETWEEN, match[1].lower()))
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{name}:{line}: {phrase!r}; instead: {PRIVATE[phrase]}")
    assert not found, "\n" + "\n".join(found)
