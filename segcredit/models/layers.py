"""Faster and smaller layers: fused kernels, compilation, recomputation, attention, sharding.

The last part iterates over the full weights of a model that may be sharded (FSDP2).
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import FunctionType, MethodType
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
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from segcredit.core.checks import has_layer_kernels
from segcredit.models.families import Family, find_family
from segcredit.models.lora import Lora, merge_adapter

Result = TypeVar("Result")

CLOSE = 1e-5
"""Maximum difference between fused and original norm in float32, for values around 1."""


class _FusedNorm(nn.Module):
    """Mixin that precedes a norm's own class in the method resolution order."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            output: Tensor = super().forward(x)
            return output
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _fused_class(plain: Any) -> Any:
    """Make one class per kind of norm: torch.compile compiles layers of equal classes once."""
    return type(f"Fused{plain.__name__}", (_FusedNorm, plain), {})


def fuse_norms(model: nn.Module) -> int:
    """Fuse the model's RMS norms w · x / √(mean(x²) + ε) into one kernel each; return how many.

    transformers' version launches eight kernels, which dominates the time of small models. In half
    precision the fused kernel rounds once, at the end; transformers also rounds x before it.
    """
    norms = [x for x in model.modules() if _is_norm(x)]
    for norm in norms:
        plain: Any = type(norm)
        norm.__class__ = _fused_class(plain)
    return len(norms)


def _is_norm(module: Any) -> bool:
    """Whether a module is such a norm, by its name and by its output.

    The name is not enough: Gemma's norm multiplies by 1 + w.
    """
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    if not named or not isinstance(weight, Tensor) or isinstance(module, _FusedNorm):
        return False
    with torch.no_grad():
        x = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device)
        w = torch.linspace(0.5, 1.5, weight.numel(), device=weight.device)
        kept, weight.data = weight.data, w
        try:
            output = module(x)
        finally:
            weight.data = kept
        expected = rms_norm(x, w.shape, w, module.variance_epsilon)
    return output.shape == expected.shape and float((output - expected).abs().max()) < CLOSE


ROTARY = "apply_rotary_pos_emb"
"""Name by which attention modules of transformers call their rotary embedding."""


def fuse_rotary(model: nn.Module) -> int:
    """Rotate queries and keys by one kernel per attention module; return the number of modules.

    Only modules of this model change: their class gets a copy of its forward function that calls
    the kernel. Inputs that the kernel does not support go to the original function.
    """
    modules = [x for x in model.modules() if _calls_rotary(type(x))]  # type: ignore[arg-type]
    for module in modules:
        plain: Any = type(module)
        module.__class__ = _rotary_class(plain)
    return len(modules)


@cache
def _calls_rotary(kind: Any) -> bool:
    """Whether a module's forward function calls the usual rotary embedding, tried on an example."""
    forward: Any = getattr(kind, "forward", None)
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return False
    rotate = forward.__globals__.get(ROTARY)
    if rotate is None or hasattr(rotate, "_plain"):
        return False
    q, k, cos, sin = (torch.linspace(-1, 2, 48).view(2, 2, 3, 4) ** n for n in (1, 2, 3, 4))
    cos, sin = cos[:, 0], sin[:, 0]
    expected = [
        x * cos[:, None] + torch.cat([-x[..., 2:], x[..., :2]], dim=-1) * sin[:, None]
        for x in (q, k)
    ]
    try:
        found = rotate(q, k, cos, sin)
        return all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    except Exception:  # another function of that name
        return False


@cache
def _rotary_class(plain: Any) -> Any:
    """Make a subclass whose forward function calls the kernel."""
    forward = plain.forward
    rotate = forward.__globals__[ROTARY]

    def fused(*args: Any, **given: Any) -> Any:
        if len(args) == 4 and not given and has_layer_kernels(args[0]):
            from segcredit.core.layer_kernels import rotary, rotary_fits

            if rotary_fits(*args):
                return rotary(*args)
        return rotate(*args, **given)

    fused._plain = rotate  # type: ignore[attr-defined]
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: fused},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(f"Rotary{plain.__name__}", (plain,), {"forward": own})


