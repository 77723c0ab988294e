"""Names of GPUs, well and badly written."""

import pytest
import torch
from each import each

from segcredit.plan import GPUS, parse_gpus
from segcredit.plan.job import present_gpus


@each(
    ("text", "count", "name"),
    [
        ("1xH200", 1, "H200"),
        ("H200", 1, "H200"),
        ("8xA100-80G", 8, "A100-80G"),
        ("8 x a100 80gb", 8, "A100-80G"),
        ("2×rtx4090", 2, "RTX-4090"),
        ("4*L40S ", 4, "L40S"),
        ("RTX_6000_Ada", 1, "RTX-6000-Ada"),
    ],
)
def test_names_are_read_as_people_write_them(text: str, count: int, name: str):
    assert parse_gpus(text) == (count, GPUS[name])


@each(
    ("text", "near"),
    [
        ("A100", "A100-80G or A100-40G"),
        ("8xH100", "H100-80G or H100-PCIe"),
        ("4090", "RTX-4090"),
        ("H20O", "H200"),
        ("NVIDIA L40", "L40S"),
        ("rtx 4080", "RTX-"),
    ],
)
def test_an_unknown_name_gives_the_nearest(text: str, near: str):
    with pytest.raises(ValueError, match=f"Did you mean {near}"):
        parse_gpus(text)


@each("text", ["", " ", "0xH200", "99999xH200", "x", "8x", "\x1b[31m", "TPU" * 99])
def test_nonsense_is_refused_in_one_printable_line(text: str):
    with pytest.raises(ValueError, match="--gpus") as error:
        parse_gpus(text)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


class Properties:
    def __init__(self, name: str, gib: float) -> None:
        self.name, self.total_memory = name, int(gib * 2**30)


@each(
    ("name", "gib", "found"),
    [
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40G"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80G"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80G"),
        ("NVIDIA H100 PCIe", 79.1, "H100-PCIe"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX-6000-Ada"),
        ("NVIDIA RTX A6000", 47.5, "RTX-A6000"),
        ("NVIDIA L4", 22.0, "L4"),
    ],
)
def test_this_machines_gpus_are_recognized(
    name: str, gib: float, found: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties(name, gib))
    assert present_gpus() == (3, GPUS[found])


def test_a_gpu_that_is_not_in_the_table_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties("Tesla T4", 15))
    with pytest.raises(ValueError, match=r"'Tesla T4' with 15 GiB, is not in the table.*--gpus 1x"):
        present_gpus()


def test_no_gpu_here_and_none_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--gpus 1xH200"):
        present_gpus()
