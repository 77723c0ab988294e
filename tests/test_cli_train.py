"""``segcredit train`` and ``demo`` from the outside."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from forked_cli import run, start
from PIL import Image
from tiny_runs import RECIPE, TITLE, assert_same_run, metrics, write_recipe
from typer.testing import CliRunner, Result

from segcredit.cli import app
from segcredit.commands.output import print_error
from segcredit.commands.report import finish_report
from segcredit.config import load_recipe, parse_recipe
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.train import build, trainer
from segcredit.train.build import make_plan

SHORT: dict[str, Any] = {
    "stages": [
        {"kind": "warm_start", "steps": 1, "batch": 4},
        {"kind": "optimize", "steps": 2},
    ],
}


def segcredit(*arguments: object) -> Result:
    """In this process; for what ends before it trains."""
    runner = CliRunner(env={"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "80"})
    return runner.invoke(app, [str(x) for x in arguments])


def error_of(result: Result) -> str:
    """One message on stderr, exit code 2, nothing else."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("error: ")


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a model was loaded")

    for module, name in ((build, "_policy"), (build, "load_policy"), (trainer, "build")):
        monkeypatch.setattr(module, name, refuse)


# ── Help ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "examples"),
    [
        ("demo", ["segcredit demo", "segcredit demo algorithm=ppo seed=1"]),
        (
            "train",
            [
                "segcredit train demo",
                "segcredit train my.yaml optimizer.lr=1e-6 algorithm=ppo seed=1",
                "segcredit train my.yaml --check",
                "segcredit train --resume runs/",
            ],
        ),
        ("evaluate", ["segcredit evaluate runs/demo-", "--samples 8 --temperature 0.6"]),
    ],
)
def test_help_shows_examples(command: str, examples: list[str]) -> None:
    result = segcredit(command, "--help")
    assert result.exit_code == 0
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╰─╮╯]", "", result.stdout).split())
    assert "Examples" in text
    for example in examples:
        assert example in text


def test_examples_of_the_help_are_true(tmp_path: Path) -> None:
    """Their overrides can be made."""
    load_recipe("demo", ["optimizer.lr=1e-6", "algorithm=ppo", "seed=1"])
    load_recipe("demo", ["stages.3.steps=20"])


# ── Mistakes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_model_is_loaded")
@each(
    ("arguments", "expected"),
    [
        (["dmo"], "no recipe 'dmo': neither a YAML file nor one of demo.* Did you mean 'demo'?"),
        (["demo", "seed"], "an override is key.path=value, such as optimizer.lr=1e-5; got 'seed'."),
        (["demo", "sed=1"], "sed: unknown key. Did you mean 'seed'?"),
        (["demo", "stages.0.step=1"], "stages.0.step: unknown key. Did you mean 'steps'?"),
        (["demo", "algorithm=sappo"], "algorithm: unknown method 'sappo'. Did you mean 'sapo'?"),
        (["demo", "reward=mth"], "reward: unknown reward 'mth'. Did you mean 'math'?"),
        (
            ["demo", "data.world=shapegrid"],
            "data: unknown world 'shapegrid'. Did you mean 'shape_grid'?",
        ),
        (["demo", "model.device=gpu"], "model.device: expected auto, cpu, cuda or cuda:0"),
        (["demo", "stages.0.phase=see"], "stages.0.phase: shape_grid has the phases look, solve;"),
        (["--resume", "/nowhere"], "/nowhere is not a run: there is no such folder."),
    ],
)
def test_mistakes_end_in_one_message(arguments: list[str], expected: str) -> None:
    message = error_of(segcredit("train", *arguments))
    assert re.search(expected.replace("?", r"\?"), message), message


