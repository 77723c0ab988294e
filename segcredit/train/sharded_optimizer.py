"""AdamW on this process's part of every weight of a sharded model."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from segcredit.config import OptimizerSettings
from segcredit.models.sharded import is_sharded, without_data
from segcredit.train.optimizer import Optimizer
from segcredit.train.streamed import StreamedOptimizer


def make_optimizer(
    name: str,
    model: nn.Module,
    lr: float,
    settings: OptimizerSettings,
    offload: bool | Literal["stream"] = False,
    trained: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """As the model is: whole or divided."""
    if offload == "stream":
        return StreamedOptimizer(name, model, lr, settings, trained)
    kind = ShardedOptimizer if is_sharded(model) else Optimizer
    return kind(name, model, lr, settings, offload, trained)


class ShardedOptimizer(Optimizer):
    """The divided weights are the float32 originals, so it holds moments alone.

    Offloaded, those rest in main memory; the weights cannot, since passes gather them.
    """

    @torch.no_grad()
    def _originals(self, model: nn.Module) -> list[Tensor]:
        """Views of the parts that lie here.

        They begin as what the model computes with, rounded, as any other optimizer's do.
        """
        computed = dict(without_data(model).named_parameters())
        types = [computed[name].dtype for name in self.names]
        self._rounded = any(x != torch.float32 for x in types)
        parts = [_local(x).detach() for x in self.weights]
        for part, kind in zip(parts, types, strict=True):
            part.copy_(part.to(kind))
        return [part.requires_grad_() for part in parts]

    def _clip(self) -> Tensor:
        """By the norm of all parts together, the same on every process."""
        for weight, part in zip(self.weights, self.parameters, strict=True):
            part.grad = None if weight.grad is None else _local(weight.grad)
        gradients = [x.grad for x in self.parameters if x.grad is not None]
        squared = torch.zeros((), device=self.parameters[0].device)
        squared += nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm)
        return norm

    def _write_back(self) -> None:
        """The originals are the weights."""

    def _resting(self) -> list[Tensor]:
        originals = {id(x) for x in self.parameters}
        return [x for x in super()._resting() if id(x) not in originals]

    def rows(self, name: str) -> tuple[int, int, tuple[int, ...]]:
        """Which rows of a weight lie here, first and number, and the whole weight's shape."""
        weight = self.weights[self.names.index(name)]
        assert isinstance(weight, DTensor)
        before = _rows_before(weight)
        return before, len(_local(weight)), tuple(weight.shape)


def _local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x._local_tensor


def _rows_before(x: DTensor) -> int:
    """Rows are dealt out evenly, rounded up, until there are none left."""
    mesh = x.device_mesh
    each = -(-x.shape[0] // mesh.size())
    return min(x.shape[0], each * mesh.get_local_rank())
