"""From logits to log-probabilities and entropies, at the sampling temperature."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.checks import at_least_float32, require_positive


def scaled(
    logits: Float[Tensor, "*N V"], temperature: float, banned: Bool[Tensor, " V"] | None = None
) -> Float[Tensor, "*N V"]:
    """logits / temperature in float32 or better, banned tokens at −∞: what one samples from."""
    require_positive(
        "temperature", temperature, "Greedy choice has no log-probabilities of its own."
    )
    x = at_least_float32(logits)
    if temperature != 1.0:
        x = x / temperature
    return x if banned is None else x.masked_fill(banned, -torch.inf)


def entropy(logp: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """H = −Σ p log p over the whole vocabulary; banned tokens (log p = −∞) add nothing.

    By log p, not by log of p: where p underflows to 0, the gradient of the latter is NaN.
    """
    finite = logp.clamp(min=-1000.0)  # p is 0 long before that, in any precision
    return -(logp.exp() * finite).sum(dim=-1)


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