def test_all_mistakes_are_told_at_once() -> None:
    wrong = ["sed=1", "optimizer.lr=fast", "stages.0.step=1", "algorithm=sappo", "reward=mth"]
    lines = error_of(segcredit("train", "demo", *wrong)).splitlines()
    assert lines[0].endswith("demo: 5 mistakes")
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "name a recipe, for example: segcredit train demo"),
        (["demo", "--resume", "x"], "give a recipe or --resume RUN, not both"),
        (["--resume", "x", "--folder", "y"], "--resume already names the run directory"),
        (["demo", "--chek"], "No such option: --chek"),
    ],
)
def test_misused_options(tmp_path: Path, arguments: list[str], expected: str) -> None:
    call = run(tmp_path, "train", *arguments)
    assert call.code == 2
    (line,) = call.complained.splitlines()
    assert expected in line
    assert call.said == ""


def test_ctrl_c_before_training_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "make_plan", interrupt)
    result = segcredit("train", "demo")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "Stopped.\n", "")


def test_long_paths_are_not_broken_in_two(tmp_path: Path) -> None:
    folder = tmp_path / ("a folder whose name is long " * 6)
    folder.mkdir()
    message = error_of(segcredit("train", "--resume", folder))
    assert str(folder) in message


# ── Plans ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_model_is_loaded")
def test_check_prints_the_plan_and_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, data__suffix="many words " * 20)
    result = segcredit("train", recipe, "--check", "seed=3")
    assert result.exit_code == 0, result.output
    said, _, rest = result.stdout.partition("settings that differ from the defaults")
    for line in (
        "model: tiny qwen2 with random weights, float32, trains all weights\n",
        "prompts: generated (derived_variables), 8 held out for each evaluation\n",
        "reward: reward.py:by_length\n",
        "method: sapo (kl=0.01)\n",
        "needs: entropy, logp_ref, value\n",
        "2 imitate (stages.1) 2 steps, 3 train critic (stages.2) 3 steps, 4 reinforce (stages.3) 8",
        "a step: 8 responses, 2 mini-batches of 4, 1 epoch\n",
    ):
        assert line in said
    made = load_recipe(str(recipe), ["seed=3"])
    settings, _, _ = rest.partition("first training prompt")
    shown = yaml.safe_load(settings.split("\n", 1)[1])
    assert parse_recipe(shown) == made
    assert shown["seed"] == 3
    assert "top_p" not in settings
    content = make_plan(load_recipe(str(recipe), ["seed=3"])).first_prompt.messages[0]["content"]
    _, _, shown = rest.partition("first training prompt as the model reads it (derived_variables/0")
    lines = shown.split("\n")
    assert re.fullmatch(r"/train/0, \d+ tokens\):", lines[0])
    assert lines[1] == "  <|im_start|>user"
    assert lines[2].startswith(f"  {content[:40]}")
    assert rest.endswith(
        "\nchecks:\n  settings: valid\n  rows: the first generated prompts fit the model\n"
        "  reward: reward.py:by_length graded two responses to the first training row\n"
        "recipe, data and reward are valid; no model was loaded\n"
    )
    assert result.stdout.count("\n") < 50
    written = {x.name for x in tmp_path.iterdir()} - {"__pycache__"}  # Python's own, of reward.py
    assert written == {"recipe.yaml", "reward.py"}


@pytest.mark.usefixtures("no_model_is_loaded")
def test_check_prints_all_settings_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path)
    said = segcredit("train", recipe, "--check", "--verbose").stdout
    assert "\nparts: PolicyGradient(credit=GAE(over=TopEntropy(" in said
    _, _, rest = said.partition("\nall settings:\n")
    settings = yaml.safe_load(rest.partition("first training prompt")[0])
    assert settings == load_recipe(str(recipe), []).as_dict()
    assert "--verbose requires --check" in segcredit("train", recipe, "--verbose").output


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rollout__prompts": 7}, "7 responses, 2 mini-batches of 3 or 4, 1 epoch"),
        (
            {"algorithm": "restem", "stages__2": {"kind": "optimize", "steps": 1}},
            "8 responses, up to 2 mini-batches of what the method selects from them, 1 epoch",
        ),
    ],
)
def test_check_prints_the_sizes_that_mini_batches_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = segcredit("train", write_recipe(tmp_path, **settings), "--check")
    assert f"a step: {said}\n" in result.stdout, result.output


