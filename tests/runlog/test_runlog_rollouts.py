"""Responses are untrusted text: whatever a model writes, the file stays JSON and comes back."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from segcredit.runlog.folder import later_than
from segcredit.runlog.records import read_rollouts, write_rollouts

ODD = '\ud83d lone \udc00\x00\x1b[31m \u2028 {} \\ " \n NaN'


def row(**columns: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "prompt_id": "p1",
        "prompt": "1+1?",
        "messages": [{"role": "user", "content": "1+1?"}],
        "images": [],
        "response": "2",
        "tokens": [5, 6],
        "pieces": ["2", ""],
        "entropy": [0.5, 0.25],
        "segment": [0, 0],
        "value": [0.1, 0.2],
        "image_kl": [0.0, 0.3],
        "advantage": [1.0, 1.0],
        "ratio": None,
        "logp_old": [-0.1, -0.2],
        "reward": 1.0,
        "reason": "right",
        "correct": True,
        "truncated": False,
        "answer": "2",
    }
    return made | columns


def test_hostile_text_stays_valid_json_and_comes_back(tmp_path: Path) -> None:
    rows = [row(response=ODD, pieces=[ODD, "NaN"], answer="Infinity", prompt="é" * 10), row()]
    path = write_rollouts(tmp_path, 12, rows)
    assert path == tmp_path / "step-000012.jsonl"
    data = path.read_bytes()
    assert data.isascii()
    assert len(data.splitlines()) == 2
    assert read_rollouts(path) == rows, "and 'NaN' that a model wrote is no number"


def test_numbers_that_are_not_finite_come_back_as_numbers(tmp_path: Path) -> None:
    path = write_rollouts(
        tmp_path, 1, [row(reward=math.nan, logp_old=[-math.inf, -1.5], extra=[math.nan])]
    )

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (read,) = read_rollouts(path)
    assert math.isnan(read["reward"])
    assert read["logp_old"] == [-math.inf, -1.5]


def test_tensors_and_arrays_become_lists(tmp_path: Path) -> None:
    tensors = row(
        tokens=torch.tensor([1, 2]),
        entropy=torch.tensor([0.5, math.nan], dtype=torch.bfloat16),
        reward=np.float32(0.5),
        value=np.array([1.0, 2.0]),
    )
    (read,) = read_rollouts(write_rollouts(tmp_path, 1, [tensors]))
    assert read["tokens"] == [1, 2]
    assert read["reward"] == 0.5
    assert read["value"] == [1.0, 2.0]
    assert math.isnan(read["entropy"][1])


def test_what_is_not_plain_is_refused(tmp_path: Path) -> None:
    knot: list[Any] = []
    knot.append(knot)
    for bad, message in ((b"bytes", "got a bytes"), ({1}, "got a set"), (knot, "contains itself")):
        with pytest.raises(ValueError, match=message):
            write_rollouts(tmp_path, 1, [row(extra=bad)])
    assert not list(tmp_path.iterdir())


def test_a_step_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def breaks() -> Iterator[dict[str, Any]]:
        yield row(response="new")
        raise RuntimeError("killed")

    write_rollouts(tmp_path, 1, [row(response="old")])
    with pytest.raises(RuntimeError, match="killed"):
        write_rollouts(tmp_path, 1, breaks())
    assert [r["response"] for r in read_rollouts(tmp_path / "step-000001.jsonl")] == ["old"]
    assert len(list(tmp_path.iterdir())) == 1
    write_rollouts(tmp_path, 1, iter([row(response="new")]))
    assert [r["response"] for r in read_rollouts(tmp_path / "step-000001.jsonl")] == ["new"]


def test_files_of_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 10, 1_000_000):
        write_rollouts(tmp_path, step, [row()])
    (tmp_path / ".step-000011.jsonl.tmp-7").touch()
    (tmp_path / "notes.txt").touch()
    assert [path.name for path in later_than(tmp_path, 2)] == [
        "step-000010.jsonl",
        "step-1000000.jsonl",
    ]
    assert later_than(tmp_path / "nowhere", 0) == []
