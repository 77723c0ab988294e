"""requirements-dev.lock pins, with hashes, everything that ``make setup`` installs but torch."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from segcredit.runlog import describe_environment

ROOT = Path(__file__).resolve().parent.parent
PINNED = re.compile(
    r"^([\w.-]+)==([^\s;\\]+)(?: ; ([^\\\n]+?))? \\\n((?:    --hash=\S+(?: \\)?\n)+)"
)
NOT_LOCKED = re.compile(r"pip|segcredit|torch|triton|nvidia-.*|cuda-.*")
"""What venv brings, ourselves, and torch with the parts that only its CUDA builds have."""
GRADERS = ("math-verify", "sympy", "mpmath", "latex2sympy2_extended", "antlr4-python3-runtime")


def locked() -> dict[str, str]:
    """Version by name, of this Python and platform."""
    text = (ROOT / "requirements-dev.lock").read_text()
    found = re.compile(PINNED.pattern, re.MULTILINE).findall(text)
    assert len(found) == len(re.findall("^[^ ]", text, re.MULTILINE)), "a line without hashes"
    for *_, hashes in found:
        assert re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", hashes)
    return {
        canonicalize_name(name): version
        for name, version, marker, _ in found
        if not marker or Marker(marker).evaluate()
    }


def test_it_covers_every_installed_distribution() -> None:
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("this is not the environment that make setup makes")
    pinned = locked()
    installed = {
        canonicalize_name(x.metadata["Name"]): x.version for x in importlib.metadata.distributions()
    }
    others = {
        name: f"{version}, locked: {pinned.get(name)}"
        for name, version in installed.items()
        if pinned.get(name) != version and not NOT_LOCKED.fullmatch(name)
    }
    assert not others, "type: rm -rf .venv && make setup; after a change of versions: make lock"


def test_it_satisfies_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    asked += project["build-system"]["requires"]
    chosen = re.findall("^[^#\n]+==.+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = locked()
    for requirement in map(Requirement, asked + chosen):
        name = canonicalize_name(requirement.name)
        if name == "torch" or (name not in pinned and str(requirement) in chosen):
            continue  # constraints may name what is not needed here
        assert name in pinned, f"{name}: type make lock"
        assert requirement.specifier.contains(pinned[name]), f"{requirement}: type make lock"
    for name in (*GRADERS, "jinja2"):
        assert canonicalize_name(name) in pinned


def test_it_names_no_place_to_download_from() -> None:
    text = (ROOT / "requirements-dev.lock").read_text()
    assert "://" not in text
    assert "index" not in text


def test_the_sandbox_of_chat_templates_is_a_fixed_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jinja2,) = (x for x in map(Requirement, project["dependencies"]) if x.name == "jinja2")
    assert not jinja2.specifier.contains("3.1.5")


def test_a_run_records_the_versions_that_decide_grades() -> None:
    packages = describe_environment(["segcredit"])["packages"]
    for name in (*GRADERS, "jinja2"):
        assert packages[name] == importlib.metadata.version(name)
