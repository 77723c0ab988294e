"""Sample, score, annotate: from prompts to rollouts with all columns that the method reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcredit.columns import Column
from segcredit.core.checks import sent
from segcredit.models.inputs import as_responses, encode_all
from segcredit.rewards.checks import grade
from segcredit.train.distributed import micro_batches
from segcredit.train.metrics import Metrics, RolloutBatch, varied
from segcredit.train.provider import Sampler
from segcredit.train.state import State, generator
from segcredit.types import (
    Encoded,
    Prompt,
    Rollouts,
    correctness,
)


@dataclass(frozen=True)
class Context:
    """The run, and the purpose of the current batch of rollouts."""

    state: State
    log: Metrics
    purpose: tuple[object, ...]
    """Name of the stage and step, for example; with the seed it determines all random numbers."""

    def generator(self, *names: object) -> torch.Generator:
        """Return the random generator for one purpose, given by its names."""
        return generator(self.state.seed, *names)

    def within(self, *names: object) -> "Context":
        """Return a context for additional samples, which have their own random numbers."""
        return replace(self, purpose=(*self.purpose, *names))

    def sample(
        self, prompts: Sequence[Prompt], samples: int = 1, temperature: float | None = None
    ) -> RolloutBatch:
        """Sample and grade responses of the current policy to these prompts.

        Args:
            samples: Responses per prompt; responses to one prompt are adjacent rows.
            temperature: Sampling temperature; 0 is greedy. None: the run's temperature.
        """
        return collect(self, prompts, (), IndependentSampler(samples, temperature))


class LocalRollouts(NamedTuple):
    """This process's responses, and the prompts of all processes' responses."""

    rollouts: Rollouts | None
    prompts: list[Encoded]


@dataclass(frozen=True)
class IndependentSampler:
    """Samples responses to each prompt independently."""

    samples: int | None = None
    """Responses per prompt; None: ``rollout.samples``."""
    temperature: float | None = None
    """Sampling temperature; None: ``rollout.temperature``."""

    def sample(self, context: Context, prompts: Sequence[Prompt]) -> LocalRollouts:
        state, settings = context.state, context.state.recipe.rollout
        sampling = settings.sampling(temperature=self.temperature)
        each = settings.samples if self.samples is None else self.samples
        encoded = [x for x in encode_all(state.policy.encode, prompts) for _ in range(each)]
        drawn = context.generator("sample", *context.purpose)
        own = state.parallel.own(encoded)
        # skip the random numbers that belong to other ranks
        torch.rand(state.parallel.before(encoded), settings.max_tokens, generator=drawn)
        return LocalRollouts(state.engine.sample(own, sampling, drawn) if own else None, encoded)

    def grade(self, context: Context, drawn: LocalRollouts) -> RolloutBatch:
        state, parallel = context.state, context.state.parallel
        limit, responses = state.recipe.rollout.max_tokens, []
        if drawn.rollouts is not None:
            responses = as_responses(drawn.rollouts, state.policy.codec.decode, limit)
        rewards = grade(state.reward, responses) if responses else []
        responses, rewards = parallel.gather(responses), parallel.gather(rewards)
        rollouts = parallel.gather_rollouts(drawn.rollouts, drawn.prompts, state.device)
        values = torch.tensor([x.value for x in rewards], dtype=torch.float32)
        each = state.recipe.rollout.samples if self.samples is None else self.samples
        group = torch.arange(len(rewards) // each).repeat_interleave(each)
        device = rollouts.mask.device
        rollouts = rollouts.replace(reward=values.to(device), group=group.to(device))
        if (correct := correctness(rewards)) is not None:
            rollouts = rollouts.replace(correct=torch.tensor(correct, device=device))
        return RolloutBatch(rollouts, responses, rewards)


def collect(
    context: Context,
    prompts: Sequence[Prompt],
    columns: Sequence[Column],
    sampler: Sampler | None = None,
    more: Callable[[], Sequence[Prompt]] | None = None,
) -> RolloutBatch:
    """Sample responses of the current policy to these prompts, grade them, fill the columns.

    Args:
        more: Returns the next batch of prompts; if given, groups without both kinds of responses
            are replaced (:func:`refill`).
    """
    sampler = sampler or sampler_of(context.state, columns)
    with context.log.time("sample"):
        drawn = sampler.sample(context, prompts)
    return complete(context, sampler, drawn, columns, more)


def sampler_of(state: State, columns: Sequence[Column]) -> Sampler:
    """Return the sampler of these columns; by default responses are independent."""
    return state.providers_of(columns).sampler or IndependentSampler()


def complete(
    context: Context,
    sampler: Sampler,
    drawn: Any,
    columns: Sequence[Column],
    more: Callable[[], Sequence[Prompt]] | None = None,
) -> RolloutBatch:
    """Grade sampled responses, replace groups of equal rewards, fill the columns."""
    with context.log.time("score"):
        batch = sampler.grade(context, drawn)
    if more is not None:
        batch = refill(context, sampler, batch, more)
    with context.log.time("annotate"):
        rollouts = context.state.providers_of(columns).fill(context, batch.rollouts)
    return replace(batch, rollouts=rollouts)


def refill(
    context: Context, sampler: Sampler, first: RolloutBatch, more: Callable[[], Sequence[Prompt]]
) -> RolloutBatch:
    """Replace groups without differences between responses by responses to other prompts (DAPO).

    A group stays if it has correct and incorrect responses, or different rewards, as
    ``rollout.refill_by`` says. At most ``rollout.refills`` batches of prompts are sampled in
    addition. If there are still too few such groups, the first other groups fill the batch.
    """
    settings, log = context.state.recipe.rollout, context.log
    wanted = len(first.rollouts)
    spread = varied(first.rollouts, settings.refill_by)
    parts, batches = [first.select(spread.nonzero().flatten())], list[RolloutBatch]()
    while sum(len(x.rollouts) for x in parts) < wanted and len(batches) < settings.refills:
        again = context.within("refill", len(batches))
        with log.time("sample"):
            drawn = sampler.sample(again, more())
        with log.time("score"):
            batch = sampler.grade(again, drawn)
        kept = varied(batch.rollouts, settings.refill_by)
        missing = wanted - sum(len(x.rollouts) for x in parts)
        parts.append(batch.select(kept.nonzero().flatten()[:missing]))
        batches.append(batch)
    found = sum(len(x.rollouts) for x in parts)
    parts.append(first.select((~spread).nonzero().flatten()[: wanted - found]))
    log.add(
        {
            "refill/batches": float(len(batches)),
            "refill/groups_kept": float(spread.float().mean()),
            "refill/groups_found": found / wanted,
            "refill/extra_tokens": float(sum(int(x.rollouts.mask.sum()) for x in batches)),
        }
    )
    joined = RolloutBatch.join([x for x in parts if len(x.rollouts)])
    return replace(joined, unfiltered=first, refills=tuple(batches))


@torch.no_grad()
def current_logp(state: State, rollouts: Rollouts) -> Tensor:
    """Compute log π of each token under the current policy, per micro-batch; shape (B, T)."""
    (logp,) = forward_in_parts(
        state, rollouts, lambda part: state.policy.score(part, state.temperature)[:1]
    )
    return logp


def forward_in_parts(
    state: State,
    rollouts: Rollouts,
    forward: Callable[[Rollouts], Sequence[Tensor | None]],
) -> list[Tensor]:
    """Run forward passes over micro-batches and return the results in the rows' order.

    Each process computes its share of the micro-batches and gets the results of all.
    """
    parts = micro_batches(rollouts, state.tokens_per_micro, state.policy.packs)
    own = [(forward(rollouts.select(rows)), counts) for rows, counts in state.turns(parts)]
    results = _gather(state, [x for x, counts in own if counts], rollouts.mask.device)
    back = sent(torch.cat(parts).argsort(), rollouts.mask.device)
    columns = []
    for column in zip(*results, strict=True):
        found = [x for x in column if x is not None]
        assert len(found) == len(parts)
        columns.append(torch.cat(found)[back])
    return columns


def _gather(
    state: State, own: list[Sequence[Tensor | None]], device: torch.device
) -> list[Sequence[Tensor | None]]:
    """Gather the results of all ranks, through CPU memory."""
    if state.parallel.size == 1:
        return own
    found = state.parallel.gather([[None if x is None else x.cpu() for x in part] for part in own])
    return [[None if x is None else x.to(device) for x in part] for part in found]
