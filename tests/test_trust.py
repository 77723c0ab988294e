"""Reading a run directory of another user runs no code that it names, without permission."""

import base64
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_cli import run
from tiny_runs import write_recipe
from typer.testing import CliRunner

from segcredit.cli import app
from segcredit.config import load_recipe, load_run_recipe, merge_settings, read_settings
from segcredit.evaluate.checkpoint import evaluate_checkpoint
from segcredit.runlog import read_run, resume_command
from segcredit.runlog.storage import seal
from segcredit_lab.analysis.probe import load_policy
from segcredit_lab.analysis.reading import CannotAnalyzeError

CODED = base64.b64encode(b"hostile.py:score").decode()
URL_KEY = base64.b64encode(b"url").decode()
STAGES = [{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 1}]
HOSTILE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def score(completions, **columns):
    return [0.0] * len(completions)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, stages=STAGES, reward="exact")
    done = run(folder, "train", recipe, "--folder", "run")
    assert done.code == 0, done.complained
    return folder / "run"


def theirs(trained: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A run that came by mail: its config.yaml was changed."""
    copy = shutil.copytree(trained, folder / "their run")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    change(config)
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    return copy


@pytest.fixture
def with_reward(trained: Path, tmp_path: Path) -> Path:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    reward = f"{tmp_path}/hostile.py:score"
    return theirs(trained, tmp_path, lambda config: config.update(reward=reward))


@pytest.fixture
def no_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SVG alone is drawn, which takes half the time."""
    monkeypatch.setattr("segcredit_lab.analysis.drawing.png", lambda analysis: b"")


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn at the end of a run, which takes longer than the run."""
    monkeypatch.setattr("segcredit.report.curves.draw_curves", lambda run, path: None)
    monkeypatch.setattr("segcredit.commands.report.draw_analyses", lambda runs: None)


def segcredit(*arguments: object) -> tuple[int, str]:
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"})
    result = runner.invoke(app, [str(x) for x in arguments])
    return result.exit_code, result.output + result.stderr


@pytest.mark.usefixtures("no_png")
@pytest.mark.parametrize(
    "command",
    [
        ["train", "--resume", "RUN", "stages.1.steps=2"],
        ["train", "--resume", "RUN", "--check"],
        ["train", "--resume", "RUN", "reward.deadline=9"],
        ["evaluate", "RUN"],
        ["evaluate", "RUN/checkpoints/step-000002"],
        ["report", "RUN"],
        ["analyze", "RUN", "--probe"],
    ],
)
def test_a_runs_reward_function_is_not_run(
    with_reward: Path, tmp_path: Path, command: list[str]
) -> None:
    before = (with_reward / "config.yaml").read_bytes()
    code, said = segcredit(*(x.replace("RUN", str(with_reward)) for x in command))
    assert not (tmp_path / "ran").exists()
    assert (with_reward / "config.yaml").read_bytes() == before
    if command[0] in ("train", "evaluate"):
        assert code == 2
        assert "hostile.py:score" in said
        resume = f"segcredit train --resume '{with_reward}' --trust-run"
        assert (resume if command[0] == "train" else f"{command[0]} '{with_reward}") in said
        assert "--trust-run" in said


NAMES_CODE: list[tuple[str, dict[str, Any]]] = [
    ("data.world", {"data": {"world": "CODE", "settings": {}}}),
    ("algorithm", {"algorithm": "CODE"}),
    ("algorithm.name", {"algorithm": {"name": "CODE", "lam": 1.0}}),
    ("algorithm.partition", {"algorithm": {"name": "sapo", "partition": "CODE"}}),
    (
        "algorithm.partition.name",
        {"algorithm": {"name": "sapo", "partition": {"name": "CODE"}}},
    ),
    ("rollout.engine", {"rollout": {"engine": "CODE"}}),
    ("model.tiny", {"model": {"tiny": "CODE"}}),
]


@pytest.mark.parametrize(("key", "change"), NAMES_CODE)
def test_no_code_of_a_run_is_imported(
    trained: Path, tmp_path: Path, key: str, change: dict[str, Any]
) -> None:
    """Reading a recipe imports the code it names, so a run's settings are checked before."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    code = f"{tmp_path}/hostile.py:score"
    named = json.loads(json.dumps(change).replace("CODE", code))
    run = theirs(trained, tmp_path, lambda config: config.update(merge_settings(config, named)))
    for command in (["train", "--resume", run], ["evaluate", run, "--data", "x.jsonl"]):
        exit_code, said = segcredit(*command)
        assert exit_code == 2
        assert f"{key}: {code}" in said.replace("\n", ""), said
        assert "--trust-run" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_png")
def test_report_and_analyze_import_no_code_of_a_run(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)

    def name_code_everywhere(config: dict[str, Any]) -> None:
        for _, change in NAMES_CODE:
            text = json.dumps(change).replace("CODE", f"{tmp_path}/hostile.py:score")
            config.update(merge_settings(config, json.loads(text)))

    run = theirs(trained, tmp_path, name_code_everywhere)
    for command in ("report", "analyze"):
        segcredit(command, run)
        assert not (tmp_path / "ran").exists(), command


@pytest.mark.usefixtures("no_pictures")
def test_code_that_an_override_replaces_is_not_imported(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    before = yaml.safe_load((trained / "config.yaml").read_text())
    hostile = {"world": f"{tmp_path}/hostile.py:score", "settings": {}}
    copy = theirs(trained, tmp_path, lambda config: config["data"].update(hostile))
    settings = json.dumps(before["data"]["settings"])
    own = [f"data.world={before['data']['world']}", f"data.settings={settings}"]
    code, said = segcredit("train", "--resume", copy, "stages.1.steps=2", *own)
    assert code == 0, said
    assert "data.world" in said, "the change is reported"
    assert not (tmp_path / "ran").exists()


HIDDEN: dict[str, Callable[[str], str]] = {
    "a value": lambda text: re.sub(r"(?m)^  world: .*", f"  world: !!binary {CODED}", text),
    "a key": lambda text: re.sub(
        r"(?m)^reward: .*", f"reward: {{name: judge, !!binary {URL_KEY}: http://127.0.0.1:9}}", text
    ),
    "a set": lambda text: re.sub(r"(?m)^algorithm: .*", "algorithm: !!set {sapo}", text),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_code_and_servers_cannot_be_hidden_as_bytes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Pydantic takes bytes for text, so !!binary passed the search for code and URLs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text(HOSTILE)
    run = theirs(trained, tmp_path, lambda config: config.update(reward="exact", algorithm="sapo"))
    hidden = HIDDEN[way]((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(hidden)
    assert "!!" in hidden
    for command in (["train", "--resume", run, "--check"], ["evaluate", run], ["report", run]):
        code, said = segcredit(*command)
        assert code == 2
        assert "expected plain values" in said
    assert not (tmp_path / "ran").exists()


def test_a_relative_file_is_found_above_the_run_folder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    run = shutil.copytree(trained, project / "runs" / "first")
    config = yaml.safe_load((run / "config.yaml").read_text()) | {"reward": "code/mine.py:score"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (project / "code").mkdir()
    (project / "code" / "mine.py").write_text(HOSTILE)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "code").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert load_run_recipe(run, trust_run=True).reward == f"{project}/code/mine.py:score"
    code, said = segcredit("train", "--resume", run, "--check", "--trust-run")
    assert code == 0, said
    with pytest.raises(ValueError, match=r"reward: code/mine.py:score"):
        load_run_recipe(run)
    (elsewhere / "code" / "mine.py").write_text(HOSTILE)
    assert load_run_recipe(run, trust_run=True).reward == f"{elsewhere}/code/mine.py:score"
    assert yaml.safe_load((run / "config.yaml").read_text()) == config


def test_plain_settings_that_look_like_code_need_no_trust(trained: Path, tmp_path: Path) -> None:
    data = {"suffix": "Answer:Yes", "template": "{question}", "world": "derived_variables"}
    run = theirs(trained, tmp_path, lambda config: config["data"].update(data))
    assert load_run_recipe(run, ["data.template=null"]).data.suffix == "Answer:Yes"


@pytest.mark.usefixtures("no_pictures")
def test_it_runs_when_it_is_asked_for(with_reward: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    code, said = segcredit("train", "--resume", with_reward, "stages.1.steps=2", "--trust-run")
    assert code == 0, said
    assert mark.exists()
    mark.unlink()
    code, said = segcredit("evaluate", with_reward, "--prompts", 2, "-k", 1, "--trust-run")
    assert code == 0, said
    assert mark.exists()


def test_code_that_is_typed_needs_no_flag(with_reward: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(HOSTILE)
    for reward in ("exact", f"{own}:score"):
        evaluate = ("evaluate", with_reward, "--prompts", 2, "-k", 1, "--reward", reward)
        code, said = segcredit(*evaluate)
        assert code == 0, said
        recipe = load_run_recipe(with_reward, [f"reward={reward}"])
        assert recipe.reward == reward
    assert load_run_recipe(with_reward, trust_run=True).reward != "exact"
    with pytest.raises(ValueError, match="would run code on this machine"):
        load_run_recipe(with_reward)


def test_a_reward_with_settings_is_not_run_either(trained: Path, tmp_path: Path) -> None:
    reward = {"name": "hostile.py:score", "deadline": 5.0}
    copy = theirs(trained, tmp_path, lambda config: config.update(reward=reward))
    with pytest.raises(ValueError, match=r"reward\.name: hostile\.py:score"):
        evaluate_checkpoint(str(copy))
    for overrides in ([], ["reward.deadline=9"], ["algorithm.lam=0.9"]):
        with pytest.raises(ValueError, match=r"reward\.name: hostile\.py:score"):
            load_run_recipe(copy, overrides)
    load_run_recipe(copy, ["reward.name=own.py:score"])


def test_a_models_own_code_is_not_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))

    def trusting(config: dict[str, Any]) -> None:
        config["model"]["trust_remote_code"] = "yes"  # which the recipe takes for true

    copy = theirs(trained, tmp_path, trusting)
    checkpoint = copy / "checkpoints" / "step-000002"
    stated = checkpoint / "policy" / "config.json"
    auto = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}
    changed = json.loads(stated.read_text()) | {"auto_map": auto, "model_type": "own"}
    stated.write_text(json.dumps(changed))
    ran = tmp_path / "ran"
    (checkpoint / "policy" / "code.py").write_text(f"import os; os.mkdir({str(ran)!r})")
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint)
    for call in (
        lambda: evaluate_checkpoint(str(copy)),
        lambda: load_run_recipe(copy),
        lambda: load_policy(read_run(copy), checkpoint),
    ):
        with pytest.raises((ValueError, CannotAnalyzeError), match=r"trust_remote_code.*--trust"):
            call()
    assert not ran.exists()
    with pytest.raises(ValueError, match="cannot be read"):
        evaluate_checkpoint(str(copy), trust_run=True)
    assert ran.exists(), "with the flag it would have run, so the test can fail"
    load_run_recipe(copy, ["model.trust_remote_code=true"])
    load_run_recipe(copy, trust_run=True)


def test_the_printed_command_has_the_flag_only_where_it_is_needed(
    trained: Path, with_reward: Path
) -> None:
    assert resume_command(trained) == f"segcredit train --resume {trained}"
    assert resume_command(with_reward) == f"segcredit train --resume '{with_reward}' --trust-run"


def test_the_flag_is_for_runs() -> None:
    code, said = segcredit("train", "demo", "--trust-run")
    assert code == 2
    assert "--resume RUN" in said


def test_a_model_with_a_config_yaml_is_no_run(trained: Path, tmp_path: Path) -> None:
    model = shutil.copytree(trained / "checkpoints" / "step-000002" / "policy", tmp_path / "model")
    (model / "config.yaml").write_text("reward: hostile.py:score\nprecision: bf16\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "a = 1 ; a ?", "answer": "1"}\n')
    found = evaluate_checkpoint(str(model), [str(rows)], "exact", samples=1, max_tokens=4)
    assert found.prompts == 1
    with pytest.raises(ValueError, match=r"is not a run: it is a model.*config\.json"):
        read_run(model)


# ── Small files that would take all time or memory ───────────────────────────────────────────────

LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
BOMBS = {
    "aliases": LAUGHS,
    "merge keys": MERGES,
    "a value that contains itself": "a: &a [*a]\n",
    "deep lists": "a: " + "[" * 20_000,
    "deep mappings": "".join(f"{' ' * n}a:\n" for n in range(1_000)),
    "many values": "a: [" + "0," * 50_000 + "]",
    "many keys": "{" + "".join(f"k{n}: 0, " for n in range(20_000)) + "}",
    "a huge file": "a: '" + "x" * 2_000_000 + "'",
    "a long number": "a: 0x" + "f" * 200_000,
    "a number to the base of sixty": "a: 1" + ":59" * 60_000,
    "a truth that is none": "a: !!bool maybe",
    "no date": "a: !!timestamp x",
    "a number that is none": "a: !!int ''",
}


LONGEST = ("many values", "many keys", "deep lists")


@pytest.mark.parametrize(
    "bomb", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONGEST)) for x in BOMBS]
)
def test_a_small_file_cannot_take_all_time(bomb: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(BOMBS[bomb])
    begun = time.process_time()
    for read in (read_run, load_run_recipe, lambda run: load_recipe(str(run / "config.yaml"))):
        with pytest.raises(ValueError, match=r"config\.yaml"):
            read(folder)
    resume_command(folder)
    assert time.process_time() - begun < 20, "minutes, or all memory, before there were limits"


def test_aliases_of_ordinary_recipes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("a: &a {lr: 1e-5, steps: [1, 2]}\nb: {<<: *a, lr: 2e-5}\nc: [*a, *a]\n")
    assert read_settings(path) == {
        "a": {"lr": 1e-5, "steps": [1, 2]},
        "b": {"lr": 2e-5, "steps": [1, 2]},
        "c": [{"lr": 1e-5, "steps": [1, 2]}] * 2,
    }
