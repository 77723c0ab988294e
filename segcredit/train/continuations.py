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
from segcredit.train.collect import Context
from segcredit.train.provider import Provider
from segcredit.train.state import State
from segcredit.types import Encoded, MonteCarlo, Response, Rollouts, Sampling


class Begun(NamedTuple):
    """A prompt and the beginning of a response to it."""

    prompt: Encoded
    tokens: Int[Tensor, " L"]


@dataclass(frozen=True)
class Beginnings:
    """The distinct beginnings at which values are wanted."""

    begun: list[Begun]
    number: Int[Tensor, "B M"]
    """Which of them stands before each unit; −1: none is wanted there, or none is afforded."""
    left_out: int
    """Units whose beginning is beyond the budget."""


@dataclass(frozen=True)
class ContinuationProvider(Provider):
    """Gives the method an estimator of values; there is nothing to fill in advance."""

    is_prepared = True
    continues = True

    column: Continuations

    def monte_carlo(self, context: Context) -> MonteCarlo:
        return MonteCarloValues(context, self.column.truncated_reward)


@dataclass(frozen=True)
class MonteCarloValues:
    """V̂ of prefixes: the mean reward of sampled continuations.

    They are sampled as responses are: with the same policy, temperature, length limit (which
    includes the prefix) and reward. A :data:`segcredit.types.MonteCarlo`.
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
        with context.log.time("continue"):
            limit = context.state.recipe.rollout.prefixes
            found = beginnings(rollouts, segments, estimated, limit)
            context.log.add({"continuations/left_out": float(found.left_out)})
            value = torch.full(found.number.shape, torch.nan)
            if found.begun:
                each = self._value(found.begun, samples)
                known = found.number >= 0
                value[known] = each[found.number[known]]
            return value.to(rollouts.mask.device)

    def _value(self, begun: Sequence[Begun], samples: int) -> Float[Tensor, " P"]:
        """Mean reward behind each beginning."""
        rows = [x for x in begun for _ in range(samples)]
        graded = self.context.state.parallel.gather(self._graded(rows))
        graded_at = torch.tensor([reward for reward, _, _ in graded])
        truncated = torch.tensor([cut for _, cut, _ in graded])
        if self.truncated_reward is not None:
            graded_at = keep(~truncated, graded_at, self.truncated_reward)
        reward = graded_at.view(-1, samples)
        tokens = sum(count for _, _, count in graded)
        self.context.log.add(
            {
                "continuations/prefixes": float(len(begun)),
                "continuations/count": float(len(graded)),
                "continuations/tokens": float(tokens),
                "continuations/value": float(reward.mean()),
            }
        )
        return reward.mean(dim=1)

    def _graded(self, rows: Sequence[Begun]) -> list[tuple[float, bool, int]]:
        """Reward, truncation and drawn tokens of this process's share of the continuations."""
        state, settings = self.context.state, self.context.state.recipe.rollout
        drawn = self.context.generator("continue", *self.context.purpose)
        own = state.parallel.own(rows)
        # skip the random numbers that belong to other ranks
        torch.rand(state.parallel.before(rows), settings.max_tokens, generator=drawn)
        if not own:
            return []
        sampling = Sampling(settings.max_tokens, settings.temperature)
        prompts, prefixes = [x.prompt for x in own], [x.tokens for x in own]
        made = state.engine.continue_from(prompts, prefixes, sampling, drawn)
        responses = whole_responses(state, own, made)
        rewards = state.reward(responses)
        counts = made.mask.sum(dim=1).tolist()
        return [
            (x.value, response.truncated, count)
            for x, response, count in zip(rewards, responses, counts, strict=True)
        ]


def beginnings(
    rollouts: Rollouts,
    segments: Segments,
    estimated: Bool[Tensor, "B M"],
    most: int | None = None,
) -> Beginnings:
    """Equal beginnings of responses to one prompt are one; at most ``most`` are kept.

    Where there are more, first units go first, then second ones, and so on; among equal ones the
    earlier response. So every response is valued from its prompt on, as far as the budget goes.
    """
    assert rollouts.prompts is not None
    tokens, group = rollouts.tokens.cpu(), rollouts.group.tolist()
    start, written = segments.start.cpu(), rollouts.tokens.cpu().numpy()
    number = torch.full(estimated.shape, -1)
    known: dict[tuple[int, bytes], int] = {}
    begun: list[Begun] = []
    left_out = 0
    for unit, row in estimated.T.nonzero().tolist():
        length = int(start[row, unit])
        key = (group[row], written[row, :length].tobytes())
        if key not in known and most is not None and len(begun) >= most:
            left_out += 1
            continue
        if key not in known:
            known[key] = len(begun)
            begun.append(Begun(rollouts.prompts[row], tokens[row, :length]))
        number[row, unit] = known[key]
    return Beginnings(begun, number, left_out)


def whole_responses(state: State, begun: Sequence[Begun], made: Rollouts) -> list[Response]:
    """Beginnings and what was drawn behind them, for those who grade it."""
    limit, decode = state.recipe.rollout.max_tokens, state.policy.codec.decode
    found = []
    for (prompt, prefix), tokens, mask, cut in zip(
        begun, made.tokens.cpu(), made.mask.cpu(), made.truncated.tolist(), strict=True
    ):
        written = [*prefix.tolist(), *tokens[mask].tolist()]
        found.append(Response(prompt.prompt, decode(written), len(written), cut, limit))
    return found
