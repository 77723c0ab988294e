"""Finished runs: recognized by their own record, and cleared of what nobody needs."""

import json
import shutil
from pathlib import Path

import pytest

from segcredit.runlog import read_run
from segcredit.runlog.storage import seal
from segcredit_lab.study.store import FINISHED, finish, is_finished, record_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """As the trainer leaves it."""
    folder = tmp_path / "run"
    for step in (1, 2):
        place = folder / "checkpoints" / f"step-{step:06d}"
        for name in ("policy/model.safetensors", "critic/model.safetensors", "state.safetensors"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"{name} {step}")
        seal(place)
    (folder / "checkpoints" / "reference").mkdir()
    (folder / "checkpoints" / "reference" / "x").write_text("x")
    (folder / "config.yaml").write_text("name: run\n")
    return folder


def left(folder: Path) -> list[str]:
    place = folder / "checkpoints"
    return sorted(str(x.relative_to(place)) for x in place.rglob("*") if x.is_file())


WHOLE = ["step-000002/manifest.json", "step-000002/policy/model.safetensors"]


def test_the_last_policy_stays_and_is_whole(run: Path) -> None:
    assert not is_finished(run)
    finish(run, keep=("policy",))
    assert is_finished(run)
    assert left(run) == WHOLE
    assert read_run(run).last_complete_checkpoint() == run / "checkpoints" / "step-000002"


def test_of_a_run_for_others_to_begin_from_the_critic_stays(run: Path) -> None:
    finish(run, keep=("policy", "critic"))
    assert {Path(x).parent.name for x in left(run)} == {"step-000002", "policy", "critic"}
    assert read_run(run).last_complete_checkpoint() is not None


def test_of_a_run_that_tunes_nothing_stays(run: Path) -> None:
    finish(run, keep=())
    assert is_finished(run)
    assert left(run) == []


def test_killed_while_clearing_it_is_cleared_again(run: Path) -> None:
    (run / FINISHED).write_text(json.dumps({"cleared": False}))
    shutil.rmtree(run / "checkpoints" / "step-000002" / "critic")
    assert record_of(run) is not None
    assert not is_finished(run)
    finish(run, keep=("policy",))
    assert left(run) == WHOLE
    assert read_run(run).last_complete_checkpoint() is not None


def test_no_folder_is_no_finished_run(tmp_path: Path) -> None:
    assert record_of(tmp_path / "nothing") is None
    (tmp_path / "file").write_text("")
    assert not is_finished(tmp_path / "file")
