"""``segcredit analyze`` from the outside."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import typer
from recorded_runs import metric_lines, row, some_rollouts, write_run
from typer.testing import CliRunner, Result

from segcredit.runlog import read_run
from segcredit_lab.analysis import AnalysisSettings, analyze_runs
from segcredit_lab.analysis.analyses import NAMES
from segcredit_lab.analysis.lift import BOUNDARY_CRITIC
from segcredit_lab.analysis.probe import prompt_of
from segcredit_lab.analysis.reading import CannotAnalyzeError
from segcredit_lab.commands import analyze as command

APP = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
APP.command(epilog=command.EPILOG)(command.analyze)
FEW = ("--resamples", 10)


def segcredit_analyze(*arguments: object) -> Result:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"})
    return runner.invoke(APP, [str(x) for x in arguments])


def done(*arguments: object) -> str:
    result = segcredit_analyze(*arguments, *FEW)
    assert result.exit_code == 0, result.output
    return result.stdout


def error_of(*arguments: object) -> str:
    result = segcredit_analyze(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return result.stderr.removeprefix("error: ").strip()


def files(folder: Path) -> list[str]:
    return sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file())


def kinds(*names: str) -> list[str]:
    return sorted(f"{name}.{kind}" for name in names for kind in ("json", "png", "svg"))


@pytest.fixture
def one_picture_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SVG alone is drawn: PNGs take as long again, and other tests look at them."""
    monkeypatch.setattr("segcredit_lab.analysis.drawing.png", lambda analysis: b"")


def test_a_critic_that_learns_at_every_token_means_something_between_boundaries(
    tmp_path: Path,
) -> None:
    spec = {"name": "sapo", "value_everywhere": True}
    run = write_run(tmp_path, rollouts=some_rollouts(), algorithm=spec)
    assert BOUNDARY_CRITIC not in " ".join(done(run, "--only", "lift").split())
    critic = json.loads((run / "analysis" / "lift.json").read_text())["numbers"]["critic"]
    assert critic["at_every_token"] is True
    rows = [x for step in some_rollouts().values() for x in step]
    reward = np.concatenate([np.full(len(x["value"]), x["reward"]) for x in rows])
    value = np.concatenate([x["value"] for x in rows])
    assert critic["r_squared"] == pytest.approx(
        1 - np.var(reward - value) / np.var(reward), abs=1e-5
    )


