"""Choosing the next token from a distribution, with randomness that is handed in."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.logits import scaled
from segcredit.types import Encoded, Sampling


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


def tokens_left(
    prompts: Sequence[Encoded], prefixes: Sequence[Int[Tensor, "_"]], sampling: Sampling
) -> list[int]:
    """How many tokens may follow each begun response."""
    left = [sampling.max_tokens - len(x) for _, x in zip(prompts, prefixes, strict=True)]
    for row, count in enumerate(left):
        if count < 1:
            raise ValueError(
                f"prefix {row} has {len(prefixes[row])} tokens, so nothing is left of "
                f"max_tokens={sampling.max_tokens}. Leave it out, or raise max_tokens."
            )
    return left


def extend_all(
    prompts: Sequence[Encoded], prefixes: Sequence[Int[Tensor, "_"]], sampling: Sampling
) -> tuple[list[Encoded], list[int]]:
    """Each prompt with its begun response, and how many tokens may follow.

    Equal beginnings become one and the same object, so that they are read once.
    """
    budget = tokens_left(prompts, prefixes, sampling)
    made: dict[tuple[int, int], Encoded] = {}
    begun = []
    for prompt, prefix in zip(prompts, prefixes, strict=True):
        key = (id(prompt), id(prefix))
        if key not in made:
            made[key] = prompt.extended(prefix.to(prompt.tokens.device))
        begun.append(made[key])
    return begun, budget


class NotFiniteLogits(ValueError):  # noqa: N818
    """The model returned logits that are not finite."""


def check_finite(logp: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> None:
    """Refuse what a damaged model drew."""
    wrong = (mask & ~logp.isfinite()).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise NotFiniteLogits(
            f"the model's logits are not finite: response {row} has log π = "
            f"{float(logp[row, place])} at token {place}. Its weights are damaged, or "
            f"overflowed in training: go back to an earlier checkpoint, or lower the rate."
        )


def check_sampling(sampling: Sampling) -> None:
    """Refuse settings that mean nothing."""
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {sampling.max_tokens}.")
    if not sampling.temperature >= 0.0:
        raise ValueError(f"temperature must be ≥ 0 (0: greedy); got {sampling.temperature}.")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p must lie in (0, 1]; got {sampling.top_p}. For 95 % pass 0.95.")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be ≥ 0 (0: all tokens); got {sampling.top_k}.")
