"""The Python way in: rows, functions and methods as objects, and what goes wrong with them."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from each import each
from forked_cli import run
from tiny_runs import RECIPE, assert_same_run, metrics
from typer.testing import CliRunner

from segcredit.algorithms import grpo, ppo, spo_tree
from segcredit.cli import app
from segcredit.config import RecipeError, parse_recipe
from segcredit.data import BadRows
from segcredit.data.worlds import World, make_world
from segcredit.models import Policy
from segcredit.report.overview import overview
from segcredit.rewards import CustomReward, RewardError
from segcredit.runlog import read_run, resume_command
from segcredit.train.loop import Silent
from segcredit.train.trainer import Trainer

Rows = list[dict[str, Any]]
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "rollout": {"prompts": 4, "max_tokens": 8},
    "update": {"minibatches": 2},
    "optimizer": {"lr": 1e-3, "critic_lr": 1e-3},
    "evaluation": {"prompts": 3},
    "save": {"every": 1},
    "threads": 1,
}


@pytest.fixture(scope="module")
def world() -> World:
    return make_world("derived_variables", **RECIPE["data"]["settings"])


@pytest.fixture(scope="module")
def model(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model")
    Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4).save(folder)
    return folder


def rows_of(world: World, split: Any, count: int) -> Rows:
    return [
        {"problem": x.messages[0]["content"], "answer": x.answer, "number": number}
        for number, x in enumerate(world.prompts(split, 0, count))
    ]


@pytest.fixture(scope="module")
def rows(world: World) -> Rows:
    return rows_of(world, "train", 10)


def by_length(num_tokens: list[int], **columns: Any) -> list[float]:
    return [(n % 4) / 3 for n in num_tokens]


def processes() -> set[str]:
    """Children of this process."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    before = processes()
    yield
    assert processes() <= before


# ── What one gives ───────────────────────────────────────────────────────────────────────────────


