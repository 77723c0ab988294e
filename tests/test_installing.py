"""The commands that messages tell users to type are true for every way to install segcredit."""

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from each import each

from segcredit import installing
from segcredit.installing import install_command

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "segcredit-0.2.0-py3-none-any.whl"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not a clone: the package is in site-packages."""
    monkeypatch.setattr(installing, "_ROOT", tmp_path / "site-packages")
    return tmp_path


def origin(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    monkeypatch.setattr(installing, "_origin", lambda: found)


def test_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    monkeypatch.setattr(installing, "_ROOT", clone)
    assert install_command("vllm") == f"pip install -e '{clone}[vllm]'"
    monkeypatch.chdir(clone)
    assert install_command("vllm") == "pip install -e '.[vllm]'"
    assert install_command("verl", ".venv/bin/pip") == ".venv/bin/pip install -e '.[verl]'"


def test_from_an_index(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin(monkeypatch)
    assert install_command("lora") == "pip install 'segcredit[lora]'"


def test_from_a_wheel(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = installed / "a b" / WHEEL
    origin(monkeypatch, url=wheel.as_uri(), archive_info={})
    needs = ["torch>=2.11", "peft>=0.20; extra == 'lora'", "vllm<1,>=0.24; extra == 'vllm'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    assert install_command("lora") == "pip install 'peft>=0.20'"  # the file is gone
    wheel.parent.mkdir()
    wheel.touch()
    assert install_command("lora") == f"pip install '{wheel}[lora]'"


def test_from_a_repository(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://host.test/segcredit.git"
    origin(monkeypatch, url=url, vcs_info={"vcs": "git", "commit_id": "abc", "x": 1})
    assert install_command("lora") == f"pip install 'segcredit[lora] @ git+{url}@abc'"
    origin(monkeypatch, url=f"https://host.test/{WHEEL}", archive_info={})
    assert install_command("lora") == f"pip install 'segcredit[lora] @ https://host.test/{WHEEL}'"


@each("text", [None, "", "[]", "null"])
def test_pip_recorded_nothing(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return text

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    assert installing._origin() == {}


def test_every_message_names_an_extra_that_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = {x: x.read_text(encoding="utf-8") for x in sorted((ROOT / "segcredit").rglob("*.py"))}
    named = {y for text in code.values() for y in re.findall(r"install_command\([\"'](\w+)", text)}
    assert named
    assert named <= set(project["optional-dependencies"])
    fixed = [x.name for x, text in code.items() if re.search(r"install\s+['\"]?segcredit\[", text)]
    assert fixed == ["installing.py"]  # its docstring