@pytest.mark.usefixtures("no_model_is_loaded")
def test_check_shows_a_long_prompt_with_images_shortened(tmp_path: Path) -> None:
    world = make_world("shape_grid")
    model = Policy.tiny("qwen2_5_vl", world.tokenizer(), hidden=32, layers=1, heads=4)
    model.save(tmp_path / "model")
    Image.new("RGB", (84, 84), "red").save(tmp_path / "0.png")
    text = "\n".join(["<image>list ?", *["list " * 60] * 20, "end ?"])
    row = {"problem": text, "answer": "1", "images": ["0.png"]}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 4)
    train = str(tmp_path / "train.jsonl")
    recipe = write_recipe(
        tmp_path,
        model={"path": str(tmp_path / "model")},
        data={"train": train},
        reward=f"{tmp_path}/reward.py:by_length",
        stages=[{"kind": "optimize", "steps": 1}],
        rollout={"prompts": 4, "max_tokens": 4},
    )
    said = segcredit("train", recipe, "--check", f"data.test={train}")
    assert said.exit_code == 0, said.output
    _, _, shown = said.stdout.partition("first training prompt as the model reads it (train:1, ")
    shown, _, checks = shown.partition("checks:\n")
    assert "  rows: 4 training and 4 held-out rows fit the model\n" in checks
    _, *lines, last = shown.split("\n")
    assert last == ""
    assert lines[:2] == [
        "  <|im_start|>user",
        "  <|vision_start|><image><|vision_end|>list ?",
    ]
    assert lines[2].count("list") < 60
    assert " … " in lines[2]
    assert lines[6] == "  … 14 more lines …"
    assert lines[-3:] == ["  end ?<|im_end|>", "  <|im_start|>assistant", ""]
    assert len(lines) == 12
    assert "\nprompts: 4, 4 held out for each evaluation\n" in said.stdout
    assert f"to predict it: segcredit plan {recipe} data.test={train}\n" in said.stdout


# ── Runs ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_runs_config_repeats_it(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    first = run(tmp_path, "train", recipe, "seed=5", "algorithm.lam=9e-1")
    assert first.code == 0, first.complained
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", folder.name)
    again = run(tmp_path, "train", folder / "config.yaml", "--folder", "again")
    assert again.code == 0, again.complained
    assert_same_run(folder, tmp_path / "again")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["seed"], config["algorithm"]["lam"]) == (5, 0.9)

    refused = run(tmp_path, "train", recipe, "--folder", "again")
    assert refused.code == 2
    assert re.fullmatch(
        rf"error: {tmp_path}/again already contains a run \(.*\)\. Resume it: segcredit train "
        rf"--resume {tmp_path}/again --trust-run\. Or choose another folder\.\n",
        refused.complained,
    )
    finished = run(tmp_path, "train", "--resume", "again")
    assert finished.code == 0
    assert_same_run(folder, tmp_path / "again")


def test_two_processes_do_not_write_one_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    first = start(tmp_path, "train", recipe, "--folder", "run", "stages.0.steps=100000")
    assert first.wait_until(lambda: TITLE.search(first.said) is not None)
    second = run(tmp_path, "train", "--resume", "run")
    assert second.code == 2
    assert second.complained.startswith(
        f"error: process {first.pid} is writing to the run {tmp_path}/run, "
        f"and two writers would damage it."
    )
    first.signal(signal.SIGKILL)
    first.wait()


