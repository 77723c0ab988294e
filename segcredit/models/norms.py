"""RMS norms as one kernel each: written out they are eight, and small models wait for kernels."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

CLOSE = 1e-5
"""Largest difference between the two ways in float32, of numbers around 1."""


class _Fused(nn.Module):
    """Before a norm's own class in its line of classes."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            said: Tensor = super().forward(x)
            return said
        return rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _fused(plain: Any) -> Any:
    """One class for all norms of a kind: torch.compile compiles layers of equal classes once."""
    return type(f"Fused{plain.__name__}", (_Fused, plain), {})


def fuse_norms(model: nn.Module) -> int:
    """Have torch's own kernel compute the model's norms w · x / √(mean(x²) + ε); how many it does.

    In half precision it rounds once, at the end; written out, x is rounded before it is multiplied.
    """
    norms = [x for x in model.modules() if _is_norm(x)]
    for norm in norms:
        plain: Any = type(norm)
        norm.__class__ = _fused(plain)
    return len(norms)


def _is_norm(module: Any) -> bool:
    """Whether it is such a norm: by its name and parts, and by what it says.

    Others carry the name, too: Gemma's multiplies by 1 + w.
    """
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    if not named or not isinstance(weight, Tensor) or isinstance(module, _Fused):
        return False
    with torch.no_grad():
        x = torch.linspace(-1.0, 2.0, weight.numel(), device=weight.device)
        w = torch.linspace(0.5, 1.5, weight.numel(), device=weight.device)
        kept, weight.data = weight.data, w
        try:
            said = module(x)
        finally:
            weight.data = kept
        expected = rms_norm(x, w.shape, w, module.variance_epsilon)
    return said.shape == expected.shape and float((said - expected).abs().max()) < CLOSE
