"""Sample, score, annotate: from prompts to rollouts with every column that somebody reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from segcredit.algorithms.asks import rescored
from segcredit.core.checks import sent
from segcredit.models.inputs import as_responses, encode_all
from segcredit.train.metrics import Metrics
from segcredit.train.micro import micro_batches
from segcredit.train.seeds import generator
from segcredit.train.state import State
from segcredit.train.tree import draw_tree, grade_tree
from segcredit.types import Prompt, Response, Reward, Rollouts, Sampling, correctness


@dataclass(frozen=True)
class Collected:
    """Rollouts, and the same responses as text with their grades."""

    rollouts: Rollouts
    responses: list[Response]
    rewards: list[Reward]
    weight: Tensor | None = None
    """How much each row counts in the responses' means; None: all the same."""


def collect(
    state: State,
    prompts: Sequence[Prompt],
    needs: frozenset[str],
    log: Metrics,
    *purpose: object,
    samples: int | None = None,
) -> Collected:
    """Responses of the present policy to these prompts, graded and annotated."""
    if "parent" in needs:
        return _collect_tree(state, prompts, needs, log, *purpose)
    settings = state.recipe.rollout
    samples = settings.samples if samples is None else samples
    sampling = Sampling(settings.max_tokens, settings.temperature)
    with log.time("sample"):
        asked = encode_all(state.policy.encode, prompts)
        encoded = [x for x in asked for _ in range(samples)]
        drawn = generator(state.seed, "sample", *purpose)
        before, own = state.parallel.before(encoded), state.parallel.own(encoded)
        torch.rand(before, settings.max_tokens, generator=drawn)  # other ranks' share of chance
        rollouts = state.engine.sample(own, sampling, drawn) if own else None
    with log.time("score"):
        responses = (
            []
            if rollouts is None
            else as_responses(rollouts, state.policy.codec.decode, settings.max_tokens)
        )
        rewards = state.reward(responses) if responses else []
        responses, rewards = state.parallel.gather(responses), state.parallel.gather(rewards)
        rollouts = state.parallel.gather_rollouts(rollouts, encoded)
        values = torch.tensor([x.value for x in rewards], dtype=torch.float32)
        group = torch.arange(len(prompts)).repeat_interleave(samples)
        device = rollouts.mask.device
        rollouts = rollouts.replace(reward=values.to(device), group=group.to(device))
        if (right := correctness(rewards)) is not None:
            rollouts = rollouts.replace(correct=torch.tensor(right, device=device))
    with log.time("annotate"):
        rollouts = annotate(state, rollouts, needs)
    return Collected(rollouts, responses, rewards)


def _collect_tree(
    state: State,
    prompts: Sequence[Prompt],
    needs: frozenset[str],
    log: Metrics,
    *purpose: object,
) -> Collected:
    """The same for responses that branch."""
    with log.time("sample"):
        branches, origins = draw_tree(state, prompts, *purpose)
    with log.time("score"):
        tree = grade_tree(state, branches, origins)
    with log.time("annotate"):
        rollouts = annotate(state, tree.rollouts, needs)
    return Collected(rollouts, tree.responses, tree.rewards, tree.weight)


@torch.no_grad()
def annotate(state: State, rollouts: Rollouts, needs: frozenset[str]) -> Rollouts:
    """Fill the columns that the algorithm reads, and no other."""
    sampled_at = state.recipe.rollout.temperature
    cut = partial(micro_batches, budget=state.tokens_per_micro, packed=state.policy.packs)
    policy, critic, reference = state.policy, state.critic, state.reference
    if state.recipe.recomputes and rescored(state.algorithm):
        logp, entropy = _in_parts(
            state, rollouts, cut, lambda part: policy.score(part, sampled_at, with_entropy=True)
        )
        rollouts = rollouts.replace(logp_sampler=rollouts.logp_old, logp_old=logp, entropy=entropy)
    if "value" in needs:
        assert critic is not None
        (value,) = _in_parts(state, rollouts, cut, lambda part: (critic(part),))
        rollouts = rollouts.replace(value=value)
    if "logp_ref" in needs:
        assert reference is not None
        (logp,) = _in_parts(
            state, rollouts, cut, lambda part: reference.score(part, state.temperature)[:1]
        )
        rollouts = rollouts.replace(logp_ref=logp)
    if "pieces" in needs:
        pieces = [policy.codec.pieces(row) for row in rollouts.tokens.tolist()]
        rollouts = rollouts.replace(pieces=pieces)
    if "baseline" in needs:
        assert state.tracker is not None
        assert rollouts.prompts is not None
        names = [x.prompt.id for x in rollouts.prompts]
        rollouts = rollouts.replace(baseline=state.tracker.value(names).to(rollouts.mask.device))
    return rollouts


@torch.no_grad()
def score_now(state: State, rollouts: Rollouts) -> Tensor:
    """Compute log π of each token under the current policy, per micro-batch; shape (B, T)."""
    cut = partial(micro_batches, budget=state.tokens_per_micro, packed=state.policy.packs)
    (logp,) = _in_parts(
        state, rollouts, cut, lambda part: state.policy.score(part, state.temperature)[:1]
    )
    return logp


def _in_parts(
    state: State,
    rollouts: Rollouts,
    cut: Callable[[Rollouts], list[Tensor]],
    work: Callable[[Rollouts], Sequence[Tensor | None]],
) -> list[Tensor]:
    """Results of forward passes over parts of the rows, put back in the rows' order.

    Each process does its share of the parts, and gets the results of all.
    """
    parts = cut(rollouts)
    own = [(work(rollouts.select(rows)), counts) for rows, counts in state.turns(parts)]
    results = _everyones([x for x, counts in own if counts], state, rollouts.mask.device)
    back = sent(torch.cat(parts).argsort(), rollouts.mask.device)
    columns = []
    for column in zip(*results, strict=True):
        found = [x for x in column if x is not None]
        assert len(found) == len(parts)
        columns.append(torch.cat(found)[back])
    return columns


def _everyones(
    own: list[Sequence[Tensor | None]], state: State, device: torch.device
) -> list[Sequence[Tensor | None]]:
    if state.parallel.size == 1:
        return own
    sent = [[None if x is None else x.cpu() for x in part] for part in own]
    found = state.parallel.gather(sent)
    return [[None if x is None else x.to(device) for x in part] for part in found]
