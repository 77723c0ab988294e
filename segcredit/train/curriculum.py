"""Prompt curriculum (``data.curriculum``): prompts solved half of the time are drawn most often.

Each prompt's success rate is estimated from the responses of the run itself, so that nothing is
sampled in addition.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from segcredit.core.tracker import count_successes, tracker_value, tracker_weight
from segcredit.types import Prompt

if TYPE_CHECKING:
    from segcredit.train.metrics import RolloutBatch


class PromptCounts:
    """Successes α and failures β of each prompt, discounted; their ratio is its success rate."""

    def __init__(self, prompts: Sequence[Prompt], prior: float) -> None:
        self.place = {prompt.id: i for i, prompt in enumerate(prompts)}
        self.alpha = torch.full((len(prompts),), prior)
        self.beta = torch.full((len(prompts),), prior)

    def value(self, names: Sequence[str]) -> Float[Tensor, " B"]:
        """Return the estimated success rates of these prompts."""
        where = self._where(names)
        return tracker_value(self.alpha[where], self.beta[where])

    def draw(self, count: int, generator: torch.Generator) -> list[int]:
        """Sample distinct prompts, those of medium difficulty more often; returns their indices."""
        weight = tracker_weight(tracker_value(self.alpha, self.beta))
        drawn = torch.multinomial(weight, min(count, len(weight)), generator=generator)
        return drawn.tolist()

    def _where(self, names: Sequence[str]) -> Int[Tensor, " B"]:
        return torch.tensor([self.place[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        return {"alpha": self.alpha, "beta": self.beta}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        self.alpha, self.beta = kept["alpha"], kept["beta"]


class Curriculum(PromptCounts):
    """Success rates of the training prompts; an unseen prompt counts as solved half of the time."""

    PRIOR = 1.0
    """α and β of an unseen prompt."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__(prompts, self.PRIOR)

    def update(self, sampled: "RolloutBatch") -> dict[str, float]:
        """Count the successes of a step, also of responses that dynamic sampling dropped."""
        samples, successes = torch.zeros_like(self.alpha), torch.zeros_like(self.alpha)
        for batch in (sampled.unfiltered or sampled, *sampled.refills):
            rollouts = batch.rollouts
            assert rollouts.prompts is not None
            where = self._where([x.prompt.id for x in rollouts.prompts])
            found = rollouts.reward if rollouts.correct is None else rollouts.correct.float()
            successes.index_add_(0, where, found.float().cpu())
            samples += torch.bincount(where, minlength=len(samples))
        self.alpha, self.beta = count_successes(
            self.alpha, self.beta, successes, samples, self.PRIOR
        )
        seen = self.alpha + self.beta > 2 * self.PRIOR
        rate = tracker_value(self.alpha, self.beta)[seen]
        return {
            "curriculum/seen": float(seen.float().mean()),
            "curriculum/rate": float(rate.mean()),
        }