def test_rows_a_function_and_a_method_as_objects(
    tmp_path: Path,
    model: Path,
    rows: Rows,
    world: World,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[dict[str, Any]] = []

    def graded(completions: list[str], **columns: Any) -> list[float]:
        seen.append({"completions": completions, **columns})
        return by_length(**columns)

    trainer = Trainer(
        model,
        rows,
        algorithm=ppo(kl=0.0, lam=0.9),
        reward=graded,
        test=rows_of(world, "test", 3),
        **SETTINGS,
    )
    result = trainer.train(tmp_path / "run")
    assert result.folder == tmp_path / "run"
    assert result.before.keys() == result.after.keys() == {"reward", "greedy_reward"}
    assert result.model == tmp_path / "run" / "checkpoints" / "step-000002" / "policy"
    assert Policy.from_pretrained(result.model).end_tokens
    lines = metrics(tmp_path / "run")
    stages = [x["stage"] for x in lines if x["stage"] != "warning"]
    assert stages == ["evaluation", "optimize", "optimize", "evaluation"]
    graded_rows = {number for call in seen for number in call["number"]}
    assert graded_rows <= {row["number"] for row in rows}, "columns arrive by their names"
    trial, first, *_ = seen
    assert trial["number"] == [0, 0], "one call before the model is loaded, for the first row"
    assert first["answer"] == [row["answer"] for row in rows_of(world, "test", 3)]
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    given = config["given_in_python"]
    assert (given["train"], given["test"]) == ("rows", "rows")
    assert given["algorithm"].startswith("PolicyGradient(")
    assert given["reward"].endswith("graded")
    facts = dict(overview(read_run(result.folder))["facts"])
    assert facts["method"].startswith("PolicyGradient("), "not the default that config.yaml has"
    assert facts["reward"] == given["reward"]
    assert overview(read_run(result.folder))["method"] == [["algorithm", given["algorithm"]]]
    shown = " ".join(capsys.readouterr().err.split())
    assert "method PolicyGradient(" in shown


def test_names_and_files_serve_as_well(tmp_path: Path, model: Path, rows: Rows) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = Trainer(
        str(model),
        str(data),
        algorithm={"name": "grpo", "kl": 0.0},
        reward="exact",
        **SETTINGS | {"rollout": {"prompts": 2, "samples": 2, "max_tokens": 8}},
    )
    result = trainer.train(tmp_path / "run")
    assert result.before == result.after == {}, "there was no test data"
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert "given_in_python" not in config
    assert config["data"]["train"] == [str(data)]


@each(
    ("arguments", "expected"),
    [
        ({"rolout": {}}, "Trainer: one mistake\n  rolout: unknown key. Did you mean 'rollout'"),
        ({"algorithm": "sappo"}, "algorithm: unknown method 'sappo'"),
        ({"reward": "mth"}, "reward: unknown reward 'mth'"),
        ({"reward": dict}, "reward: a reward is an object, not a class; pass dict"),
        ({"steps": 0}, "stages.0.steps: Input should be greater than or equal to 1"),
        ({"data": {"train": ["x"]}, "test": "y"}, "give test inside data"),
        (
            {
                "algorithm": grpo(),
                "stages": [{"kind": "pretrain_critic", "steps": 1}],
            },
            "stages.0: this method has no critic to pretrain: remove the stage",
        ),
        ({"algorithm": grpo()}, "this method compares the responses to one prompt, so rollout."),
        (
            {"algorithm": spo_tree()},
            "this method compares branches of a tree: set rollout.tree, as in ",
        ),
        (
            {"stages": [{"kind": "warm_start", "steps": 1}]},
            "stages.0: a warm start imitates the rows' 'response'; the rows have none",
        ),
    ],
)
def test_mistakes_are_found_when_the_trainer_is_made(
    model: Path, rows: Rows, arguments: dict[str, Any], expected: str
) -> None:
    given = {"model": model, "data": rows, **SETTINGS, **arguments}
    if "stages" in arguments:
        del given["steps"]
    with pytest.raises(RecipeError) as error:
        Trainer(**given)
    assert expected in str(error.value)


def test_settings_are_checked_against_a_method_given_as_an_object(model: Path, rows: Rows) -> None:
    """And not against the recipe's default method, which the run's record names in its place."""
    tree = {"prompts": 2, "tree": {"branching": [2, 2], "tokens": 3}, "max_tokens": 8}
    trainer = Trainer(model, rows, spo_tree(), **SETTINGS | {"rollout": tree})
    with pytest.raises(RecipeError, match=r"rollout\.tree is for methods that compare branches"):
        parse_recipe(trainer.recipe.as_dict())
    record = trainer.recipe.as_dict() | {"given_in_python": {"algorithm": "spo_tree"}}
    assert parse_recipe(record) == trainer.recipe


def test_bad_rows_of_both_sets_are_told_together(model: Path, rows: Rows) -> None:
    with pytest.raises(BadRows) as error:
        Trainer(model, [rows[0], {"problem": "no answer"}], test=[3, rows[1]], **SETTINGS)
    assert [row.where for row in error.value.bad] == ["rows[1]", "rows[0]"]
    data = {"train": [*rows, 3], "test": [4, rows[1]], "skip_bad_rows": True, "suffix": "Think."}
    plan = Trainer(model, data, **SETTINGS).plan
    assert (plan.train.size, len(plan.bad)) == (len(rows), 2)
    assert plan.train.take(0, 1)[0].messages[0]["content"].endswith(" ? Think.")


# ── Rewards that go wrong ────────────────────────────────────────────────────────────────────────


def raises(number: list[int], **columns: Any) -> list[float]:
    if 7 in number:
        raise KeyError("my_column")
    return [0.0] * len(number)


def hangs(number: list[int], **columns: Any) -> list[float]:
    if 7 in number:
        time.sleep(20)
    return [0.0] * len(number)


def is_nan(number: list[int], **columns: Any) -> list[float]:
    return [math.nan if n == 7 else 0.0 for n in number]


def is_short(number: list[int], **columns: Any) -> list[float]:
    return [0.0] * min(len(number), 9)


@pytest.mark.filterwarnings("ignore:Settings changed")
@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (raises, r"raises raised KeyError: .*my_column.* on prompt 'rows:7', response "),
        pytest.param(
            CustomReward(hangs, deadline=0.3),
            r"hangs did not return within 0.3 s on prompt 'rows:\d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            is_nan,
            r"is_nan must return finite numbers; it returned nan on prompt 'rows:7', ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            is_short,
            r"is_short must return one number per response; it returned 9 for 10, ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_function_that_fails_stops_the_run_and_names_the_sample(
    tmp_path: Path, model: Path, rows: Rows, reward: Callable[..., Any], expected: str
) -> None:
    settings = SETTINGS | {"rollout": {"prompts": 10, "max_tokens": 8}}
    trainer = Trainer(model, rows, reward=reward, **settings)
    with pytest.raises(RewardError, match=f"^the reward function {expected}"):
        trainer.train(tmp_path / "run")
    done = Trainer(model, rows, reward=by_length, **settings).train(tmp_path / "run", resume=True)
    assert done.model is not None, "the run was left such that it can go on"


FILE = """
import os, subprocess, time
def hangs(number, **columns):
    if not any(number):  # the trial, of the first row
        return [0.0] * len(number)
    open({mark!r}, "w").write(str(subprocess.Popen(["sleep", "60"]).pid))
    time.sleep(60)
"""


@pytest.mark.usefixtures("no_process_is_left")
def test_a_file_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, model: Path, rows: Rows
) -> None:
    mark = tmp_path / "mark"
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(mark=str(mark)))
    trainer = Trainer(model, rows, reward={"name": f"{file}:hangs", "deadline": 0.4}, **SETTINGS)
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"mine.py:hangs was stopped after 0.4 s on prompt 'row"):
        trainer.train(tmp_path / "run")
    assert time.monotonic() - begun < 30
    status = Path(f"/proc/{mark.read_text()}/status")
    until = time.monotonic() + 10  # a signal on a busy machine takes its time
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < until, "what the file started still runs"
        time.sleep(0.01)


