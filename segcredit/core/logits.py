"""From logits to log-probabilities and entropies, at the sampling temperature."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.checks import require_positive


def scaled(
    logits: Float[Tensor, "*N V"], temperature: float, banned: Bool[Tensor, " V"] | None = None
) -> Float[Tensor, "*N V"]:
    """logits / temperature in float32, with banned tokens at −∞: the distribution one samples."""
    require_positive(
        "temperature", temperature, "Greedy choice has no log-probabilities of its own."
    )
    x = logits.float()
    if temperature != 1.0:
        x = x / temperature
    return x if banned is None else x.masked_fill(banned, -torch.inf)


def entropy(logp: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """H = −Σ p log p over the whole vocabulary; banned tokens (log p = −∞) add nothing."""
    return torch.special.entr(logp.exp()).sum(dim=-1)


def token_logp(
    logits: Float[Tensor, "*N V"],
    tokens: Int[Tensor, "*N"],
    temperature: float = 1.0,
    banned: Bool[Tensor, " V"] | None = None,
) -> Float[Tensor, "*N"]:
    """log π of each given token."""
    x = scaled(logits, temperature, banned)
    chosen = x.gather(-1, tokens[..., None]).squeeze(-1)
    return chosen - x.logsumexp(dim=-1)


def token_logp_and_entropy(
    logits: Float[Tensor, "*N V"],
    tokens: Int[Tensor, "*N"],
    temperature: float = 1.0,
    banned: Bool[Tensor, " V"] | None = None,
) -> tuple[Float[Tensor, "*N"], Float[Tensor, "*N"]]:
    """log π of each given token, and the entropy of the distribution it was drawn from."""
    logp = scaled(logits, temperature, banned).log_softmax(dim=-1)
    return logp.gather(-1, tokens[..., None]).squeeze(-1), entropy(logp)
