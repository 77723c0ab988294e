"""``segcredit benchmark --driver vlmevalkit``: options, table and messages."""

import sys
from pathlib import Path

import pytest
from stub_server import stub_server, system_prompts
from test_benchmark_command import error_of, segcredit
from test_driver import HERE, constant, executable
from toolkit_tables import small_tables

DRIVER = ("--driver", "vlmevalkit", "--sets", "logicvista,wemath")


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[object, ...]:
    """Options with a fake environment and small tables."""
    small_tables(tmp_path / "data")
    script = f'#!/bin/sh\nexec {sys.executable} {HERE / "fake_toolkit.py"} "$@"\n'
    executable(tmp_path / "environment" / "bin" / "python", script)
    options = ("--data", tmp_path / "data", "--environment", tmp_path / "environment")
    return (*DRIVER, *options, "-o", tmp_path / "out")


def test_the_table(prepared: tuple[object, ...], tmp_path: Path) -> None:
    with stub_server(constant) as (url, seen):
        done = segcredit("my-model", *prepared, "--server", url)
    assert done.exit_code == 0, done.output
    assert "You FIRST think about the reasoning process" in next(iter(system_prompts(seen)))
    assert "my-model logicvista: VLMEvalKit has no score of its own: VLMEvalKit scores" in (
        done.output
    )
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| my-model | – | 25.00 | – | 50.00 |" in table
    assert "| my-model (VLMEvalKit's own scores) | – | – | – | 12.38 |" in table
    assert "--server: the weights of the server are unknown" in " ".join(done.output.split())
    assert "NaN" not in (tmp_path / "out" / "table.json").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sets", "gsm8k"), "VLMEvalKit has no set for 'gsm8k'"),
        (("--engine", "hf"), "--engine has no effect with --driver vlmevalkit"),
        (("--server", "localhost"), "--server needs the URL"),
        (("other", "--server", "http://localhost:9/v1"), "--server has one model"),
    ],
)
def test_mistakes(prepared: tuple[object, ...], options: tuple[str, ...], said: str) -> None:
    assert said in " ".join(error_of("my-model", *prepared, *options).split())


def test_options_of_the_driver_need_it() -> None:
    said = error_of("my-model", "--sets", "logicvista", "--server", "http://localhost:8000/v1")
    assert "--server needs --driver vlmevalkit" in said


def test_without_vllm(
    prepared: tuple[object, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = " ".join(error_of(model, *prepared).split())
    assert "vLLM is not installed" in said
    assert "pass --server http://HOST:PORT/v1" in said
