"""Sample tokens from a distribution with given random numbers, and check sampling settings."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.core.logits import scaled
from segcredit.types import Encoded, Sampling


def choose(logp: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the cumulative probability first exceeds u ∈ [0, 1).

    Each row uses its own random number, so a sample does not depend on the other rows. Summed in
    float64: in float32 the tail of a large vocabulary would be lost to rounding.
    """
    total = logp.double().exp().cumsum(dim=-1)
    threshold = uniform.double() * total[:, -1]
    # right=True: a token of probability zero has the sum of the one before it and is never chosen
    token = torch.searchsorted(total, threshold[:, None], right=True).squeeze(-1)
    return token.clamp(max=logp.shape[-1] - 1)  # NaN gives no token; check_finite reports it


def nucleus(logp: Float[Tensor, "B V"], top_p: float = 1.0, top_k: int = 0) -> Float[Tensor, "B V"]:
    """Keep the k likeliest tokens and those up to cumulative probability p; set others to −∞."""
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
    """Return log π over the vocabulary, before top-p and top-k, and the sampled tokens."""
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
    """Return the number of tokens that may follow each response prefix."""
    left = [sampling.max_tokens - len(x) for _, x in zip(prompts, prefixes, strict=True)]
    for row, count in enumerate(left):
        if count < 1:
            raise ValueError(
                f"prefix {row} has {len(prefixes[row])} tokens, so nothing is left of "
                f"max_tokens={sampling.max_tokens}. Leave it out, or raise max_tokens."
            )
    return left


def extend_prompts(
    prompts: Sequence[Encoded], prefixes: Sequence[Int[Tensor, "_"]]
) -> list[Encoded]:
    """Append each response prefix to its prompt.

    Equal prefixes of a prompt become one object, so that they are read once.
    """
    made: dict[tuple[int, int], Encoded] = {}
    extended = []
    for prompt, prefix in zip(prompts, prefixes, strict=True):
        key = (id(prompt), id(prefix))
        if key not in made:
            empty = len(prefix) == 0
            made[key] = prompt if empty else prompt.extended(prefix.to(prompt.tokens.device))
        extended.append(made[key])
    return extended


class NotFiniteLogits(ValueError):  # noqa: N818
    """The model returned logits that are not finite."""


def check_finite(logp: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> None:
    """Raise NotFiniteLogits if any sampled token has no finite log-probability."""
    wrong = (mask & ~logp.isfinite()).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise NotFiniteLogits(
            f"the model's logits are not finite: response {row} has log π = "
            f"{float(logp[row, place])} at token {place}. Its weights are damaged, or training "
            f"diverged: go back to an earlier checkpoint, or lower the learning rate."
        )


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError for invalid sampling settings."""
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {sampling.max_tokens}.")
    if not sampling.temperature >= 0.0:
        raise ValueError(f"temperature must be ≥ 0 (0: greedy); got {sampling.temperature}.")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p must be in (0, 1]; got {sampling.top_p}. For 95 % pass 0.95.")
    if sampling.top_k < 0:
        raise ValueError(f"top_k must be ≥ 0 (0: all tokens); got {sampling.top_k}.")
