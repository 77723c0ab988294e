"""An optimizer's state in a checkpoint, whole or divided among files, whoever reads it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segcredit.runlog.shards import Part, Parts, file_name, save_parts
from segcredit.train.optimizer import Optimizer
from segcredit.train.sharded_optimizer import ShardedOptimizer

_ORIGINAL = "original"


def save_part(optimizer: ShardedOptimizer, place: Path, rank: int, writers: int) -> dict[str, Any]:
    """Write this process's rows; what is not divided is returned, the same on all."""
    kept: Any = optimizer.state()
    numbers, state = optimizer.numbers, kept["adam"]["state"]
    parts: dict[str, Part] = {}
    whole: dict[str, dict[str, float]] = {}
    for i, name in enumerate(optimizer.names):
        before, _, shape = optimizer.rows(name)
        tensors = dict(state.get(numbers[name], {}))
        whole[name] = {key: float(x) for key, x in tensors.items() if not x.ndim}
        if kept["originals"] is not None:
            tensors[_ORIGINAL] = kept["originals"][i]
        for key, x in tensors.items():
            if x.ndim:
                parts[f"{name}/{key}"] = Part(x, before, shape)
    save_parts(place / file_name(_files(optimizer.name), rank, writers), parts)
    groups = [
        {key: x for key, x in group.items() if key != "params"}
        for group in kept["adam"]["param_groups"]
    ]
    return {"writers": writers, "refused": kept["refused"], "groups": groups, "whole": whole}


def load_moments(optimizer: Optimizer, kept: dict[str, Any], place: Path) -> None:
    """Go on from what a checkpoint has: of one process or many, for one process or many."""
    if "writers" not in kept and not isinstance(optimizer, ShardedOptimizer):
        optimizer.load(kept)
        return
    source = _Divided(kept, optimizer, place) if "writers" in kept else _Whole(kept, optimizer)
    numbers, own = optimizer.numbers, optimizer.state()["adam"]
    assert isinstance(own, dict)
    state: dict[int, dict[str, Tensor]] = {}
    for name in optimizer.names:
        if found := source.moments(name):
            state[numbers[name]] = found
    groups = [now | then for now, then in zip(own["param_groups"], source.groups, strict=True)]
    optimizer.load(
        {
            "adam": {"state": state, "param_groups": groups},
            "refused": kept["refused"],
            "originals": source.originals(),
        }
    )


class _Source:
    """A saved state, from which an optimizer reads its own rows."""

    groups: list[dict[str, Any]]

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def rows(self, name: str) -> tuple[int, int]:
        if isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.rows(name)[:2]
        return 0, len(self.optimizer.parameters[self.optimizer.names.index(name)])


class _Divided(_Source):
    def __init__(self, kept: dict[str, Any], optimizer: Optimizer, place: Path) -> None:
        super().__init__(optimizer)
        self.groups, self._whole = kept["groups"], kept["whole"]
        count = kept["writers"]
        names = (file_name(_files(optimizer.name), i, count) for i in range(count))
        self._parts = Parts(place / name for name in names)

    def moments(self, name: str) -> dict[str, Tensor]:
        whole = {key: torch.tensor(x) for key, x in self._whole[name].items()}
        keys = ("exp_avg", "exp_avg_sq")
        return whole | {key: self._read(name, key) for key in keys if whole}

    def originals(self) -> list[Tensor] | None:
        names = self.optimizer.names
        if f"{names[0]}/{_ORIGINAL}" not in self._parts:
            return None
        return [self._read(name, _ORIGINAL) for name in names]

    def _read(self, name: str, key: str) -> Tensor:
        return self._parts.read(f"{name}/{key}", *self.rows(name))


class _Whole(_Source):
    def __init__(self, kept: dict[str, Any], optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._kept, self._numbers = kept, optimizer.numbers
        self.groups = [
            {key: x for key, x in group.items() if key != "params"}
            for group in kept["adam"]["param_groups"]
        ]

    def moments(self, name: str) -> dict[str, Tensor]:
        found = self._kept["adam"]["state"].get(self._numbers[name], {})
        return {key: self._own(name, x) if x.ndim else x for key, x in found.items()}

    def originals(self) -> list[Tensor] | None:
        whole = self._kept["originals"]
        if whole is None:
            return None
        return [self._own(name, x) for name, x in zip(self.optimizer.names, whole, strict=True)]

    def _own(self, name: str, x: Tensor) -> Tensor:
        before, count = self.rows(name)
        return x[before : before + count].clone()


def _files(name: str) -> str:
    return f"{name}-optimizer"
