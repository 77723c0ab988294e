"""Read prompts into a KV cache, sample tokens with given random numbers, check the settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from segcredit.core.checks import has_head_kernels, has_layer_kernels
from segcredit.core.logits import entropy, scaled
from segcredit.models.inputs import Inputs, distinct, prompt_inputs
from segcredit.types import Encoded, Sampling


def choose(logp: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the cumulative probability first exceeds u ∈ [0, 1).

    Each row uses its own random number, so a sample does not depend on the other rows. Sums are in
    float64; in float32 the tail of a large vocabulary would be lost to rounding.
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


def draw(
    logits: Float[Tensor, "B V"],
    uniform: Float[Tensor, " B"],
    sampling: Sampling,
    banned: Bool[Tensor, " V"] | None,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample a token per row; return the tokens, their log π, and the entropies H."""
    plain = sampling.temperature > 0.0 and sampling.top_p == 1.0 and not sampling.top_k
    usable = has_head_kernels(logits) and has_layer_kernels(logits) and logits.stride(-1) == 1
    if plain and usable:
        from segcredit.core import head_kernels

        return head_kernels.draw(logits, uniform, banned, sampling.temperature)
    log_pi, picked = pick(logits, uniform, sampling, banned)
    return picked, log_pi.gather(-1, picked[:, None]).squeeze(-1), entropy(log_pi)


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
    stop: object = sampling.stop
    if isinstance(stop, str):
        raise ValueError(f"stop must be a tuple of strings; got {stop!r}. Pass stop=(…,).")
    if not all(sampling.stop):
        raise ValueError(f"a stop string has at least one character; got {sampling.stop}.")


SPARE_COLUMNS = 64
"""Columns that a cache layer allocates ahead."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """KV cache layer that allocates ahead; transformers' copies all of it for every token."""

    keys: Tensor
    values: Tensor
    _buffer: tuple[Tensor, Tensor] | None = None
    _view: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Append keys and values, and return views of all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        old = self.get_seq_length()
        new = old + key_states.shape[-2]
        # rows may have been selected since: then `keys` is no view of the buffer any more
        if self._buffer is None or self.keys is not self._view or new > self._buffer[0].shape[-2]:
            wide = new + SPARE_COLUMNS
            self._buffer = (_empty(key_states, wide), _empty(value_states, wide))
            if old:
                self._buffer[0][:, :, :old] = self.keys
                self._buffer[1][:, :, :old] = self.values
        self._buffer[0][:, :, old:new] = key_states
        self._buffer[1][:, :, old:new] = value_states
        self.keys, self.values = self._buffer[0][:, :, :new], self._buffer[1][:, :, :new]
        self._view = self.keys
        return self.keys, self.values


def _empty(like: Tensor, columns: int) -> Tensor:
    return like.new_empty((*like.shape[:-2], columns, like.shape[-1]))


def growing_cache(config: PreTrainedConfig) -> DynamicCache:
    """Make the model's KV cache, with growing layers in place of plain attention layers.

    For sampling only: writes in place have no gradient.
    """
    assert not torch.is_grad_enabled()
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    return cache


def select_rows(cache: Any, rows: Int[Tensor, " N"]) -> None:
    """Select rows of a KV cache, perhaps several times each, in place.

    batch_select_indices of transformers leaves out recurrent states.
    """
    for layer in cache.layers:
        recurrent = hasattr(layer, "recurrent_states")
        (layer.reorder_cache if recurrent else layer.batch_select_indices)(rows)


@dataclass
class Prefill:
    """KV cache and next logits of each distinct prompt and prefix, and which one each row has."""

    cache: Any
    logits: Float[Tensor, "F V"]
    attended: Bool[Tensor, "F L"]
    """Columns of the cache that hold a token; padding does not."""
    position: Int[Tensor, " F"]
    """Rotary position of the next token."""
    planes: int
    """Rows of rotary positions: 1, or 3 with M-RoPE."""
    which: Int[Tensor, " B"]
    """Index of the entry that each row continues."""

    def spread(self) -> "Prefill":
        """Copy the entries so that each row has its own; the cache is changed in place."""
        return self.select(self.which, torch.arange(len(self.which), device=self.which.device))

    def select(self, some: Int[Tensor, " N"], which: Int[Tensor, " B"]) -> "Prefill":
        """Select entries, perhaps several times each; the cache is changed in place."""
        select_rows(self.cache, some)
        return Prefill(
            self.cache,
            self.logits[some],
            self.attended[some],
            self.position[some],
            self.planes,
            which,
        )


def prefill(
    model: nn.Module,
    prompts: Sequence[Encoded],
    prefixes: Sequence[Int[Tensor, "_"]],
    device: torch.device,
) -> Prefill:
    """Run the model on one prompt and response prefix per row; a prefix may be empty.

    Each distinct prompt object is processed once, then each distinct prefix on its prompt's keys
    and values.
    """
    cache: Any = growing_cache(model.config)
    # layers other than plain attention (windows, recurrent states) must read text without gaps
    plain = all(type(x) is GrowingLayer for x in cache.layers)
    few, which = distinct(prompts if plain else extend_prompts(prompts, prefixes))
    asked = prompt_inputs(few, device)
    logits = next_logits(model, cache, asked.arguments())
    read = Prefill(
        cache, logits, asked.attended, asked.next_position, len(asked.positions), which.to(device)
    )
    if not plain or not any(len(x) for x in prefixes):
        return read
    return _read_prefixes(model, read, prefixes)


def _read_prefixes(model: nn.Module, read: Prefill, prefixes: Sequence[Tensor]) -> Prefill:
    """Process each distinct prefix once, on the keys and values of its prompt.

    Prefixes are padded on the left, so that all rows continue in the same column.
    """
    which = read.which
    number: dict[tuple[int, int], int] = {}
    pairs = zip(which.tolist(), prefixes, strict=True)
    row_of = [number.setdefault((prompt, id(x)), len(number)) for prompt, x in pairs]
    first = {n: row for row, n in reversed(list(enumerate(row_of)))}
    begun = [prefixes[first[n]] for n in range(len(number))]
    rows = torch.tensor([first[n] for n in range(len(number))], device=which.device)
    device = which.device
    read = read.select(which[rows], torch.tensor(row_of, device=device))
    tokens = pad_sequence(begun, batch_first=True, padding_side="left").to(device)
    length = torch.tensor([len(x) for x in begun], device=device)
    place = torch.arange(tokens.shape[1], device=device) - (tokens.shape[1] - length)[:, None]
    positions = (read.position[:, None] + place).clamp(min=0).expand(read.planes, -1, -1)
    attended = torch.cat([read.attended, place >= 0], dim=1)
    after = next_logits(model, read.cache, Inputs(tokens, attended, positions, {}).arguments())
    # an empty prefix is only padding: the logits after its prompt remain valid
    logits = torch.where((length > 0)[:, None], after, read.logits)
    position = read.position + length
    return Prefill(read.cache, logits, attended, position, read.planes, read.which)


def next_logits(model: nn.Module, cache: Any, arguments: dict[str, Tensor]) -> Tensor:
    """Run the model on tokens, extend its KV cache, and return the logits after the last token."""
    outputs = model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = outputs.logits[:, -1]
    return logits