def test_the_demo(tmp_path: Path) -> None:
    """Much less of it, with all its kinds of stage."""
    small = ["model.hidden=32", "model.layers=1", "threads=1"]
    small += [f"stages.{number}.steps=1" for number in range(4)]
    small += ["stages.0.batch=2", "stages.1.batch=2", "rollout.prompts=4", "evaluation.prompts=4"]
    call = run(tmp_path, "demo", *small, "--folder", "run", pictures=True)
    assert call.code == 0, call.complained
    for line in (
        "model   Qwen2_5_VLForConditionalGeneration",
        "\nstages  1 imitate (stages.0) 1 step, 2 imitate (stages.1) 1 step, "
        "3 train critic (stages.2) 1 step, 4 reinforce (stages.3) 1 step\n",
        "\n1 imitate (stages.0): 1 step\n",
        "\n4 reinforce, step 1/1: held-out accuracy",
    ):
        assert line in call.said
    assert f"\ncurves  {tmp_path}/run/plots/curves.png\n" in call.said
    assert call.said.endswith(f"\nmodel   {tmp_path}/run/checkpoints/step-000004/policy\n")
    with Image.open(tmp_path / "run" / "plots" / "curves.png") as picture:
        assert picture.width > 500
    stages = [line["stage"] for line in metrics(tmp_path / "run")]
    assert [x for x in stages if x != "warning"] == [
        *("warm_start", "warm_start", "pretrain_critic"),
        *("evaluation", "optimize", "evaluation"),
    ]


def test_curves_that_cannot_be_drawn_do_not_spoil_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("name: x")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "stage": "optimize", "reward": 0.5}\n')
    (tmp_path / "plots").write_text("a file where a folder should be")
    curves, _ = finish_report(tmp_path, print_error)
    assert curves is None
    assert capsys.readouterr().err.startswith("error: the curves could not be drawn: ")


# ── Rows ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A recipe with a model on disk, and files of rows of which four are bad."""
    world = make_world("derived_variables", **RECIPE["data"]["settings"])
    Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4).save(tmp_path / "model")
    good = [
        json.dumps({"problem": x.messages[0]["content"], "answer": x.answer})
        for x in world.prompts("train", 0, 12)
    ]
    train = [*good[:3], "not json", *good[3:6], '{"problem": "?"}', *good[6:9], '{"answer": "1"}']
    (tmp_path / "train.jsonl").write_text("\n".join(train) + "\n")
    (tmp_path / "test.jsonl").write_text("\n".join(["[]", *good[9:]]) + "\n")
    data = {"train": ["train.jsonl"], "test": ["test.jsonl"]}
    return write_recipe(
        tmp_path,
        model={"path": str(tmp_path / "model")},
        data=data,
        stages=[{"kind": "optimize", "steps": 1}],
    )


def test_bad_rows_are_told_by_file_and_line_before_training(tmp_path: Path, rows: Path) -> None:
    call = run(tmp_path, "train", rows, "--folder", "run")
    assert call.code == 2
    lines = call.complained.splitlines()
    assert lines[0] == "error: 4 bad rows:"
    assert [line.split(": ")[0] for line in lines[1:5]] == [
        *("train.jsonl:4", "train.jsonl:8", "train.jsonl:12"),
        "test.jsonl:1",
    ]
    assert "--skip-bad-rows" in lines[5]
    assert call.said == ""
    assert not (tmp_path / "run").exists(), "nothing was begun"


@pytest.mark.slow
def test_bad_rows_can_be_left_out(tmp_path: Path, rows: Path) -> None:
    call = run(tmp_path, "train", rows, "--skip-bad-rows", "--folder", "run")
    assert call.code == 0, call.complained
    left_out = re.findall(r"^left out: (\S+): ", call.said, re.MULTILINE)
    assert left_out == ["train.jsonl:4", "train.jsonl:8", "train.jsonl:12", "test.jsonl:1"]
    assert "data    9 prompts\n" in call.said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]["skip_bad_rows"]
    assert run(tmp_path, "train", "--resume", "run").code == 0, "which stays so"


