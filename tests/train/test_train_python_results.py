"""What a Python user sees and gives: progress, metrics of the result, data as objects."""

from pathlib import Path
from typing import Any

import pytest
from each import each
from tiny_runs import RECIPE

from segcredit import Trainer
from segcredit.data.worlds import make_world
from segcredit.models import Policy


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


def trainer(model: Path, data: Any) -> Trainer:
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
    )


def test_progress_is_printed_and_the_result_has_metrics(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trainer(model, rows()).train(tmp_path / "run")
    shown = capsys.readouterr().err
    assert "1 reinforce: 2 steps" in shown
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
    trainer(model, rows()).train(tmp_path / "run", progress=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reinforce" not in shown.err


def test_a_dataset_is_read_as_its_rows(model: Path) -> None:
    datasets = pytest.importorskip("datasets")
    found = trainer(model, datasets.Dataset.from_list(rows()))
    assert found.plan.train.size == len(rows())
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows()), test=datasets.Dataset.from_list(rows()[:2])
    )
    assert trainer(model, both).plan.train.size == len(rows())


@each("data", [5, 2.5, b"rows", object(), {"problem": "x"}])
def test_other_types_of_data_are_refused(model: Path, data: Any) -> None:
    with pytest.raises(TypeError, match=r"^train: expected files.*; got .*\. Type"):
        trainer(model, {"train": data})