@pytest.mark.slow
def test_a_real_run(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    said = done(run, "--probe")
    without = {"lift", "jumps"}  # the critic is trained at boundaries only
    assert files(run / "analysis") == kinds(*{*NAMES} - without)
    for name in without:
        assert f"no {name} for run: the critic is trained only at segment boundaries" in said
    asked = done(run, "--only", "lift", "--only", "jumps")
    assert files(run / "analysis") == kinds(*NAMES)
    flat = " ".join((said + asked).split())
    for title in ("Lift: run", "Lift by a value probe (R² = ", "Segments: run", "Value loss"):
        assert title in flat
    assert BOUNDARY_CRITIC in flat
    assert said.endswith(f"figures  {run}/analysis\n")
    numbers = json.loads((run / "analysis" / "lift.json").read_text())["numbers"]
    assert numbers["per_step"]["step"] == [2, 3, 4, 5]
    assert numbers["resamples"] == 10
    assert {*numbers["by_threshold"]} == {"0.9", "0.8", "0.95"}
    ratio = json.loads((run / "analysis" / "ratio_bias.json").read_text())["numbers"]
    assert (ratio["above_bound"], ratio["units_left_out"]) == (0, 0)


@pytest.mark.usefixtures("one_picture_each")
def test_several_runs(tmp_path: Path) -> None:
    for name, seed in (("x/run", 0), ("y/run", 1), ("z", 2)):
        write_run(tmp_path, name, some_rollouts(3, seed=seed), metric_lines(4), seed=seed)
    runs = [tmp_path / name for name in ("x/run", "y/run", "z")]
    two = ("--only", "within", "--only", "entropy")
    said = done(*runs, "-o", tmp_path / "out", *two)
    own = [f"{name}/{file}" for name in ("run", "run-2", "z") for file in kinds("within")]
    assert files(tmp_path / "out") == sorted([*own, *kinds("entropy")])
    assert "sapo, 3 seeds" in said
    assert "run (2)" in said
    done(*runs, *two)
    assert files(runs[0] / "analysis") == kinds("within", "entropy")
    assert files(runs[1] / "analysis") == kinds("within")


@pytest.mark.usefixtures("one_picture_each")
def test_a_run_without_values(tmp_path: Path) -> None:
    """GRPO has no critic: what it lacks is told, the rest is made."""
    rollouts = some_rollouts(3, without=("value", "entropy"))
    run = write_run(tmp_path, "grpo", rollouts, metric_lines(3), algorithm="grpo")
    said = done(run)
    assert files(run / "analysis") == kinds("segments", "value_loss", "entropy", "length")
    assert (
        "no lift for grpo: it needs entropy and value; the rollouts have no entropy: the method "
        "does not need it." in said
    )
    assert (
        "no within for grpo: it needs value and segment; the rollouts have no value: the method "
        "has no critic." in said
    )
    left = segcredit_analyze(run, "--only", "lift", "-o", tmp_path / "nothing")
    assert left.exit_code == 2
    assert "no lift for grpo" in left.stdout
    assert not (tmp_path / "nothing").exists()
    assert left.stderr == "error: no analysis could be made.\n"
    other = write_run(tmp_path, "other", some_rollouts(2, without=("value",)))
    left = segcredit_analyze(other, "--only", "lift")
    assert "no value: the method has no critic. Use a probe: --probe." in left.stdout


def test_an_empty_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    result = segcredit_analyze(run)
    assert result.exit_code == 2
    assert result.stderr == "error: no analysis could be made.\n"
    assert "no segments for run: the run has no recorded responses" in result.stdout
    assert "no entropy for run: no run recorded entropy during optimization." in result.stdout
    assert not (run / "analysis").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_picture_each")
def test_hostile_rows(tmp_path: Path) -> None:
    """NaN, infinities, texts for numbers, lists of wrong lengths, and no lists at all."""
    rng = np.random.default_rng(0)
    rows = [row(rng, n) for n in range(40)]
    nan, inf = math.nan, math.inf
    rows[0]["value"][1], rows[1]["value"][0] = nan, inf
    rows[2]["entropy"][2], rows[3]["ratio"][0] = -inf, nan
    rows[4]["ratio"] = [0.0] * len(rows[4]["tokens"])
    rows[5]["reward"], rows[6]["reward"] = nan, "much"
    rows[7]["value"], rows[8]["entropy"] = rows[7]["value"][:-1], "high"
    rows[9]["segment"] = [-1] * len(rows[9]["tokens"])
    rows[10]["segment"][0] = -1
    rows[11]["segment"], rows[12]["segment"] = None, [1e300] * len(rows[12]["tokens"])
    rows[13] = {"tokens": []}
    rows[14] = {}
    rows[15]["ratio"] = ["<b>"] * len(rows[15]["tokens"])
    rows[16]["value"] = [[1]] * len(rows[16]["tokens"])
    rows[17]["tokens"] = {"a": 1}
    rows[18]["value"][0] = 10**400
    rows[19]["ratio"] = [1e308] * len(rows[19]["tokens"])
    lines = metric_lines(3)
    lines[-1]["value_loss"], lines[-2]["value_loss"] = nan, -inf
    rollouts = {11: rows[:20], 12: rows[20:]}
    everywhere = {"name": "sapo", "value_everywhere": True}
    said = done(write_run(tmp_path, "run", rollouts, lines, algorithm=everywhere))
    assert files(tmp_path / "run" / "analysis") == kinds(*(x for x in NAMES if x != "lift_probe"))
    for path in (tmp_path / "run" / "analysis").glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    assert "nan" not in said
    lift = json.loads((tmp_path / "run" / "analysis" / "lift.json").read_text())["numbers"]
    assert lift["tokens_left_out"] > 10


@pytest.mark.usefixtures("one_picture_each")
def test_hostile_metrics(tmp_path: Path) -> None:
    """Lines without a step, steps that are none, numbers without bounds."""
    lines = metric_lines(4)
    odd = [{"stage": "optimize", "value_loss": 1.0, "entropy": 1.0}]
    odd += [{**lines[-1], "step": x} for x in (None, "x", [1], True, -1, 10**400, math.inf)]
    for number, x in enumerate([10**400, -(10**400), 1e308, -1e308, "a", [1], {}, None]):
        odd.append({"step": 20 + number, "stage": "optimize", "value_loss": x, "entropy": x})
    run = write_run(tmp_path, "run", some_rollouts(2), [*odd, *lines, *odd])
    other = write_run(tmp_path, "other", some_rollouts(2), [*lines, *odd], seed=1)
    said = done(run, other, "--only", "value_loss", "--only", "entropy", "--only", "length")
    assert "nan" not in said
    for path in (run / "analysis").glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
    without = write_run(tmp_path, "without", metrics=odd[:8])
    assert "no analysis could be made" in error_of(without)


@pytest.mark.parametrize("given", [1, True, "algorithm", [1], {"reward": 1}])
def test_a_hostile_record_of_objects(tmp_path: Path, given: object) -> None:
    run = write_run(tmp_path, "run", some_rollouts(2), given_in_python=given)
    found = analyze_runs([read_run(run)], AnalysisSettings(resamples=2), ["ratio_bias", "within"])
    assert len(found.done) + len(found.skipped) == 2


def test_a_hostile_list_of_pictures(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "?"}]}
    for images in (1, "a", {"a": 1}):
        assert prompt_of({**asked, "images": images}, tmp_path).images == ()
    for name in ("\0", "a" * 5000, "../x", [1]):
        with pytest.raises(CannotAnalyzeError, match="is not in the run directory"):
            prompt_of({**asked, "images": [name]}, tmp_path)