@pytest.mark.slow
def test_rows_the_model_cannot_process_are_found_before_training(tmp_path: Path) -> None:
    """They passed --check, and ended the run at the step that met them, again after a resume."""
    world = make_world("shape_grid")
    model = Policy.tiny("qwen2_5_vl", world.tokenizer(), hidden=32, layers=1, heads=4)
    model.save(tmp_path / "model")
    for number, size in enumerate([(84, 84), (84, 84), (1500, 4), (56, 84), (84, 56)]):
        Image.new("RGB", size, "red").save(tmp_path / f"{number}.png")
    rows = [
        json.dumps({"problem": "<image>list ?", "answer": "1", "images": [f"{number}.png"]})
        for number in range(5)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    recipe = write_recipe(
        tmp_path,
        model={"path": str(tmp_path / "model")},
        data={"train": ["train.jsonl"]},
        stages=[{"kind": "optimize", "steps": 3}],
        rollout={"prompts": 4, "max_tokens": 4},
    )
    for option in ("--check", "--folder=run"):
        refused = run(tmp_path, "train", recipe, option)
        assert refused.code == 2
        first, bad, advice = refused.complained.splitlines()
        assert first == "error: 1 bad row:"
        assert bad == (
            "train.jsonl:3: expected a prompt the model can process; got the model's image "
            "processor rejects an image of 1500×4 pixels (absolute aspect ratio must be smaller "
            "than 200, got 375.0). Crop or resize it"
        )
        assert "--skip-bad-rows" in advice
    assert not (tmp_path / "run").exists()
    done = run(tmp_path, "train", recipe, "--folder=run", "--skip-bad-rows", "save.every=1")
    assert done.code == 0, done.complained
    assert "data    4 prompts\n" in done.said
    again = run(tmp_path, "train", "--resume", "run", "stages.0.steps=4")
    assert again.code == 0, again.complained
    assert metrics(tmp_path / "run")[-1]["step"] == 4


def test_a_reward_that_fails_ends_in_one_message(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, **SHORT)
    (tmp_path / "reward.py").write_text("def by_length(completions, **columns):\n    1 / 0\n")
    for option in ("--check", "--folder=run"):
        call = run(tmp_path, "train", recipe, option)
        assert call.code == 2
        (line,) = call.complained.splitlines()
        assert re.fullmatch(
            r"error: reward: the reward function reward.py:by_length raised ZeroDivisionError: .* "
            r"on prompt 'derived_variables/0/train/0', response '\\boxed{\d+}'\. This was a trial "
            r"before the model is loaded: two responses to the first training row\. Correct the "
            r"function, then start again\.",
            line,
        )
    assert not (tmp_path / "run").exists(), "nothing was begun"


@pytest.mark.usefixtures("no_model_is_loaded")
def test_a_reward_function_within_a_list_is_tried_before_the_run(tmp_path: Path) -> None:
    own = {"name": f"{tmp_path}/reward.py:by_length", "weight": 0.1}
    recipe = write_recipe(tmp_path, reward=["exact", own])
    (tmp_path / "reward.py").write_text("def by_length(completions, **columns):\n    return 1.0\n")
    message = error_of(segcredit("train", recipe, "--check"))
    assert message.startswith(
        "reward: the reward function reward.py:by_length must return a list with one number per "
        "response; it returned 'float 1.0' on prompt 'derived_variables/0/train/0', response "
    )
    assert "Return one number for each text in completions, for example [1.0, 0.0]" in message


@pytest.mark.usefixtures("no_model_is_loaded")
@pytest.mark.parametrize("seconds", [0.0, 0.6])
def test_a_slow_trial_of_a_reward_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(build, "PATIENCE", 0.3 if seconds else 60.0)
    recipe = write_recipe(tmp_path, reward=f"{tmp_path}/reward.py:by_length")
    waits = f"import time\ntime.sleep({seconds})\n"
    (tmp_path / "reward.py").write_text(waits + (tmp_path / "reward.py").read_text())
    call = segcredit("train", recipe, "--check")
    assert call.exit_code == 0, call.output
    assert call.stderr == (
        "trying the reward function reward.py:by_length on two responses to the first training "
        "row (for at most 60 s) …\n"
        if seconds
        else ""
    )