def test_no_thread_is_left_waiting_after_a_run(tmp_path: Path, model: Path, rows: Rows) -> None:
    Trainer(model, rows, reward=by_length, **SETTINGS).train(tmp_path / "run")
    left = [x.name for x in threading.enumerate() if not x.daemon]
    assert left == ["MainThread"]


# ── Going on ─────────────────────────────────────────────────────────────────────────────────────


class FailsAfter:
    """A reward to which one batch is too much; the first is the trial before the run."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def __call__(self, **columns: Any) -> list[float]:
        self.left -= 1
        if self.left < 0:
            raise MemoryError
        return by_length(**columns)


def trainer_of(
    model: Path | dict[str, Any], rows: Rows, reward: Callable[..., Any], **changes: Any
) -> Trainer:
    settings = SETTINGS | {"steps": 4, "save": {"every": 1, "keep": 9}} | changes
    return Trainer(model, rows, reward=reward, test=rows[:3], **settings)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_run_with_objects_goes_on_in_python(
    tmp_path: Path, model: Path, rows: Rows, attention: str
) -> None:
    """Critic and reference, which are loaded again, compute as they did."""
    whole, loaded = tmp_path / "whole", {"path": str(model), "attention": attention}
    trainer_of(loaded, rows, FailsAfter(99)).train(whole)
    folder = tmp_path / "run"
    with pytest.raises(RewardError):
        trainer_of(loaded, rows, FailsAfter(6)).train(folder)
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2]
    result = trainer_of(loaded, rows, FailsAfter(99)).train(folder, resume=True)
    assert result.before.keys() == result.after.keys() == {"reward", "greedy_reward"}
    assert_same_run(folder, whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Settings changed")
def test_the_command_line_says_that_only_python_can_go_on_with_it(
    tmp_path: Path, model: Path, rows: Rows
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RewardError):
        trainer_of(model, rows, FailsAfter(6)).train(folder)
    call = run(tmp_path, "train", "--resume", "run")
    assert call.code == 2
    assert call.complained == (
        "error: run/config.yaml: train, test, reward came from Python as objects, which no file "
        "can hold, so only Python can resume this run, with the same objects: "
        "Trainer(…).train(folder='run', resume=True)\n"
    )
    call = f"Trainer(…).train(folder={str(folder)!r}, resume=True)"
    assert resume_command(folder) == call, "so no message names a command that is refused"
    assert resume_command(folder, "seed=1") == f"{call} with the setting seed=1"
    done = CliRunner().invoke(app, ["evaluate", str(folder)])
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: {folder} has no test data on file: pass --data FILE\n",
    )
    trainer_of(model, rows, by_length).train(folder, resume=True)


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
def test_other_settings_on_the_way_are_told_and_kept(
    tmp_path: Path, model: Path, rows: Rows
) -> None:
    folder, watch = tmp_path / "run", Notes()
    trainer_of(model, rows, by_length).train(folder)
    again = trainer_of(model, rows, by_length, steps=5, optimizer={"lr": 1e-4})
    again.train(folder, resume=True, watch=watch)
    assert watch.notes == [
        "Settings changed from this step on: optimizer.critic_lr, optimizer.lr, stages"
    ]
    assert metrics(folder)[-1]["step"] == 5
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["optimizer"]["lr"] == 1e-4
    watch = Notes()
    again.train(folder, resume=True, watch=watch)
    assert watch.notes == [], "nothing is different, and nothing is left to do"
    assert metrics(folder)[-1]["step"] == 5


@pytest.mark.slow
def test_other_objects_on_the_way_are_told_and_kept(
    tmp_path: Path, model: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.yaml, the model card and trackers name what trains from this step on."""
    configs: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "segcredit.train.trainer.open_trackers", lambda *x: configs.append(x[2]) or []
    )

    def longer(num_tokens: list[int], **columns: Any) -> list[float]:
        return [n / 10 for n in num_tokens]

    folder, watch = tmp_path / "run", Notes()
    trainer_of(model, rows, "exact", steps=1).train(folder)
    for reward in (by_length, longer, FailsAfter(99), FailsAfter(99)):
        trainer_of(model, rows, reward, steps=1 + len(configs)).train(folder, True, watch)
    trainer_of(model, rows, "exact", steps=6, algorithm=ppo(kl=0.0)).train(folder, True, watch)
    told = "Settings changed from this step on: "
    notes = [x.removeprefix(told) for x in watch.notes if x.startswith(told)]
    assert notes == [*3 * ["reward, stages"], "stages", "algorithm, reward, stages"]
    given = [x["given_in_python"].get("reward", "").rpartition(".")[2] for x in configs]
    assert given == ["", "by_length", "longer", "FailsAfter object>", "FailsAfter object>", ""]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["given_in_python"].keys() == {"train", "test", "algorithm"}
    card = (folder / "checkpoints" / "step-000006" / "policy" / "README.md").read_text()
    assert "| reward | `exact` |" in card
    assert "| algorithm | `PolicyGradient(" in card


