"""metrics.jsonl: valid lines only, exact positions, nothing lost."""

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from each import each

from segcredit.runlog.records import MetricsWriter


def lines(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line, parse_constant=refuse) for line in data.splitlines()]


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write(0, "train", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1})
        writer.write(1, "évaluer", {"tensor": torch.tensor(2.5), "numpy": np.float32(0.5), "n": 3})
        writer.write(2, "train", {"of one": torch.ones(1, 1), "int": torch.tensor(7), "yes": True})
        writer.write(3, "train", {})
    assert lines(tmp_path / "m.jsonl") == [
        {"step": 0, "stage": "train", "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1},
        {"step": 1, "stage": "évaluer", "tensor": 2.5, "numpy": 0.5, "n": 3},
        {"step": 2, "stage": "train", "of one": 1.0, "int": 7.0, "yes": 1},
        {"step": 3, "stage": "train"},
    ]


@pytest.mark.usefixtures("as_users_run_it")
@each(
    ("step", "stage", "metrics", "message"),
    [
        (-1, "train", {}, "step must be"),
        (1.0, "train", {}, "step must be"),
        (True, "train", {}, "step must be"),
        (1, "", {}, "stage must be"),
        (1, "train", {"step": 2}, "other than 'step'"),
        (1, "train", {3: 2}, "got 3"),
        (1, "train", {"x": torch.ones(2)}, "'x' must be one number; got Tensor"),
        (1, "train", {"x": "nan"}, "'x' must be one number; got str"),
        (1, "train", {"x": None}, "'x' must be one number; got NoneType"),
    ],
)
def test_bad_metrics_are_refused_and_nothing_is_written(
    tmp_path: Path, step: object, stage: object, metrics: dict, message: str
) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        with pytest.raises(ValueError, match=message):
            writer.write(step, stage, metrics)
        assert writer.position() == 0
    assert lines(tmp_path / "m.jsonl") == []


def test_each_line_is_there_at_once_and_positions_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(3):
            writer.write(step, "train", {"x": step})
            assert writer.position() == path.stat().st_size
            assert len(lines(path)) == step + 1


def test_truncate_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, "train", {"x": 1})
        remembered = writer.position()
        writer.write(2, "train", {"x": 2})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "sta')  # killed in the middle
    with MetricsWriter(path) as writer:
        assert [row["step"] for row in lines(path)] == [1, 2], "half a line goes at once"
        writer.truncate(remembered)
        writer.write(2, "train", {"x": 22})
        assert writer.position() == path.stat().st_size
    assert [row["x"] for row in lines(path)] == [1, 22]


def test_half_a_line_longer_than_a_chunk_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    whole = b'{"step": 1}\n'
    for before in (b"", whole):
        path.write_bytes(before + b"x" * 200_000)
        MetricsWriter(path).close()
        assert path.read_bytes() == before


def test_truncate_refuses_a_file_that_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, "train", {})
        whole = path.read_bytes()
        for position in (-1, 1, len(whole) - 1):
            with pytest.raises(ValueError, match=r"the file was changed\. Move it away"):
                writer.truncate(position)
        assert path.read_bytes() == whole
        with pytest.warns(UserWarning, match="some lines are lost"):
            writer.truncate(len(whole) + 10)
        assert path.read_bytes() == whole


FULL = """
import resource, sys
from pathlib import Path
from segcredit.runlog.records import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]))
writer.write(1, "train", {"x": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.position() + 10, resource.RLIM_INFINITY))
try:
    writer.write(2, "train", {"x": 2})
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write(3, "train", {"x": 3})
"""


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.strerror(errno.EFBIG) in done.stdout
    assert "segcredit train --resume" in done.stdout
    assert [row["step"] for row in lines(path)] == [1, 3]


class Recorder:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[object] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append((step, dict(metrics)))
        if self.error:
            raise self.error

    def close(self) -> None:
        self.seen.append("closed")
        if self.error:
            raise self.error


def test_trackers_see_what_is_written(tmp_path: Path) -> None:
    tracker = Recorder()
    with MetricsWriter(tmp_path / "m.jsonl", [tracker]) as writer:
        writer.write(4, "train", {"reward": 1, "loss": math.inf})
    writer.close()  # twice does no harm
    assert tracker.seen == [(4, {"train/reward": 1.0, "train/loss": math.inf}), "closed"]


def test_a_tracker_that_raises_warns_once_and_stops_nothing(tmp_path: Path) -> None:
    bad, good = Recorder(ConnectionError("no network")), Recorder()
    with MetricsWriter(tmp_path / "m.jsonl", [bad, good]) as writer:
        with pytest.warns(UserWarning, match="Recorder failed: ConnectionError: no network"):
            writer.write(1, "train", {"x": 1})
        writer.write(2, "train", {"x": 2})  # a second warning would be an error here
    assert len(lines(tmp_path / "m.jsonl")) == 2
    assert len(good.seen) == 3
    assert len(bad.seen) == 3, "it may recover, so it is still told"