class _FusedGate(nn.Module):
    """Mixin that precedes a gated MLP's own class in the method resolution order."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if not has_layer_kernels(x):
            output: Tensor = super().forward(x)
            return output
        from segcredit.core.layer_kernels import gated_silu

        found: Tensor = self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))
        return found


@cache
def _gate_class(plain: Any) -> Any:
    return type(f"Fused{plain.__name__}", (_FusedGate, plain), {})


def fuse_gates(model: nn.Module) -> int:
    """Compute silu(gate) · up of gated MLPs by one kernel each; return their number."""
    gates = [x for x in model.modules() if _is_gate(x)]
    for gate in gates:
        plain: Any = type(gate)
        gate.__class__ = _gate_class(plain)
    return len(gates)


@torch.no_grad()
def _is_gate(module: Any) -> bool:
    """Whether a module is a gated MLP with SiLU, by its parts and by its output."""
    parts: list[Any] = [getattr(module, f"{x}_proj", None) for x in ("gate", "up", "down")]
    plain = [getattr(x, "base_layer", x) for x in parts]  # below LoRA's adapters
    named = all(isinstance(x, nn.Linear) for x in plain) and hasattr(module, "act_fn")
    if not named or isinstance(module, _FusedGate):
        return False
    weight = plain[0].weight
    x = torch.linspace(-1.0, 2.0, weight.shape[1], device=weight.device, dtype=weight.dtype)[None]
    largest = float(parts[0](x).abs().max())
    for scale in (1.0, 1e3 / max(largest, 1e-3)):  # some models clamp large values
        given = scale * x
        try:
            output = module(given)
            expected = parts[2](nn.functional.silu(parts[0](given)) * parts[1](given))
            same = torch.allclose(output, expected)
        except Exception:  # it takes other inputs
            return False
        if not same:
            return False
    return True


def compile_layers(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the model's layers on first use without a KV cache; return their number.

    Layers of a kind are compiled once, for any number of tokens. Attention is not compiled: it is
    one kernel already. Calls with a KV cache are not compiled either, since the cache grows with
    every token and each length would be compiled again. The choice depends on the arguments alone,
    because a recomputed layer must repeat in the backward pass what it did in the forward pass.
    """
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    for layer in layers:
        layer._compiled_call_impl = _without_cache(layer, backend)
    return len(layers)


def _without_cache(layer: Any, backend: str) -> Any:
    plain = layer._call_impl
    compiled = torch.compile(plain, dynamic=True, backend=backend)

    def call(*args: Any, **given: Any) -> Any:
        cached = given.get("past_key_values") is not None
        return (plain if cached else compiled)(*args, **given)

    return call


def recompute_activations(model: PreTrainedModel, lora: Lora | None = None) -> None:
    """Turn on gradient checkpointing: keep one activation per layer and recompute the rest.

    The recomputation uses the adapter of the forward pass, even if another is active then.
    """
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"{type(model).__name__} cannot recompute activations. "
            f"Set memory.recompute_activations=false."
        )
    settings: dict[str, Any] = {"use_reentrant": False}
    if lora is not None:
        settings["context_fn"] = lora.recomputing
    # transformers 5.23 renamed both the method and its keyword; the old names warn there
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = (
        model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    )
    enable(settings)


def recomputes(model: nn.Module) -> bool:
    """Whether a forward pass with gradients recomputes activations now."""
    return torch.is_grad_enabled() and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Return a context in which layers recompute activations.

    transformers recomputes only in training mode, where it refuses to fill a KV cache. So the
    layers are in that mode only during such a forward pass, and their submodules never: dropout
    stays off.
    """
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    active = layers if recomputes(model) else []
    for layer in active:
        layer.training = True
    try:
        yield
    finally:
        for layer in active:
            layer.training = False


GROUPED = "segcredit_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention over (batch, heads, tokens, head_dim) without repeated keys and values.

    Falls back to transformers' own function where that is as fast.
    """
    if query.shape[2] == 1 and not torch.is_grad_enabled():
        return _one_token(query, key, value, attention_mask, scaling), None
    if query.shape[1] != key.shape[1] and not query.is_cuda and attention_mask is not None:
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Compute one decoding step, with the softmax in float32; on a GPU by one kernel."""
    batch, heads, _, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    if has_layer_kernels(query):
        from segcredit.core.layer_kernels import decode, decode_fits

        if decode_fits(query, key, value, mask):
            return decode(query, key, value, None if mask is None else _bias(mask), scale)
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], size) * scale
    scores = torch.matmul(grouped, key.transpose(2, 3)).float()
    if mask is not None:
        scores = scores + _bias(mask)
    weights = scores.softmax(dim=-1).to(value.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, size)


def _bias(mask: Tensor) -> Tensor:
    """Return 0 at attended positions, −∞ elsewhere; cached, since all layers share the mask."""
    if mask.dtype != torch.bool:
        return mask
    known: Tensor | None = getattr(mask, "_bias", None)
    if known is None:
        known = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
        mask._bias = known  # type: ignore[attr-defined]
    return known


PACKED = "segcredit_packed_flash"


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention implementation of a recipe; "auto" packs on a GPU in half precision."""
    if name not in ("auto", "packed"):
        model.set_attn_implementation(name)
        return
    if not model._supports_sdpa:
        return  # its own code computes attention
    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _mask)
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    half = model.dtype in (torch.bfloat16, torch.float16)
    pack = name == "packed" or (model.device.type == "cuda" and half)
    # not by set_attn_implementation, which would look for a package of that name
    model.config._attn_implementation = PACKED if pack else GROUPED


