"""``segcredit benchmark``: output files, several models, and one message for each mistake."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from segcredit.cli import app
from segcredit.installing import install_command
from segcredit.report.benchmarks import gather_benchmarks
from segcredit.runlog import read_run

SHORT = ("--max-tokens", "6", "--sets", "logicvista")


def segcredit(*arguments: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "100"})
    return runner.invoke(app, ["benchmark", *(str(x) for x in arguments)])


def error_of(*arguments: object) -> str:
    result = segcredit(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr


def test_two_models_side_by_side(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").symlink_to(model)
    result = segcredit("other", model, "--data", data, *SHORT, "--limit", 4)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs/benchmark-first-4"
    assert sorted(x.name for x in folder.iterdir() if x.is_file()) == [
        *("report.html", "table.csv", "table.json", "table.md", "table.tex")
    ]
    lines = (folder / "other/answers/logicvista.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert "other LogicVista: accuracy" in result.output
    assert "4 of 447 questions" in result.output
    table = (folder / "table.md").read_text()
    assert "| other (first 4 questions of each set) | – |" in table
    assert "| tiny-vl (first 4 questions of each set) | – |" in table
    assert "| 3B +SAPO *(paper)* | 46.26 |" in table


def test_answers_of_a_checkpoint_are_in_the_report_of_its_run(
    model: Path, data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    policy = shutil.copytree(model, run / "checkpoints" / "step-000007" / "policy")
    (run / "config.yaml").write_text("name: run\n")
    result = segcredit(policy, "--data", data, *SHORT, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"segcredit report {run}" in result.output.replace("\n", "")
    found = gather_benchmarks([read_run(run)])
    (shown,) = found.data["sets"]
    lines = (tmp_path / "out").glob("*/answers/logicvista.jsonl")
    given = [json.loads(x)["response"] for x in next(lines).read_text().splitlines()]
    assert [x["answers"]["step-000007"][0]["response"] for x in shown["questions"]] == given
    assert found.data["settings"]["step-000007"].startswith("temperature 1.0, top_p 1.0")


def test_json(model: Path, data: Path, tmp_path: Path) -> None:
    result = segcredit(model, "--data", data, *SHORT, "-o", tmp_path / "out", "--json", "--paper")
    assert result.exit_code == 0, result.output
    (table,) = json.loads(result.stdout)
    assert table["rows"][0]["name"] == "tiny-vl"
    settings = json.loads(next((tmp_path / "out").glob("*/settings.json")).read_text())
    assert (settings["temperature"], settings["top_p"]) == (0.6, 0.95)


def test_a_set_of_your_own(model: Path, data: Path, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "from segcredit.benchmarks.sets.logicvista import LogicVista\n"
        "class Mine(LogicVista):\n"
        "    name = 'mine'\n"
        "    title = 'My set'\n"
    )
    own = ("--max-tokens", 6, "--sets", f"{code}:Mine", "-o", tmp_path / "out")
    result = segcredit(model, "--data", data, *own)
    assert result.exit_code == 0, result.output
    assert "My set: accuracy" in result.output
    assert len((next((tmp_path / "out").glob("*/answers/mine.jsonl"))).read_text()) > 100


def test_list(data: Path) -> None:
    result = segcredit("--list", "--data", data, "--sets", "logicvista,gsm8k")
    assert result.exit_code == 0, result.output
    assert "logicvista" in result.output
    assert "447" in result.output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "expected at least one model; got none. Type: segcredit benchmark MODEL"),
        (("m", "--sets", "logicvsta"), "unknown set 'logicvsta'. Did you mean 'logicvista'?"),
        (("nowhere", *SHORT), "nowhere"),
        (("MODEL", "MODEL", *SHORT), "expected each model once"),
        (("MODEL", *SHORT, "--engine", "vlm"), "unknown rollout engine 'vlm'"),
        (("MODEL", *SHORT, "--judge", "http://127.0.0.1:9/v1"), "leave --judge out"),
    ],
)
def test_mistakes(
    model: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple,
    problem: str,
) -> None:
    monkeypatch.setattr("segcredit.rewards.client.PAUSE", 0.01)  # between attempts to reach a judge
    typed = [model if x == "MODEL" else x for x in arguments]
    assert problem in error_of(*typed, "--data", data, "-o", tmp_path / "out")


def test_without_vllm(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segcredit.rollout.vllm.NAMES", ())
    problem = error_of(model, "--data", data, *SHORT, "--engine", "vllm", "-o", tmp_path / "out")
    assert install_command("vllm") in problem


def test_a_failure_keeps_the_answers_so_far(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from segcredit.benchmarks import run

    graded, calls = run._graded, []

    def failing(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("No space left on device")
        return graded(*arguments)

    monkeypatch.setattr(run, "_graded", failing)
    command = (model, "--data", data, *SHORT, "--chunk", 4, "-o", tmp_path / "out")
    result = segcredit(*command)
    assert result.exit_code == 2
    assert "The answers so far are kept in" in result.output
    (answers,) = (tmp_path / "out").glob("*/answers/logicvista.jsonl")
    assert len(answers.read_text().splitlines()) == 4
    assert segcredit(*command).exit_code == 0
    assert len(answers.read_text().splitlines()) == 9
