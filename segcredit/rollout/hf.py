"""Rollout engine that samples with transformers: batched, with a KV cache, on any device."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from segcredit.models import Policy
from segcredit.models.inputs import Inputs
from segcredit.rollout.engines import EngineSettings
from segcredit.rollout.graphs import SMALL_MODEL, FixedSampler, fits_device, size_of
from segcredit.rollout.sampling import (
    GrowingLayer,
    Prefill,
    check_finite,
    check_sampling,
    draw,
    next_logits,
    prefill,
    select_rows,
    tokens_left,
)
from segcredit.rollout.stop import Decode, StopStrings
from segcredit.types import Encoded, Rollouts, Sampling

SMALL_STEP = 2**18
"""Number of logits of a decoding step below which one CPU thread is fastest."""
EMPTY = torch.zeros(0, dtype=torch.long)
"""An empty response prefix."""
DECODE_EVERY = 8
"""Steps between two searches for stop strings, which decode the last tokens."""
COMPACT_BELOW = 0.75
"""Finished rows are removed once fewer than this share of the rows are unfinished."""


@dataclass
class HFEngine:
    """Samples from a transformers model; records log π and H of every sampled token."""

    model: torch.nn.Module
    end_tokens: tuple[int, ...]
    banned: Bool[Tensor, " V"] | None = None
    """Tokens that are never sampled."""
    rows: int = 256
    """Maximum number of responses that are sampled at once."""
    graphs: bool | Literal["auto"] = "auto"
    """Whether to use CUDA graphs, which save kernel launches; auto: for small models on a GPU."""
    decode: Decode | None = None
    """Converts response tokens to text; needed for stop strings."""
    _fixed: FixedSampler | None = field(default=None, init=False, repr=False)
    _fits: bool = field(default=True, init=False, repr=False)

    @classmethod
    def from_policy(cls, policy: Policy, settings: EngineSettings) -> "HFEngine":
        """Make an engine that samples from the policy's own model."""
        return cls(
            policy.model,
            policy.end_tokens,
            policy.banned,
            settings.rows,
            settings.graphs,
            policy.codec.decode,
        )

    def close(self) -> None:
        """Release the memory of the CUDA graphs; the engine can still be used."""
        self._fixed = None

    def load_weights(self, policy: torch.nn.Module) -> None:
        """Sample from this model, which is used as it is, not copied."""
        if policy is not self.model:
            self._fixed, self._fits = None, True
        self.model = policy

    def sample(
        self, prompts: Sequence[Encoded], sampling: Sampling, generator: torch.Generator
    ) -> Rollouts:
        """Sample one response per prompt."""
        return self._sample(prompts, [EMPTY] * len(prompts), sampling, generator)

    def continue_from(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        """Sample one continuation per response prefix; ``max_tokens`` includes the prefix.

        Equal prefixes should be the same object: then they are read once.
        """
        return self._sample(prompts, prefixes, sampling, generator)

    @torch.no_grad()
    def _sample(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Int[Tensor, "_"]],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Rollouts:
        check_sampling(sampling)
        if not prompts:
            raise ValueError("nothing to sample: got no prompts.")
        if sampling.stop and self.decode is None:
            raise ValueError(
                f"stop strings are found in decoded text; got {sampling.stop} and an engine "
                f"without decode. Pass HFEngine(…, decode=policy.codec.decode), or no stop."
            )
        budget = torch.tensor(tokens_left(prompts, prefixes, sampling))
        # all random numbers first: a row's samples depend neither on other rows nor on `rows`
        uniform = torch.rand(len(prompts), sampling.max_tokens, generator=generator)
        uniform = uniform[:, : int(budget.max())]
        # rows with equal budgets are sampled together: they end at about the same time
        order = budget.argsort(stable=True)
        parts = []
        for rows in order.split(self.rows):
            some = rows.tolist()
            asked, begun = [prompts[i] for i in some], [prefixes[i] for i in some]
            parts.append(self._sample_rows(asked, begun, budget[rows], uniform[rows], sampling))
        tokens, mask, logp, entropies, ended = (
            torch.cat(x)[order.argsort().to(x[0].device)] for x in zip(*parts, strict=True)
        )
        check_finite(logp, mask)
        width = int(mask.any(dim=0).nonzero().max()) + 1
        return Rollouts(
            tokens=tokens[:, :width],
            mask=mask[:, :width],
            logp_old=logp[:, :width],
            reward=torch.zeros(len(prompts), device=tokens.device),
            group=torch.arange(len(prompts), device=tokens.device),
            truncated=~ended,
            entropy=entropies[:, :width],
            prompts=list(prompts),
        )

    @torch.inference_mode()
    def _sample_rows(
        self,
        prompts: Sequence[Encoded],
        prefixes: Sequence[Tensor],
        budget: Tensor,
        uniform: Tensor,
        sampling: Sampling,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, mask, log π and H of each row, and which rows reached their end."""
        device = next(self.model.parameters()).device
        budget, uniform = budget.to(device), uniform.to(device)
        asked = prefill(self.model, prompts, prefixes, device)
        stops = self._stops(sampling, prefixes, device)
        found = None
        if self._fits and self._uses_graphs(asked, uniform.shape[1]):
            found = self._draw_fixed(asked, budget, uniform, sampling, stops)
            if found is None:
                del asked  # its KV cache: the reason may be a lack of memory
                asked = prefill(self.model, prompts, prefixes, device)
                stops = self._stops(sampling, prefixes, device)
        if found is None:
            found = self._draw(asked, budget, uniform, sampling, stops)
        tokens, mask, logp, entropies = found
        if stops is not None:
            mask = stops.cut(mask)
        # finished rows may have more tokens, off the mask
        ends = torch.tensor(self.end_tokens, device=device)
        ended = (torch.isin(tokens, ends) & mask).any(dim=1)
        if stops is not None:
            ended |= stops.stopped
        return tokens * mask, mask, logp.where(mask, 0.0), entropies.where(mask, 0.0), ended

    def _stops(
        self, sampling: Sampling, prefixes: Sequence[Tensor], device: torch.device
    ) -> StopStrings | None:
        """Return a search for stop strings; None if there are none."""
        if not sampling.stop:
            return None
        assert self.decode is not None
        return StopStrings(sampling.stop, self.decode, prefixes, device)

    def _uses_graphs(self, asked: Prefill, width: int) -> bool:
        """Whether to sample in fixed buffers: if ``graphs`` allows it and the model supports it."""
        model: Any = self.model
        plain = all(type(x) is GrowingLayer for x in asked.cache.layers)
        attention = model.config.get_text_config()._attn_implementation or ""
        masked = attention in ("sdpa", "eager") or attention.startswith("segcredit")
        if not plain or not masked or model.training or not self.graphs:
            return False
        if self.graphs is True:
            return True
        device = asked.logits.device
        if device.type != "cuda" or sum(x.numel() for x in model.parameters()) >= SMALL_MODEL:
            return False
        return fits_device(asked.cache, size_of(asked, width), device)

    def _draw_fixed(
        self,
        asked: Prefill,
        budget: Tensor,
        uniform: Tensor,
        sampling: Sampling,
        stops: StopStrings | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Sample in fixed buffers, with CUDA graphs on a GPU; None if that fails.

        In that case sampling restarts with the same random numbers.
        """
        if self._fixed is None or self._fixed.device != asked.logits.device:
            self._fixed = FixedSampler(asked.logits.device)
        try:
            return self._fixed.draw(
                self.model, asked, budget, uniform, sampling, self.end_tokens, self.banned, stops
            )
        except torch.OutOfMemoryError:
            warnings.warn(
                "sampling continues without CUDA graphs: there is not enough memory for their KV "
                "cache. To avoid this warning, set rollout.graphs=false, or a smaller "
                "rollout.rows.",
                stacklevel=2,
            )
        except Exception as error:  # the model's code may do anything that a graph cannot record
            why = " ".join(str(error).split())[:300]
            warnings.warn(
                f"sampling continues without CUDA graphs, which do not work with this model: "
                f"{why}. To avoid this warning, set rollout.graphs=false.",
                stacklevel=2,
            )
        self._fits, self._fixed = False, None
        return None

    def _draw(
        self,
        asked: Prefill,
        budget: Tensor,
        uniform: Tensor,
        sampling: Sampling,
        stops: StopStrings | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sample one token per row and step; finished rows leave the batch."""
        device = uniform.device
        num, width = uniform.shape
        ends = torch.tensor(self.end_tokens, device=device)
        tokens = torch.zeros(num, width, dtype=torch.long, device=device)
        mask = torch.zeros(num, width, dtype=torch.bool, device=device)
        logp, entropies = (torch.zeros(num, width, device=device) for _ in range(2))

        begun = asked.spread()
        cache, logits = begun.cache, begun.logits
        attended, position = begun.attended, begun.position
        row = torch.arange(num, device=device)  # which response each row of the cache belongs to
        alive = torch.ones_like(row, dtype=torch.bool)
        for step in range(width):
            picked, chosen, h = draw(logits, uniform[row, step], sampling, self.banned)
            tokens[row, step] = picked
            mask[row, step] = alive
            logp[row, step] = chosen.to(logp.dtype)
            entropies[row, step] = h.to(entropies.dtype)
            alive = alive & ~torch.isin(picked, ends) & (step + 1 < budget)
            if stops is not None and (step + 1) % DECODE_EVERY == 0:
                alive = alive & ~stops.check(tokens, mask, step + 1)[row]
            left = int(alive.sum())
            if left == 0:
                break
            attended = torch.nn.functional.pad(attended, (0, 1), value=True)
            if left < COMPACT_BELOW * len(row):
                select_rows(cache, alive.nonzero().flatten())
                row, attended, position = row[alive], attended[alive], position[alive]
                picked, budget, alive = picked[alive], budget[alive], alive[alive]
            now = position[:, None].expand(begun.planes, -1, -1)
            inputs = Inputs(picked[:, None], attended, now, {})
            with enough_threads(logits):
                logits = next_logits(self.model, cache, inputs.arguments())
            position = position + 1
        if stops is not None:
            stops.check(tokens, mask, width)
        return tokens, mask, logp, entropies


@contextmanager
def enough_threads(logits: Tensor) -> Iterator[None]:
    """Use one CPU thread for steps so small that a second thread would cost more than it saves."""
    before = torch.get_num_threads()
    if logits.is_cuda or before == 1 or logits.numel() > SMALL_STEP:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