def test_a_hostile_name(tmp_path: Path) -> None:
    name = "[bold]$x$ <script> \x1b[31m\n角"
    run = write_run(tmp_path, name, some_rollouts(3), metric_lines(3))
    said = done(run, "--only", "segments", "--only", "length")
    assert "\x1b" not in said.replace(str(run), "")
    assert "Segments: [bold]$x$ <script> ␛[31m↵角" in said
    assert files(run / "analysis") == kinds("segments", "length")


@pytest.mark.usefixtures("one_picture_each")
def test_options(tmp_path: Path) -> None:
    run, place = write_run(tmp_path, rollouts=some_rollouts(7)), tmp_path / "new" / "place"
    options = ("-d", "0.75", "--window", "3", "--resamples", 30, "--seed", 5)
    result = segcredit_analyze(run, "--only", "lift", *options, "-o", place)
    assert result.exit_code == 0, result.output
    assert "d = 0.75" in result.stdout
    assert files(place) == kinds("lift")
    numbers = json.loads((place / "lift.json").read_text())["numbers"]
    assert list(numbers["by_threshold"]) == ["0.75", "0.8", "0.95"]
    assert (numbers["resamples"], numbers["trend"]["window"]) == (30, 3)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/nowhere"], r"/nowhere is not a run: there is no such folder\."),
        (["RUN", "--only", "lfit"], "unknown analysis 'lfit'; .* Did you mean 'lift'"),
        (["RUN", "--threshold", "90"], "between 0 and 1; got 90.0. .* pass 0.9"),
        (["RUN", "-o", "FILE"], "FILE"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "FILE").write_text("")
    places = {"RUN": write_run(tmp_path, "RUN", some_rollouts(1)), "FILE": tmp_path / "FILE"}
    message = error_of(*(places.get(x, x) for x in arguments))
    assert re.search(expected, message), message


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, rollouts=some_rollouts(2))
    path = run / "rollouts" / "step-000011.jsonl"
    path.write_text("{}\nnot json\n{}\n")
    assert f"line 2 of {path} must be a JSON object" in error_of(run)


def test_help_shows_examples() -> None:
    text = " ".join(re.sub(r"[│╭╰─╮╯]", "", segcredit_analyze("--help").stdout).split())
    for example in ("segcredit analyze runs/demo-", "-o compared", "--only lift --only lift_probe"):
        assert example in text
    for name in NAMES:
        assert name in text, "what --only takes"
