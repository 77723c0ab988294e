"""Sharding (FSDP2), and iterating over a model's full weights under their checkpoint names."""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from segcredit.models.lora import merge_adapter

Result = TypeVar("Result")
_ENTRY, _EMPTY = "run_with_whole_weights", "model_without_data"


def shard(model: nn.Module, mesh: DeviceMesh, apart: Sequence[nn.Module] = ()) -> None:
    """Shard a loaded model: every layer, those of the vision tower too, then the rest.

    ``apart``: modules that compute in another dtype than the model. Weights without gradients have
    no fp32 master weights and keep their dtype.
    """
    empty = _without_data(model)
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    for part in (*layers, *apart, model):
        _shard(part, mesh)
    setattr(model, _EMPTY, [empty])  # in a list, so that it is not registered as a submodule
    setattr(model, _ENTRY, MethodType(lambda _, work: work(), model))
    register_fsdp_forward_method(model, _ENTRY)


def _shard(part: nn.Module, mesh: DeviceMesh) -> None:
    own = [x for x in part.parameters() if not isinstance(x, DTensor)]
    dtypes = {x.dtype for x in own}
    if len(dtypes) > 1:
        raise ValueError(
            f"{type(part).__name__} mixes weights of {', '.join(sorted(map(str, dtypes)))}, which "
            f"cannot be gathered together. Set memory.shard=false, or model.dtype=float32."
        )
    for x in own:
        if x.requires_grad:
            x.data = x.data.float()
    # inputs are not cast: rotary angles are float32 in models of any dtype
    policy = MixedPrecisionPolicy(
        param_dtype=next(iter(dtypes), None), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    sharded = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # losses carry the whole mini-batch's denominators, so gradients are summed, not averaged
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def is_sharded(model: nn.Module) -> bool:
    """Whether any part of the model is sharded: then forward passes are collective operations."""
    return any(isinstance(x, FSDPModule) for x in model.modules())


def run_inside(model: nn.Module, work: Callable[[], Result]) -> Result:
    """Run ``work``, which may use any weight of the model, as one forward pass of a sharded model.

    Gradients enter through what ``work`` returns.
    """
    entry: Callable[[Callable[[], Result]], Result] | None = getattr(model, _ENTRY, None)
    return work() if entry is None else entry(work)


def _gather_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a sharded model, gathered, in the dtype it computes in.

    Collective operation. One weight at a time; the previous one is released.
    """
    empty = without_data(model)
    for (name, x), (_, kept) in zip(
        model.named_parameters(), empty.named_parameters(), strict=True
    ):
        assert isinstance(x, DTensor), name
        rounded = x.detach().to(kept.dtype)
        assert isinstance(rounded, DTensor)
        yield name, rounded.full_tensor()


def without_data(model: nn.Module) -> nn.Module:
    """Return the model as it was before sharding, with its weights on the meta device."""
    kept: list[nn.Module] = getattr(model, _EMPTY)
    return kept[0]


def _without_data(model: nn.Module) -> nn.Module:
    memory: dict[int, Any] = {
        id(x): nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=x.requires_grad)
        for x in model.parameters()
    }
    return copy.deepcopy(model, memory)


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every weight, for an engine that holds its own copy.

    Tied weights appear once, under their first name. The weights of a sharded model are gathered,
    so every rank must iterate (collective operation). The policy's LoRA adapter is merged in.
    """
    named = ((name, x.detach()) for name, x in model.named_parameters())
    yield from merge_adapter(model, _gather_weights(model) if is_sharded(model) else named)


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


@torch.no_grad()
def copy_weights(model: nn.Module, into: nn.Module) -> None:
    """Copy the weights of a model, which may be sharded, into an unsharded copy of it."""
    target = dict(into.named_parameters())
    for name, x in full_weights(model):
        target[name].copy_(x)


def unshard(model: nn.Module, device: torch.device, keep: bool = True) -> nn.Module | None:
    """Return an unsharded copy of a sharded model; None on ranks with ``keep=False``."""
    weights = {name: x.to(device) for name, x in full_weights(model) if keep}
    if not keep:
        return None
    empty = without_data(model)
    memory: dict[int, Any] = {
        id(x): nn.Parameter(weights[name], requires_grad=x.requires_grad)
        for name, x in empty.named_parameters()
    }
    return copy.deepcopy(empty, memory).to(device)
