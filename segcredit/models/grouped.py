"""Attention whose heads share keys, without copying keys for every head.

transformers repeats keys and values until each head has its own before it calls torch. A sampler
reads all of them for every token, so the copies cost more than the attention.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

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
    """Of (batch, heads, tokens, size); transformers' own function where nothing can be gained."""
    if query.shape[2] == 1 and not torch.is_grad_enabled():
        return _one_token(query, key, value, attention_mask, scaling), None
    if query.shape[1] != key.shape[1] and not query.is_cuda and attention_mask is not None:
        found = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return found.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """One step of a sampler: two products and a softmax in float32."""
    batch, heads, _, size = query.shape
    scale = size**-0.5 if scaling is None else scaling
    together = query.view(batch, key.shape[1], heads // key.shape[1], size) * scale
    scores = torch.matmul(together, key.transpose(2, 3)).float()
    if mask is not None:
        scores = scores + _bias(mask)
    weights = scores.softmax(dim=-1).to(value.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, size)


def _bias(mask: Tensor) -> Tensor:
    """0 where one may look and −∞ elsewhere; remembered, since all layers share the mask."""
    if mask.dtype != torch.bool:
        return mask
    known: Tensor | None = getattr(mask, "_bias", None)
    if known is None:
        known = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
        mask._bias = known  # type: ignore[attr-defined]
    return known
