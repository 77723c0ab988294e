"""environment.json says what is needed to repeat a run, and nothing about whose machine it was."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from segcredit import __version__
from segcredit.report.overview import gather_overview
from segcredit.runlog import read_run
from segcredit.runlog.environment import describe_environment, source_commit, without_secrets


def test_versions_hardware_and_command() -> None:
    found = describe_environment(["segcredit", "train", "seed=1"])
    json.dumps(found, allow_nan=False)
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "segcredit" in found["packages"]
    assert found["command"] == ["segcredit", "train", "seed=1"]
    assert 1 <= found["hardware"]["cpus"] <= (os.cpu_count() or 1)
    assert found["hardware"]["memory_gib"] > 0
    assert bool(found["hardware"]["gpus"]) == torch.cuda.is_available()
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found["started"])) < timedelta(minutes=1)


def test_a_package_that_is_only_on_the_path_has_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = importlib.metadata.distribution

    def not_installed(name: str) -> importlib.metadata.Distribution:
        if name == "segcredit":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_installed)
    assert describe_environment()["packages"]["segcredit"] == __version__
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert gather_overview([read_run(tmp_path)], [])["version"] == __version__


def test_the_host_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "a-host-of-mine")
    monkeypatch.setattr("socket.gethostname", lambda: "a-host-of-mine")
    hostname = os.uname().nodename
    text = json.dumps(describe_environment(["segcredit"]))
    assert "a-host-of-mine" not in text
    assert f'"{hostname}"' not in text


def test_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "H200"
        total_memory = 140 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    gpus = describe_environment([])["hardware"]["gpus"]
    assert gpus == [{"name": "H200", "memory_gib": 140.0}] * 2


def test_secrets_are_starred_out() -> None:
    given = [
        *("train", "--api-key", "abc", "--hub-token=def", "wandb.api_key=ghi", "db.password=x=y"),
        *("max_tokens=512", "tokenizer=qwen", "--tokens", "8", "--token", "--dry-run"),
    ]
    assert without_secrets(given) == [
        *("train", "--api-key", "***", "--hub-token=***", "wandb.api_key=***", "db.password=***"),
        *("max_tokens=512", "tokenizer=qwen", "--tokens", "8", "--token", "--dry-run"),
    ]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_changes_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    assert source_commit(package) is None, "no repository"
    git("init")
    assert source_commit(package) is None, "an installed package inside somebody's repository"
    git("add", ".")
    git("commit", "-m", "first")
    assert source_commit(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "notes.txt").touch()
    assert source_commit(package) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (package / "new.py").touch()
    assert source_commit(package) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert source_commit(package) is None, "no git"
