"""What every engine asks of a request, and of what it drew."""

from collections.abc import Sequence

from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.types import Encoded, Sampling


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
