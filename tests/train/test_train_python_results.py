"""What a Python user gives and gets: progress, metrics, the report, data as objects."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from each import each
from tiny_runs import RECIPE

import segcredit.commands.report
from segcredit import Callback, Trainer
from segcredit.algorithms import grpo
from segcredit.data import BadRows
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.partition import Newline


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    world = make_world("derived_variables", **RECIPE["data"]["settings"])
    folder = tmp_path_factory.mktemp("model")
    Policy.tiny("qwen2", world.tokenizer(), hidden=32, layers=1, heads=4).save(folder)
    return folder


def rows() -> list[dict[str, Any]]:
    world = make_world("derived_variables", **RECIPE["data"]["settings"])
    drawn = world.prompts("train", 0, 6)
    return [{"problem": x.messages[0]["content"], "answer": x.answer} for x in drawn]


def by_length(num_tokens: list[int], **columns: Any) -> list[float]:
    return [(n % 4) / 3 for n in num_tokens]


def trainer(model: Path, data: Any, **more: Any) -> Trainer:
    rollout = {"prompts": 4, "samples": 2, "max_tokens": 8}
    return Trainer(
        model,
        data,
        algorithm="grpo",
        reward=by_length,
        steps=2,
        rollout=rollout,
        update={"minibatches": 2},
        threads=1,
        **more,
    )


@pytest.mark.slow
def test_progress_is_printed_and_the_result_has_metrics(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer(model, rows()).train(tmp_path / "run")
    shown = capsys.readouterr().err
    assert "1 reinforce (stages.0): 2 steps" in shown
    assert "2/2" in shown
    assert "model " in shown
    assert "shards" not in shown, "no progress bar of transformers for each checkpoint"
    assert len(result.history("reward", "optimize")) == 2
    optimized = [x["reward"] for x in result.metrics if x["stage"] == "optimize"]
    assert optimized == result.history("reward", "optimize")
    with pytest.raises(ValueError, match="has no metric 'rewards'"):
        result.history("rewards")


def test_progress_can_be_turned_off(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(model, rows()).train(tmp_path / "run", progress=False, report=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reinforce" not in shown.err


class KeepsResult(Callback):
    result: Any = None

    def on_train_end(self, result: Any) -> None:
        self.result = result


def test_the_report_is_written_and_the_result_shows_itself(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keeps = KeepsResult()
    made = trainer(model, rows(), test=rows()[:2], callbacks=[keeps])
    assert repr(made) == f"Trainer(model={str(model)!r}, algorithm='grpo', prompts=6, steps=2)"
    result = made.train(tmp_path / "a run")
    folder = tmp_path / "a run"
    assert result.report == folder / "report.html"
    assert keeps.result == result, "callbacks get the report, too"
    assert "</html>" in result.report.read_text()
    assert (folder / "plots" / "curves.png").is_file()
    shown = capsys.readouterr().err
    assert f"report  {result.report}\n" in shown
    assert "Held-out reward" in shown

    assert repr(result).startswith(f"Result(folder={str(folder)!r}, reward: ")
    page = result._repr_html_()
    assert '<a href="a%20run/report.html"' in page, "Jupyter refuses file addresses"
    assert "<caption>Held-out reward, 2 prompts</caption>" in page
    cells = re.findall(r"<td>(.*?)</td>", page)
    assert cells[::4] == ["sampled", "greedy"]
    assert cells[1:3] == [f"{x['reward']:.3f}" for x in (result.before, result.after)]
    monkeypatch.chdir("/")
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "elsewhere")
    assert f'href="{result.report.as_uri()}"' in result._repr_html_()


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> Path:
        raise OSError(28, "No space left on device")

    def defect(folder: Path) -> Path:
        raise KeyError("reward")

    monkeypatch.setattr(segcredit.commands.report, "write_quick_report", full)
    monkeypatch.setattr(segcredit.commands.report, "draw_run_curves", defect)
    with (
        pytest.warns(UserWarning, match="the report could not be written: .*No space left"),
        pytest.warns(UserWarning, match=r"could not be drawn: KeyError.*complete"),
    ):
        result = trainer(model, rows()).train(tmp_path / "run", progress=False)
    assert result.report is None
    assert "report" not in result.paths()
    assert repr(result) == f"Result(folder={str(tmp_path / 'run')!r})"


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("arguments", "expected"),
    [
        ({"model": 5}, "model: expected a folder, a hub id, a model of transformers, or sett"),
        ({"model": dict}, "got the class dict. Type, for example, model='Qwen/"),
        ({"model": {"path": 5}}, "got 5 (int)"),
        ({"data": 5}, "data: expected files, a list of rows, a datasets.Dataset or a data frame"),
        ({"data": None}, "data: expected files, a list of rows"),
        ({"data": rows()[0]}, "got a dictionary with the keys 'problem', 'answer'. Put a single"),
        ({"data": {"validation": rows()}}, "choose a split of a DatasetDict, data=splits['valida"),
        ({"test": 5}, "test: expected files, a list of rows"),
        ({"algorithm": 5}, "algorithm: expected a name such as 'sapo', settings or a method"),
        ({"algorithm": grpo}, "got the function grpo. Type grpo()"),
        ({"algorithm": type(grpo())}, "got the class PolicyGradient. Type PolicyGradient()"),
        ({"algorithm": object()}, "got object. Type, for example, algorithm='sapo'"),
        (
            {"algorithm": {"name": "sapo", "partition": Newline()}},
            "algorithm.partition: expected a number, a text, a list or settings, which config.yaml "
            "can hold; got Newline. Give a name or a number, or the whole algorithm as an object",
        ),
        ({"algorithm": {"name": "sapo", "lam": torch.ones(())}}, "algorithm.lam: expected a num"),
        ({"reward": ["exact", {"name": "exact", "extract": print}]}, "reward.1.extract: expec"),
        ({"reward": 5}, "reward: expected a name such as 'math', settings or a function; got 5"),
        ({"reward": None}, "got None (NoneType). Type, for example, reward='math'"),
        ({"steps": "10"}, "steps: expected a whole number; got '10' (str). Type, for example"),
        ({"steps": 2.5}, "got 2.5 (float)"),
        ({"steps": True}, "got True (bool)"),
        (
            {"steps": 5, "stages": [{"kind": "optimize", "steps": 1}]},
            "steps: expected none, because stages has the steps of each stage; got 5 (int). Rem",
        ),
        ({"tokenizer": 5}, "tokenizer: expected none, because the model is not an object in mem"),
        ({"callbacks": 5}, "callbacks: expected a list of callbacks; got int. Type callbacks=["),
        ({"callbacks": KeepsResult}, "callbacks: expected a list of callbacks; got KeepsResult"),
        ({"callbacks": KeepsResult()}, "got KeepsResult. Type callbacks=[MyCallback()]"),
        ({"callbacks": [KeepsResult]}, "got the class KeepsResult. Type KeepsResult()"),
        ({"callbacks": [print]}, "callbacks: expected objects of segcredit.Callback; got builtin"),
    ],
)
def test_arguments_of_another_type_are_refused(
    model: Path, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(TypeError) as told:
        Trainer(**{"model": model, "data": rows(), "algorithm": "ppo", **arguments})
    assert expected in str(told.value)


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("arguments", "expected"),
    [
        ({"folder": 5}, "folder: expected a path; got 5 (int). Type folder='runs/mine'"),
        ({"resume": "yes"}, "resume: expected True or False; got 'yes' (str). Type resume=True"),
        ({"watch": print}, "watch: expected an Observer of segcredit.train.loop; got builtin"),
        ({"progress": 1}, "progress: expected True or False; got 1 (int). Type progress=True"),
        ({"report": None}, "report: expected True or False; got None (NoneType)"),
    ],
)
def test_arguments_of_train_of_another_type_are_refused(
    model: Path, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(TypeError) as told:
        trainer(model, rows()).train(**arguments)
    assert expected in str(told.value)


def test_a_data_frame_is_read_as_its_rows(model: Path) -> None:
    pandas = pytest.importorskip("pandas")
    shown = rows()
    shown[0]["hint"] = "add"  # missing in the other rows
    found = trainer(model, pandas.DataFrame(shown), test=pandas.DataFrame(shown[:2])).plan
    assert found.train.size == len(shown)
    assert found.test is not None
    prompts = found.test.take(0, 2)
    assert [x.answer for x in prompts] == [x["answer"] for x in shown[:2]]
    frame = pandas.DataFrame(shown)
    frame.loc[1, "answer"] = None
    with pytest.raises(BadRows, match=r"^1 bad row:\nrows\[1\]: expected an answer"):
        trainer(model, frame)
    with pytest.raises(ValueError, match="expected a data file; there is no"):
        trainer(model, frame["problem"])  # a column alone


def test_a_polars_frame_is_read_as_its_rows(model: Path) -> None:
    polars = pytest.importorskip("polars")
    found = trainer(model, polars.DataFrame(rows())).plan
    assert [x.answer for x in found.train.prompts] == [x["answer"] for x in rows()]


def test_a_dataset_is_read_as_its_rows(model: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = trainer(model, datasets.Dataset.from_list(rows()))
    assert found.plan.train.size == len(rows())
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows()), test=datasets.Dataset.from_list(rows()[:2])
    )
    assert trainer(model, both).plan.train.size == len(rows())
    both["validation"] = both["test"]
    with pytest.raises(TypeError, match=r"got train, test, validation\. Choose them"):
        trainer(model, both)


@each("data", [5, 2.5, b"rows", object(), {"problem": "x"}])
def test_other_types_of_data_are_refused(model: Path, data: Any) -> None:
    with pytest.raises(TypeError, match=r"^train: expected files.*; got .*\. Type"):
        trainer(model, {"train": data})
