"""Choosing the next token from a distribution, with randomness that is handed in."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.logits import scaled
from segcredit.types import Sampling


def choose(logp: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The token at which the cumulative probability first exceeds u ∈ [0, 1).

    One number per row decides, so a row's draw does not depend on which rows are beside it.
    Summed in float64: in float32 the tail of a large vocabulary would be lost in rounding.
    """
    total = logp.double().exp().cumsum(dim=-1)
    threshold = uniform.double() * total[:, -1]
    # right: a token of probability zero shares its sum with its neighbour and is never first
    found = torch.searchsorted(total, threshold[:, None], right=True).squeeze(-1)
    return found.clamp(max=logp.shape[-1] - 1)  # of NaN nothing is found; the engine says so


def nucleus(logp: Float[Tensor, "B V"], top_p: float = 1.0, top_k: int = 0) -> Float[Tensor, "B V"]:
    """Unlikely tokens at −∞: beyond the k likeliest, or past cumulative probability p."""
    keep: Bool[Tensor, "B V"] = torch.ones_like(logp, dtype=torch.bool)
    if 0 < top_k < logp.shape[-1]:
        keep &= logp >= logp.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1.0:
        sorted_logp, order = logp.sort(dim=-1, descending=True, stable=True)
        before = sorted_logp.exp().cumsum(dim=-1) - sorted_logp.exp()
        keep &= torch.zeros_like(keep).scatter(-1, order, before < top_p)
    return logp.masked_fill(~keep, -torch.inf)


def pick(
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, " B"],
    sampling: Sampling,
    banned: Bool[Tensor, " V"] | None,
) -> tuple[Float[Tensor, "B V"], Int[Tensor, " B"]]:
    """log π over the vocabulary as it is recorded, and the tokens chosen."""
    greedy = sampling.temperature == 0.0
    log_pi = scaled(logits, 1.0 if greedy else sampling.temperature, banned).log_softmax(-1)
    if greedy:
        return log_pi, log_pi.argmax(dim=-1)
    allowed = log_pi
    if sampling.top_p < 1.0 or sampling.top_k:
        allowed = nucleus(log_pi, sampling.top_p, sampling.top_k)
    return log_pi, choose(allowed, uniform)
