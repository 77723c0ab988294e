"""The step itself: torch's AdamW, or bitsandbytes' with moments of eight bits."""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

LIBRARY = "bitsandbytes"
Kind = Literal["adamw", "adamw_8bit"]


def why_not(kind: Kind) -> str | None:
    """What is missing for it; None: nothing."""
    if kind == "adamw_8bit" and find_spec(LIBRARY) is None:
        return f"{kind} needs {LIBRARY}. Type: pip install 'segcredit[8bit]'"
    return None


def make_adam(
    kind: Kind, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW over the groups, each with its own decay.

    With eight bits, moments are kept as codes in blocks of 256 with a scale each, those of tensors
    under 4096 numbers as they are; all are plain tensors, so that they rest and are saved as ever.
    """
    if kind == "adamw":
        held: list[Tensor] = [x for group in groups for x in group["params"]]
        fused = True if all(x.is_cuda for x in held) else None
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)
    if problem := why_not(kind):
        raise ValueError(f"optimizer.kind: {problem}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which it still uses
        from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
