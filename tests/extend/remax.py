"""ReMax (arXiv 2310.10505): a response's reward less that of the greedy response."""

from dataclasses import dataclass

import torch

from segcredit.algorithms import PolicyGradient
from segcredit.algorithms.credit import Case
from segcredit.algorithms.objective import Clipped, RewardKL, TokenMean, TokenRatio
from segcredit.columns import Column
from segcredit.core.advantages import Credit
from segcredit.partition import Partition, Response
from segcredit.train.collect import Context
from segcredit.train.provider import OwnColumn
from segcredit.types import Rollouts


@dataclass(frozen=True)
class GreedyReward(OwnColumn):
    """The reward of the greedy response to the same prompt."""

    name = "greedy_reward"
    description = "reward of the greedy response to the same prompt"

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        prompts = {x.prompt.id: x.prompt for x in rollouts.prompts}
        greedy = context.within("greedy").sample([*prompts.values()], temperature=0.0)
        reward = dict(zip(prompts, greedy.rollouts.reward.tolist(), strict=True))
        baseline = torch.tensor([reward[x.prompt.id] for x in rollouts.prompts])
        return rollouts.with_column(self.name, baseline.to(rollouts.mask.device))


@dataclass(frozen=True)
class GreedyBaseline:
    """Credit of a response: its reward less that of the greedy response."""

    @property
    def over(self) -> Partition:
        return Response()

    @property
    def needs(self) -> frozenset[Column]:
        return frozenset({GreedyReward()})

    def __call__(self, case: Case) -> Credit:
        advantage = case.total_reward - case.rollouts.column("greedy_reward", "GreedyBaseline")
        per_token = case.segments.spread(advantage[:, None])
        return Credit(advantage=per_token, value_target=None, segments=case.segments)


def remax(clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.001) -> PolicyGradient:
    """ReMax with token ratios, so that a batch can be used for more than one update."""
    return PolicyGradient(
        credit=GreedyBaseline(),
        ratio=TokenRatio(),
        surrogate=Clipped(*clip),
        reduce=TokenMean(),
        kl=RewardKL(kl) if kl else None,
    )
