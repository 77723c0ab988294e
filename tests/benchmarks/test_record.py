"""Answers in the run directory of a checkpoint, from which the report is made."""

import json
from pathlib import Path

import pytest
from test_page import HOSTILE, result

from segcredit.benchmarks.page import PageLimits, record_in_run
from segcredit.report.benchmarks import gather_benchmarks
from segcredit.runlog import read_run


def run_with_checkpoint(folder: Path, step: int = 7) -> Path:
    """A run directory; return the policy of its checkpoint."""
    policy = folder / "run" / "checkpoints" / f"step-{step:06d}" / "policy"
    policy.mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text("name: run\n")
    return policy


def test_the_report_has_what_was_recorded(tmp_path: Path) -> None:
    policy = run_with_checkpoint(tmp_path)
    found = result([False, True, False])
    settings = {"temperature": 0.6, "limit": None}
    assert record_in_run(str(policy), {"logicvista": found}, settings) == tmp_path / "run"
    shown = gather_benchmarks([read_run(tmp_path / "run")])
    assert shown.data["models"] == ["step-000007"]
    assert shown.data["settings"] == {"step-000007": "temperature 0.6"}
    (one,) = shown.data["sets"]
    assert (one["title"], one["total"]) == ("LogicVista", 3)
    assert [x["text"] for x in one["questions"]] == [f"Question {n} {HOSTILE}" for n in range(3)]
    given = [x["answers"]["step-000007"][0] for x in one["questions"]]
    assert [x["correct"] for x in given] == [False, True, False]
    assert [x["answer"] for x in given] == [None, "A", "A"]
    assert given[1]["response"] == f"Response to q1 {HOSTILE}"
    assert one["scores"]["step-000007"]["accuracy"]["value"] == 33.33
    assert {name for x in one["questions"] for name in x["images"]} == set(shown.images)
    assert len(shown.images) == 3


def test_sets_are_kept_and_replaced(tmp_path: Path) -> None:
    policy = run_with_checkpoint(tmp_path)
    record_in_run(str(policy), {"logicvista": result([False]), "wemath": result([False])}, {})
    record_in_run(str(policy), {"logicvista": result([False, True])}, {})
    record_in_run(str(policy), {"logicvista": result([False])}, {}, driver="vlmevalkit")
    folder = tmp_path / "run" / "benchmarks"
    counts = {
        str(x.relative_to(folder)): json.loads(x.read_text())["total"]
        for x in folder.glob("*/*.json")
    }
    assert counts == {
        "step-000007/logicvista.json": 2,
        "step-000007/wemath.json": 1,
        "step-000007-vlmevalkit/logicvista.json": 1,
    }


def test_limits_of_the_run_directory(tmp_path: Path) -> None:
    policy = run_with_checkpoint(tmp_path)
    few = PageLimits(questions=12, picture_megabytes=0.01)
    record_in_run(str(policy), {"logicvista": result([False] * 40)}, {}, limits=few)
    (file,) = (tmp_path / "run" / "benchmarks").glob("step-*/*.json")
    content = json.loads(file.read_text())
    assert (len(content["questions"]), content["total"]) == (12, 40)
    images = list((tmp_path / "run" / "benchmarks" / "images").iterdir())
    assert 0 < len(images) < 12


@pytest.mark.parametrize(
    "source", ["Qwen/Qwen2.5-VL-3B", "model", "a/checkpoints/step-000001/policy", "step-000001/x"]
)
def test_other_models_have_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("name: not the run of these models\n")
    (tmp_path / source).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert record_in_run(source, {"logicvista": result([False])}, {}) is None
    assert sorted(tmp_path.rglob("*")) == before
