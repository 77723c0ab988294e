"""Rows name pictures of their own folder, unless more is allowed: what they name is copied."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from segcredit.cli import app
from segcredit.config import load_run_recipe, parse_recipe
from segcredit.data import BadRows, load_prompts, prompts_from_rows
from segcredit.data.prepare import prepare
from segcredit.runlog import resume_command


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of data beside a picture that is nobody's business."""
    folder = tmp_path / "data"
    (folder / "own").mkdir(parents=True)
    Image.new("RGB", (30, 30), "red").save(tmp_path / "secret.png")
    Image.new("RGB", (30, 30), "blue").save(folder / "own" / "a.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "elsewhere").symlink_to(tmp_path)
    (folder / "inside.png").symlink_to(folder / "own" / "a.png")
    (folder / "circle").symlink_to(folder / "circle")
    return folder


def write(folder: Path, picture: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"problem": "<image>?", "answer": "1", "images": [picture]}) + "\n")
    return path


OUTSIDE = ["../secret.png", "SECRET", "link.png", "elsewhere/secret.png", "own/../../secret.png"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_pictures_outside_are_refused(data: Path, name: str, nested: bool) -> None:
    name = name.replace("SECRET", str(data.parent / "secret.png"))
    path = write(data, {"path": name} if nested else name)
    with pytest.raises(BadRows, match=r"which leads out of it.*data\.allow_outside=true"):
        load_prompts(path)
    with pytest.raises(BadRows, match="--allow-outside"):
        prepare(str(path), data / "prepared")
    (prompt,) = load_prompts(path, allow_outside=True).prompts
    assert isinstance(prompt.images[0], Path)
    assert prepare(str(path), data / "prepared", allow_outside=True).splits[0].written == 1


def test_a_file_that_is_not_there_is_not_told(data: Path) -> None:
    """Or rows could ask which files a machine has."""
    problems = []
    for name in ("../secret.png", "../missing.png"):
        with pytest.raises(BadRows) as raised:
            load_prompts(write(data, name))
        problems.append(str(raised.value).replace(name, "NAME"))
    assert problems[0] == problems[1]


@pytest.mark.parametrize("name", ["own/a.png", "./own/../own/a.png", "inside.png", "ABSOLUTE"])
def test_pictures_inside_are_read(data: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(data, name.replace("ABSOLUTE", str(data / "own" / "a.png")))
    assert len(load_prompts(path).prompts) == 1
    monkeypatch.chdir(data)
    assert len(load_prompts("rows.jsonl").prompts) == 1
    (data.parent / "as").symlink_to(data)  # the folder itself may be a link
    assert len(load_prompts(data.parent / "as" / "rows.jsonl").prompts) == 1


def test_links_in_a_circle(data: Path) -> None:
    # Python 3.13 resolves such a link to itself; before, it raised an error
    with pytest.raises(BadRows, match=r"expected a path|expected an image .* got no such file"):
        load_prompts(write(data, "circle"))


def test_rows_of_ones_own_program_may_name_any_file(data: Path) -> None:
    row = {"problem": "<image>?", "answer": "1", "images": [str(data.parent / "secret.png")]}
    assert len(prompts_from_rows([row]).prompts) == 1


RECIPE = {
    "model": {"path": "somewhere"},
    "data": {"train": ["rows.jsonl"], "allow_outside": True},
    "stages": [{"kind": "optimize", "steps": 1}],
    "algorithm": "grpo",
    "rollout": {"prompts": 1, "samples": 2},
    "update": {"minibatches": 1},
}


def test_a_run_folder_cannot_allow_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(parse_recipe(RECIPE).as_dict()))
    with pytest.raises(ValueError, match=r"data\.allow_outside: true .* would read images"):
        load_run_recipe(tmp_path)
    assert load_run_recipe(tmp_path, ["data.allow_outside=true"]).data.allow_outside
    assert load_run_recipe(tmp_path, trust_run=True).data.allow_outside
    assert resume_command(tmp_path).endswith(" --trust-run")


def test_the_options(data: Path) -> None:
    path = write(data, "../secret.png")
    runner = CliRunner(env={"COLUMNS": "200"})
    arguments = ["prepare", str(path), "-o", str(data / "prepared")]
    assert runner.invoke(app, arguments).exit_code == 2
    assert runner.invoke(app, [*arguments, "--allow-outside"]).exit_code == 0
