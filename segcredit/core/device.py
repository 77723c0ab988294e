"""Which implementation runs: Triton kernels on CUDA, else plain torch; and the way there."""

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor


def has_kernels(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: float32 on a CUDA device with Triton at hand.

    ``SEGCREDIT_KERNELS=off``, read once, keeps to plain torch on CUDA too; so does
    torch.use_deterministic_algorithms, since the kernels add atomically.
    """
    fitting = all(x.is_cuda and x.dtype == torch.float32 for x in tensors)
    return fitting and _triton_is_there() and not torch.are_deterministic_algorithms_enabled()


def has_head_kernels(logits: Tensor) -> bool:
    """The same for the language-model head, whose kernels take any float of a GPU."""
    known = (torch.float32, torch.bfloat16, torch.float16)
    return logits.is_cuda and logits.dtype in known and _triton_is_there()


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; from main memory without waiting for what the device has to do.

    What lies in ordinary main memory has been read when the call returns, so it may change after.
    """
    return x.to(device, non_blocking=x.device.type == "cpu")


@lru_cache(maxsize=1)
def _triton_is_there() -> bool:
    wanted = os.environ.get("SEGCREDIT_KERNELS") != "off"
    return wanted and importlib.util.find_spec("triton") is not None
