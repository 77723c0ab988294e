"""A model's weights as a checkpoint of it would name them, whole, one at a time."""

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

from segcredit.models.lora import merged

Result = TypeVar("Result")
_ENTRY, _EMPTY = "run_with_whole_weights", "model_without_data"


def shard(model: nn.Module, mesh: DeviceMesh, apart: Sequence[nn.Module] = ()) -> None:
    """Divide a loaded model: layer by layer, those of the vision tower too, then the rest.

    ``apart``: parts that compute in another type than the model. Weights without gradients have no
    originals and stay in the type they are in.
    """
    empty = _without_data(model)
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    for part in (*layers, *apart, model):
        _shard(part, mesh)
    setattr(model, _EMPTY, [empty])  # in a list, since it is no part of the model
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
    # inputs are cast nowhere: rotary angles are float32 in models of any type
    policy = MixedPrecisionPolicy(
        param_dtype=next(iter(dtypes), None), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    divided = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # losses carry the whole mini-batch's denominators, so gradients add up
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)


def is_sharded(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is divided: then its passes are everyone's."""
    return any(isinstance(x, FSDPModule) for x in model.modules())


def inside(model: nn.Module, work: Callable[[], Result]) -> Result:
    """Do ``work``, which may use any of the model's weights, as one forward pass of a sharded one.

    What the work returns is where gradients come in.
    """
    entry: Callable[[Callable[[], Result]], Result] | None = getattr(model, _ENTRY, None)
    return work() if entry is None else entry(work)


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight in the type the model computes in; everyone must ask.

    One at a time; what came before is let go.
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
    """What the model was before it was divided, its weights on the meta device."""
    found: list[nn.Module] = getattr(model, _EMPTY)
    return found[0]


def filled(empty: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A copy of a model without data that has these weights; tied ones are given once."""
    memory: dict[int, Any] = {
        id(x): nn.Parameter(weights[name], requires_grad=x.requires_grad)
        for name, x in empty.named_parameters()
    }
    return copy.deepcopy(empty, memory)


def _without_data(model: nn.Module) -> nn.Module:
    memory: dict[int, Any] = {
        id(x): nn.Parameter(torch.empty_like(x, device="meta"), requires_grad=x.requires_grad)
        for x in model.parameters()
    }
    return copy.deepcopy(model, memory)


def full_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight: what an engine that holds its own copy must be told.

    Weights that are tied appear once, under their first name. Those of a sharded model are gathered
    as they are asked for, so every process must ask. LoRA matrices of the policy are added to the
    weights beside which they stand.
    """
    named = ((name, x.detach()) for name, x in model.named_parameters())
    yield from merged(model, whole_weights(model) if is_sharded(model) else named)


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that have gradients, by name."""
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


@torch.no_grad()
def copy_weights(model: nn.Module, into: nn.Module) -> None:
    """Bring an undivided copy of a model up to date."""
    target = dict(into.named_parameters())
    for name, x in full_weights(model):
        target[name].copy_(x)


def undivided(model: nn.Module, device: torch.device, keep: bool = True) -> nn.Module | None:
    """A sharded model as it would be on one process; None where only the others keep it."""
    found = {name: x.to(device) for name, x in full_weights(model) if keep}
    return filled(without_data(model), found).to(device) if keep else None
