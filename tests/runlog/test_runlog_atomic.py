"""A file is the old one or the new one, never half of either."""

import math
import os
from pathlib import Path

import pytest
import yaml

from segcredit.runlog.files import (
    remove_leftovers,
    replacing,
    write_bytes_atomically,
    write_text_atomically,
    write_yaml_atomically,
)


def test_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_bytes_atomically(path, b"old")
    write_text_atomically(path, "newer: ü")
    assert path.read_text(encoding="utf-8") == "newer: ü"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failure_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    def fail_halfway() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(error):
        fail_halfway()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_sync_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    write_bytes_atomically(tmp_path / "ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_leftovers_go_and_files_stay(tmp_path: Path) -> None:
    for name in (".config.yaml.tmp-123", "config.yaml", ".hidden", "data.tmp-1"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", "config.yaml", "data.tmp-1"]


def test_yaml_comes_back_as_it_was(tmp_path: Path) -> None:
    shared = [1, 2]
    document = {
        "zebra": 1e-6,
        "apple": "1e-6",
        "yes": "no",
        "odd": "\ud800 \x00 \x85 \u2028 ünï",
        "long": "word " * 100,
        "none": None,
        "infinite": -math.inf,
        "a": shared,
        "b": shared,
    }
    path = tmp_path / "config.yaml"
    write_yaml_atomically(path, document)
    read = yaml.safe_load(path.read_bytes())
    assert read == document
    assert list(read) == list(document), "the order is kept"
    assert "&" not in path.read_text(), "people read it: no anchors"


def test_yaml_refuses_what_is_not_plain(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.yaml can contain .* got PosixPath"):
        write_yaml_atomically(tmp_path / "config.yaml", {"path": Path("x")})
    assert not list(tmp_path.iterdir())