def test_resuming_needs_a_run(tmp_path: Path, model: Path, rows: Rows) -> None:
    trainer = trainer_of(model, rows, by_length)
    with pytest.raises(ValueError, match="resume needs the run's directory"):
        trainer.train(resume=True)
    with pytest.raises(ValueError, match="is not a run: there is no such folder"):
        trainer.train(tmp_path / "none", resume=True)
    trainer.train(tmp_path / "run")
    with pytest.raises(ValueError, match=r"already contains a run .*resume=True"):
        trainer.train(tmp_path / "run")


def test_several_answers_are_bad_rows_for_a_reward_that_compares_one(
    model: Path, rows: Rows
) -> None:
    several = [*rows, {"problem": "?", "answer": ["1", "2"]}]
    for reward in ("math", "geo3k", "gsm8k", "exact"):
        with pytest.raises(BadRows, match=r"rows\[10\].*got a list of 2"):
            Trainer(model, several, reward=reward, **SETTINGS)
    Trainer(model, several, reward=by_length, **SETTINGS)


@pytest.mark.parametrize("where", ["python", "file"])
def test_a_reward_function_that_wants_what_the_rows_lack_is_told_before_the_model_loads(
    model: Path, rows: Rows, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(completions: list[str], golds: list[str]) -> list[float]:
        raise AssertionError("nothing was sampled yet")

    file = tmp_path / "score.py"
    file.write_text("def lacking(completions, golds): ...\n")
    monkeypatch.setattr(Policy, "from_pretrained", lambda *_: pytest.fail("a model was loaded"))
    reward = lacking if where == "python" else f"{file}:lacking"
    with pytest.raises(RecipeError) as told:
        Trainer(model, rows, reward=reward, **SETTINGS)
    assert "requires 'golds', but the rows have no such column" in str(told.value)
    assert "'number'" in str(told.value), "the columns that there are"