def packs(model: nn.Module, family: Family | None = None) -> bool:
    """Whether the model reads packed rows: with packed attention, in every layer the same way."""
    config = getattr(model, "config", None)
    if config is None or config._attn_implementation != PACKED or not full_attention(config):
        return False
    return (find_family(config) if family is None else family).packing


def full_attention(config: PreTrainedConfig) -> bool:
    """Whether every layer attends to all previous tokens: no windows, no recurrent states."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return all(kind == "full_attention" for kind in kinds)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # sequence bounds depend on data
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention over (1, heads, tokens of all sequences, head_dim).

    Sequences begin where positions are 0, or as ``cu_seq_lens_q`` says. Any other input, a padded
    batch or a decoding step with a cache, goes to :func:`grouped_attention`.
    """
    alone = query.shape[0] == 1 and query.shape[2] == key.shape[2] and attention_mask is None
    if cu_seq_lens_q is None and not (alone and position_ids is not None):
        return grouped_attention(
            module, query, key, value, attention_mask, scaling, is_causal=is_causal, **others
        )
    if cu_seq_lens_q is None:
        assert position_ids is not None
        cu_seq_lens_q, max_length_q = _bounds(position_ids)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if _has_kernel(query):
        assert max_length_q is not None
        output = _by_kernel(query, key, value, cu_seq_lens_q, int(max_length_q), scaling, causal)
    else:
        output = _one_by_one(query, key, value, cu_seq_lens_q, scaling, causal)
    return output, None


def _bounds(position_ids: Tensor) -> tuple[Tensor, int]:
    """Return each sequence's start and the end of the last sequence, and the maximum length.

    Cached with the positions: all layers of a forward pass share them, and computing the bounds
    synchronizes with the GPU.
    """
    known: tuple[Tensor, int] | None = getattr(position_ids, "_bounds", None)
    if known is None:
        count = position_ids.shape[-1]
        begins = (position_ids[0] == 0).nonzero().flatten().to(torch.int32)
        bounds = nn.functional.pad(begins, (0, 1), value=count)
        known = (bounds, int(bounds.diff().max()))
        position_ids._bounds = known  # type: ignore[attr-defined]
    return known


def _has_kernel(query: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and find_spec("torch.nn.attention.varlen") is not None


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scaling: float | None,
    causal: bool,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # older kernels share key heads among query heads without being asked
    has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": True} if has_option else {}
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    bounds = bounds.to(torch.int32)
    window = (-1, 0) if causal else (-1, -1)
    output = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **grouped
    )
    assert isinstance(output, Tensor)
    return output[None]


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float | None, causal: bool
) -> Tensor:
    lengths = bounds.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    parts = [
        scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scaling, enable_gqa=grouped
        ).transpose(1, 2)
        for q, k, v in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=1)


def _mask(*args: Any, **given: Any) -> Any:
    """Return no mask for packed rows, SDPA's mask otherwise."""
    whole = given.get("batch_size") == 1 and given.get("q_length") == given.get("kv_length")
    if whole and given.get("attention_mask") is None:
        return None
    return sdpa_mask(*args, **given)


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
