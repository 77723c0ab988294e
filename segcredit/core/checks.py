"""Validate tensors with clear error messages, and mask out invalid entries."""

import importlib.util
import math
import os
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Claim(NamedTuple):
    """A condition on a number on the device, and the error message if it fails."""

    number: Tensor
    """A 0-d tensor."""
    holds: Callable[[float], bool]
    otherwise: Callable[[], str]
    """Makes the message. It is called only on failure, so that finding the row costs nothing
    otherwise."""


def require(*claims: Claim) -> None:
    """Raise ValueError with the message of the first claim that fails."""
    for claim in claims:
        if not claim.holds(claim.number.item()):
            raise ValueError(claim.otherwise())


def none(bad: Tensor, otherwise: Callable[[], str]) -> Claim:
    """Claim that no entry of ``bad`` is True."""
    return Claim(bad.any(), lambda number: not number, otherwise)


def keep(mask: Tensor, x: Tensor, otherwise: float = 0.0) -> Tensor:
    """Replace x by a constant off the mask; x is not read there, so it may be NaN."""
    return torch.where(mask, x, constant(otherwise, x.dtype, x.device))


@lru_cache(maxsize=64)
def constant(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a cached 0-d tensor; with a Python number torch.where launches three kernels."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def positions(num: int, device: torch.device) -> Tensor:
    """Return the cached tensor 0, 1, …, num − 1."""
    with torch.inference_mode(False):
        return torch.arange(num, device=device)


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision and integers to float32; keep float32 and float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of long sums: float64, but float32 on Apple's mps, which has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def require_shape(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Raise ValueError unless the two tensors have the same shape."""
    if x.shape != like.shape:
        raise ValueError(
            f"{name} must have the shape of {like_name}, {tuple(like.shape)}; "
            f"got {tuple(x.shape)}. Pad both to one width (responses, tokens)."
        )


def require_mask(name: str, mask: Tensor) -> None:
    """Raise ValueError unless the mask is a boolean (responses, units) tensor with entries."""
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(
            f"{name} must be a boolean tensor (responses, tokens); got {mask.dtype} of shape "
            f"{tuple(mask.shape)}. Pass mask.bool()."
        )
    if mask.numel() == 0:
        raise ValueError(
            f"{name} must cover at least one response of at least one token; got shape "
            f"{tuple(mask.shape)}."
        )


def require_unit_interval(name: str, x: float, hint: str) -> None:
    """Raise ValueError unless 0 ≤ x ≤ 1."""
    if not 0.0 <= x <= 1.0:
        raise ValueError(f"{name} must be in [0, 1]; got {x}. {hint}")


def require_at_least(name: str, x: float, least: float, hint: str) -> None:
    """Raise ValueError unless x ≥ least; NaN is refused."""
    if not x >= least:
        raise ValueError(f"{name} must be at least {least}; got {x}. {hint}")


def require_positive(name: str, x: float, hint: str) -> None:
    """Raise ValueError unless x > 0."""
    if not x > 0:
        raise ValueError(f"{name} must be positive; got {x}. {hint}")


def require_probability(name: str, x: float, hint: str) -> None:
    """Raise ValueError unless 0 < x ≤ 1."""
    if not 0.0 < x <= 1.0:
        raise ValueError(f"{name} must be a probability in (0, 1]; got {x}. {hint}")


def finite_vector(name: str, x: Tensor) -> Claim:
    """Claim that every entry is finite."""
    bad = ~x.isfinite()
    return none(
        bad,
        lambda: (
            f"{name} must be finite; got {x[bad][0].item()} in row {int(bad.nonzero()[0])} "
            f"({int(bad.sum())} in all)."
        ),
    )


def finite(mask: Tensor, **columns: Tensor) -> Claim:
    """Claim that the columns are finite wherever the mask is True; other entries are not read.

    A sum is finite only if every term is, so a single sum over all columns is enough.
    """
    total = keep(mask, _added(columns)).sum()
    return Claim(total, math.isfinite, lambda: not_finite(mask, **columns))


def not_finite(mask: Tensor, **columns: Tensor) -> str:
    """Write the error message for columns that are not finite."""
    for name, x in columns.items():
        bad = (~x.isfinite() & mask).nonzero()
        if len(bad):
            row, unit = bad[0].tolist()
            return (
                f"{name} must be finite wherever the mask is True; got {x[row, unit].item()} at "
                f"response {row}, position {unit} ({len(bad)} in all). Check the model that "
                f"produced it: one such number would spoil the whole response's credit."
            )
    return f"{' and '.join(columns)} must be of moderate size; got a sum that overflows."


def _added(columns: dict[str, Tensor]) -> Tensor:
    first, *others = (at_least_float32(x) for x in columns.values())
    for x in others:
        first = first + x
    return first


def empty_rows(mask: Tensor) -> str:
    """Write the error message for responses without tokens."""
    empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
    if len(empty) == len(mask):
        return (
            "mask must hold at least one True per response; got a mask of zeros. Is it inverted, "
            "or the prompt's? True marks response tokens."
        )
    return (
        f"every response needs at least one token; got an empty response in row(s) {empty[:8]} of "
        f"{len(mask)}. Drop empty responses first: keep = mask.any(dim=1)."
    )


def no_empty_row(mask: Tensor) -> Claim:
    """Claim that every row of the mask has at least one True."""
    return none(~mask.any(dim=1), lambda: empty_rows(mask))


def has_kernels(*tensors: Tensor) -> bool:
    """Whether the Triton kernels can be used: float32 on a CUDA device with Triton installed.

    ``SEGCREDIT_KERNELS=off``, read once, selects plain torch on CUDA too. So does
    torch.use_deterministic_algorithms, since the kernels use atomic additions.
    """
    fitting = all(x.is_cuda and x.dtype == torch.float32 for x in tensors)
    return fitting and _has_triton() and not torch.are_deterministic_algorithms_enabled()


def has_head_kernels(logits: Tensor) -> bool:
    """Whether the kernels of the language-model head can be used: on a GPU, in any precision."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return logits.is_cuda and logits.dtype in known and _has_triton()


def has_layer_kernels(x: Tensor) -> bool:
    """Whether the kernels of a decoder layer can be used, and agree with torch on this GPU."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    usable = x.is_cuda and x.dtype in known and not torch.compiler.is_compiling()
    if not (usable and _has_triton()):
        return False
    from segcredit.core.layer_kernels import agree

    return agree(x.device, x.dtype)


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; copying from CPU memory does not wait for the device.

    Pageable CPU memory has been read when the call returns, so it may change afterwards.
    """
    return x.to(device, non_blocking=x.device.type == "cpu")


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    wanted = os.environ.get("SEGCREDIT_KERNELS") != "off"
    return wanted and importlib.util.find_spec("triton") is not None
