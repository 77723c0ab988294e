"""Bytes of all tensors alive, followed operation by operation: what a GPU's peak would be."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts storages that operations make, and forgets them when they go."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen = {x.untyped_storage()._cdata for x in known}  # weights: counted elsewhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._notice(x)
        return made

    def _notice(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or not size:
            return
        self._seen.add(key)
        weakref.finalize(storage, self._gone, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_of(work: Any, weights: Iterable[torch.nn.Parameter]) -> int:
    """Bytes above the weights while it works."""
    alive = Alive(weights)
    with alive:
        work()
    return alive.peak
