"""The reverse scan behind every advantage, as a few matrix products."""

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Units per block: two levels of blocks reach 16,384 units, three 2 million."""


def reverse_scan(
    x: Float[Tensor, "B M"], decay: "float | Float[Tensor, ' B']"
) -> Float[Tensor, "B M"]:
    """y_m = x_m + decay · y_{m+1}, that is y_m = Σ_{l≥0} decay^l x_{m+l}.

    Inside a block of units the sum is a product with a triangular matrix of powers; the carry
    between blocks is the same scan over the blocks' first units with decay^BLOCK. Powers only ever
    multiply, so nothing overflows for any decay in [0, 1] and any width.
    """
    rows, width = x.shape
    num_blocks = -(-width // BLOCK)
    within, carry = _powers(decay, x.dtype, x.device)
    blocks = pad(x, (0, num_blocks * BLOCK - width)).view(rows, num_blocks, BLOCK)
    local = blocks @ within
    if num_blocks > 1:
        first = reverse_scan(local[:, :, 0], decay**BLOCK)
        local = torch.addcmul(local, pad(first[:, 1:], (0, 1))[:, :, None], carry)
    return local.reshape(rows, -1)[:, :width]


def _powers(
    decay: float | Tensor, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """decay^(j−i) for j ≥ i inside a block; decay^(BLOCK−i) for what comes from the next one."""
    if isinstance(decay, Tensor):  # one decay per response
        return _power_matrices(decay.to(dtype)[:, None, None])
    return _shared_powers(decay, dtype, device)


@lru_cache(maxsize=32)
def _shared_powers(decay: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a cached tensor must be usable outside inference mode
        return _power_matrices(torch.full((1, 1, 1), decay, dtype=dtype, device=device))


def _power_matrices(decay: Float[Tensor, "R 1 1"]) -> tuple[Tensor, Tensor]:
    unit = torch.arange(BLOCK, device=decay.device)
    distance = unit[:, None] - unit  # row j, column i: how far unit j lies after unit i
    within = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0.0)
    carry = decay ** (BLOCK - unit)
    return within, carry
