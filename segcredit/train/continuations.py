"""Monte-Carlo values of prefixes: each distinct prefix is continued K times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from segcredit.columns import Continuations
from segcredit.core.checks import keep
from segcredit.core.segments import Segments
from segcredit.rewards.checks import grade
from segcredit.train.collect import Context
from segcredit.train.provider import Provider
from segcredit.train.state import State
from segcredit.types import Encoded, MonteCarlo, Response, Rollouts


class Prefix(NamedTuple):
    """A prompt and a prefix of a response to it."""

    prompt: Encoded
    tokens: Int[Tensor, " L"]


@dataclass(frozen=True)
class Prefixes:
    """The distinct prefixes whose values are estimated."""

    prefixes: list[Prefix]
    number: Int[Tensor, "B M"]
    """Index of the prefix before each unit; −1: not estimated, or beyond the budget."""
    left_out: int
    """Number of units whose prefix is beyond the budget."""


@dataclass(frozen=True)
class ContinuationProvider(Provider):
    """Provider of a Monte-Carlo estimator of values; it fills nothing in advance."""

    prepares_at_build = True

    column: Continuations

    def monte_carlo(self, context: Context) -> MonteCarlo:
        return MonteCarloValues(context, self.column.truncated_reward)


@dataclass(frozen=True)
class MonteCarloValues:
    """Estimates V̂ of prefixes by the mean reward of sampled continuations.

    Continuations use the same policy, temperature, length limit (which includes the prefix) and
    reward as responses. Implements :data:`segcredit.types.MonteCarlo`.
    """

    context: Context
    truncated_reward: float | None = None
    """Reward of a truncated continuation; None: the graded reward."""

    def __call__(
        self,
        rollouts: Rollouts,
        segments: Segments,
        estimated: Bool[Tensor, "B M"],
        samples: int,
    ) -> Float[Tensor, "B M"]:
        context = self.context
        if context.state.recipe.rollout.ahead:
            raise ValueError(
                "expected rollout.ahead=0, because this method samples continuations, which must "
                "come from the policy that sampled the responses; got rollout.ahead=1, with "
                "which that policy is already updated. Set rollout.ahead=0. If the column is your "
                "own, set continues = True in it, to see this when the recipe is read."
            )
        with context.log.time("continue"):
            limit = context.state.recipe.rollout.prefixes
            found = distinct_prefixes(rollouts, segments, estimated, limit)
            context.log.add({"continuations/left_out": float(found.left_out)})
            value = torch.full(found.number.shape, torch.nan)
            if found.prefixes:
                each = self._value(found.prefixes, samples)
                known = found.number >= 0
                value[known] = each[found.number[known]]
            return value.to(rollouts.mask.device)

    def _value(self, prefixes: Sequence[Prefix], samples: int) -> Float[Tensor, " P"]:
        """Compute the mean reward of each prefix's continuations."""
        rows = [x for x in prefixes for _ in range(samples)]
        graded = self.context.state.parallel.gather(self._graded(rows))
        graded_at = torch.tensor([reward for reward, _, _ in graded])
        truncated = torch.tensor([cut for _, cut, _ in graded])
        if self.truncated_reward is not None:
            graded_at = keep(~truncated, graded_at, self.truncated_reward)
        reward = graded_at.view(-1, samples)
        tokens = sum(count for _, _, count in graded)
        self.context.log.add(
            {
                "continuations/prefixes": float(len(prefixes)),
                "continuations/count": float(len(graded)),
                "continuations/tokens": float(tokens),
                "continuations/value": float(reward.mean()),
            }
        )
        return reward.mean(dim=1)

    def _graded(self, rows: Sequence[Prefix]) -> list[tuple[float, bool, int]]:
        """Sample this rank's share of continuations; return reward, truncation and length."""
        state, settings = self.context.state, self.context.state.recipe.rollout
        drawn = self.context.generator("continue", *self.context.purpose)
        own = state.parallel.own(rows)
        # skip the random numbers that belong to other ranks
        torch.rand(state.parallel.before(rows), settings.max_tokens, generator=drawn)
        if not own:
            return []
        sampling = settings.sampling()
        prompts, prefixes = [x.prompt for x in own], [x.tokens for x in own]
        made = state.engine.continue_from(prompts, prefixes, sampling, drawn)
        responses = whole_responses(state, own, made)
        rewards = grade(state.reward, responses)
        counts = made.mask.sum(dim=1).tolist()
        return [
            (x.value, response.truncated, count)
            for x, response, count in zip(rewards, responses, counts, strict=True)
        ]


def distinct_prefixes(
    rollouts: Rollouts,
    segments: Segments,
    estimated: Bool[Tensor, "B M"],
    most: int | None = None,
) -> Prefixes:
    """Collect the distinct prefixes of responses to one prompt, at most ``most`` of them.

    The budget covers the first units of all responses, then the second ones, and so on; within a
    unit, earlier responses first.
    """
    assert rollouts.prompts is not None
    tokens, group = rollouts.tokens.cpu(), rollouts.group.tolist()
    start, written = segments.start.cpu(), rollouts.tokens.cpu().numpy()
    number = torch.full(estimated.shape, -1)
    known: dict[tuple[int, bytes], int] = {}
    prefixes: list[Prefix] = []
    left_out = 0
    for unit, row in estimated.T.nonzero().tolist():
        length = int(start[row, unit])
        key = (group[row], written[row, :length].tobytes())
        if key not in known and most is not None and len(prefixes) >= most:
            left_out += 1
            continue
        if key not in known:
            known[key] = len(prefixes)
            prefixes.append(Prefix(rollouts.prompts[row], tokens[row, :length]))
        number[row, unit] = known[key]
    return Prefixes(prefixes, number, left_out)


def whole_responses(state: State, prefixes: Sequence[Prefix], made: Rollouts) -> list[Response]:
    """Join prefixes with their continuations into responses to grade."""
    limit, decode = state.recipe.rollout.max_tokens, state.policy.codec.decode
    found = []
    for (prompt, prefix), tokens, mask, cut in zip(
        prefixes, made.tokens.cpu(), made.mask.cpu(), made.truncated.tolist(), strict=True
    ):
        written = [*prefix.tolist(), *tokens[mask].tolist()]
        found.append(Response(prompt.prompt, decode(written), len(written), cut, limit))
    return found
