"""Rows that several processes wrote, read back by any number of others."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from segcredit.runlog.storage import CheckpointError, Part, Parts, file_name, save_parts


def bounds(count: int, size: int) -> list[tuple[int, int]]:
    """As torch deals rows out: evenly, rounded up, the last ones may have none."""
    each = -(-count // size)
    return [(min(count, each * i), min(count, each * (i + 1))) for i in range(size)]


def written(folder: Path, tensors: dict[str, Tensor], size: int) -> list[Path]:
    files = [folder / file_name("policy-optimizer", i, size) for i in range(size)]
    for i, file in enumerate(files):
        parts = {}
        for name, x in tensors.items():
            first, last = bounds(len(x), size)[i]
            parts[name] = Part(x[first:last], first, tuple(x.shape))
        save_parts(file, parts)
    return files


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    writers=st.integers(1, 5),
    readers=st.integers(1, 5),
)
def test_whoever_wrote_and_whoever_reads(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], writers: int, readers: int
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    tensors = {f"layer.{i}": torch.randn(n, 2, 3) for i, n in enumerate(counts)}
    found = Parts(written(folder, tensors, writers))
    for name, x in tensors.items():
        assert name in found
        for first, last in bounds(len(x), readers):
            assert torch.equal(found.read(name, first, last - first), x[first:last])
    assert "layer.9" not in found


def test_the_name_says_who_wrote() -> None:
    assert file_name("critic-optimizer", 3, 16) == "critic-optimizer-00003-of-00016.safetensors"


def test_rows_that_nobody_wrote_are_missed(tmp_path: Path) -> None:
    first, _, last = written(tmp_path, {"bias": torch.arange(6.0)}, 3)
    found = Parts([first, last])
    assert torch.equal(found.read("bias", 4, 2), torch.tensor([4.0, 5.0]))
    with pytest.raises(CheckpointError, match=r"rows 2 to 5 of 'bias' are not in any of policy-"):
        found.read("bias", 1, 5)
    with pytest.raises(CheckpointError, match="rows 0 to 1 of 'weight'"):
        found.read("weight", 0, 2)


def test_files_that_are_gone_or_damaged(tmp_path: Path) -> None:
    first, second = written(tmp_path, {"bias": torch.arange(6.0)}, 2)
    with pytest.raises(CheckpointError, match=r"nothing.safetensors is missing"):
        Parts([first, tmp_path / "nothing.safetensors"])
    second.write_bytes(second.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors is damaged"):
        Parts([first, second])
