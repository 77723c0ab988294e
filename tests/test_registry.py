"""The registry: names, hints, files of users, and paths in run directories."""

from pathlib import Path

import pytest

from segcredit.algorithms import make_algorithm
from segcredit.data.worlds import make_world
from segcredit.registry import (
    Registry,
    keep_written,
    load_object,
    names_code,
    nearest,
    resolve_files,
)

SHAPES: Registry[object] = Registry("shape", {"circle": dict, "square": "builtins:list"})


def test_names_files_and_modules() -> None:
    assert SHAPES["circle"] is dict
    assert SHAPES["square"] is list  # imported on first use
    assert SHAPES["collections:OrderedDict"].__name__ == "OrderedDict"  # type: ignore[attr-defined]
    assert list(SHAPES) == ["circle", "square"]


def test_mistakes_name_the_nearest_and_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown shape 'Circel'. Did you mean 'circle'\? The "):
        SHAPES["Circel"]
    with pytest.raises(ValueError, match=r"there is no file .*none.py"):
        SHAPES["none.py:Shape"]
    with pytest.raises(ValueError, match="cannot import 'no_such_package'"):
        SHAPES["no_such_package:Shape"]
    file = tmp_path / "mine.py"
    file.write_text("class Hexagon: ...\n")
    with pytest.raises(ValueError, match=r"has no shape 'Hexagn'. Did you mean 'Hexagon'\?"):
        SHAPES[f"{file}:Hexagn"]
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken.py cannot be imported: ZeroDivisionError"):
        load_object(f"{broken}:Anything", "shape")
    with pytest.raises(ValueError, match=r"Hexagon has no setting .side.. It has no settings"):
        SHAPES.make(f"{file}:Hexagon", {"side": 2})
    assert nearest("value-jumps", ["value_jumps"]) == " Did you mean 'value_jumps'?"
    assert nearest("something else", ["value_jumps"]) == ""


def test_settings_of_old_runs_have_new_names(tmp_path: Path) -> None:
    old, new = ({"size": 2, key: 1} for key in ("colours", "colors"))
    assert make_world("shape_grid", **old) == make_world("shape_grid", **new)
    assert make_world("shape_grid", **old, colors=2) == make_world("shape_grid", size=2, colors=2)
    assert make_algorithm("spo_tree", normalise=True) == make_algorithm("spo_tree", normalize=True)
    file = tmp_path / "own.py"
    file.write_text("class Own(dict):\n    def __init__(self, colours): self['own'] = colours\n")
    assert SHAPES.make(f"{file}:Own", {"colours": 3}) == {"own": 3}, "a component's own name"
    with pytest.raises(ValueError, match="square has no setting 'colours'"):
        SHAPES.make("square", {"colours": 3})


def test_what_names_code() -> None:
    assert all(map(names_code, ("file.py:Name", "a/b c/file.py:name", "package.module:Name")))
    rest = ("entropy", "file.py", "https://x", "12:30", "a: b", "", 3, None, "x:1", "file.py:")
    assert not any(map(names_code, rest))


def test_a_run_folder_keeps_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed from elsewhere, files are found beside the run; config.yaml stays as it was."""
    (tmp_path / "mine.py").touch()
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    monkeypatch.chdir("/")
    written = {"reward": "mine.py:score", "data": {"world": "gone.py:World"}, "seed": 0}
    resolved = resolve_files(written, run)
    assert resolved["reward"] == f"{tmp_path}/mine.py:score"
    assert resolved["data"] == written["data"]  # not found: said when it is loaded
    changed = resolved | {"seed": 1, "algorithm": "grpo"}
    assert keep_written(changed, written, run) == written | {"seed": 1, "algorithm": "grpo"}
    other = resolved | {"reward": "/other.py:score"}
    assert keep_written(other, written, run)["reward"] == "/other.py:score"
