"""The value of each prompt, remembered from step to step (single-stream SPO)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from segcredit.core.tracker import tracker_init, tracker_update, tracker_value, tracker_weight
from segcredit.types import Prompt, Rollouts

Score = Callable[[Rollouts], Tensor]
"""Function that computes log π of each token under the current policy, (B, T)."""
OFFLINE_SAMPLES = 8
"""Responses per prompt from which its first value comes."""


class Tracker:
    """Beta(α, β) per prompt, with the prompt's last response for measuring how π has moved."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.place = {prompt.id: i for i, prompt in enumerate(prompts)}
        self.alpha = torch.full((len(prompts),), 0.5)
        self.beta = torch.full((len(prompts),), 0.5)
        self.last: dict[int, tuple[Tensor, Tensor]] = {}
        """Each prompt's last response: its tokens, and their log π after the step that drew it."""

    def begin(self, names: Sequence[str], reward: Float[Tensor, " B"]) -> None:
        """First values, from offline samples of the policy."""
        where = self._where(names)
        successes = torch.zeros_like(self.alpha).index_add_(0, where, reward.cpu())
        count = torch.bincount(where, minlength=len(self.alpha))
        samples = int(count.max())
        assert bool((count == samples).all()), "every prompt is sampled equally often"
        self.alpha, self.beta = tracker_init(successes, samples)

    def value(self, names: Sequence[str]) -> Float[Tensor, " B"]:
        """v̂ of these prompts, before this step's update."""
        where = self._where(names)
        return tracker_value(self.alpha[where], self.beta[where])

    def draw(self, count: int, generator: torch.Generator) -> list[int]:
        """Places of different prompts, those of middling difficulty more often."""
        weight = tracker_weight(tracker_value(self.alpha, self.beta))
        drawn = torch.multinomial(weight, min(count, len(weight)), generator=generator)
        return drawn.tolist()

    @torch.no_grad()
    def update(self, rollouts: Rollouts, score: Score) -> dict[str, float]:
        """Discount old counts by the policy's drift, then count the rewards; call after the step.

        log π is stored as of after the step, so that the next drift measures the later steps.
        """
        assert rollouts.prompts is not None
        names = [x.prompt.id for x in rollouts.prompts]
        where = self._where(names)
        drift = self._drift(rollouts, where.tolist(), score)
        alpha, beta = tracker_update(
            self.alpha[where], self.beta[where], rollouts.reward.cpu(), drift
        )
        self.alpha[where], self.beta[where] = alpha, beta
        mask, tokens, logp = (
            x.cpu() for x in (rollouts.mask, rollouts.tokens, score(rollouts).float())
        )
        for row, place in enumerate(where.tolist()):
            self.last[place] = (
                tokens[row][mask[row]],
                logp[row][mask[row]],
            )
        return {"tracker/drift": float(drift.mean())}

    def _drift(self, rollouts: Rollouts, places: list[int], score: Score) -> Float[Tensor, " B"]:
        """Token mean of |Δ log π| on each prompt's previous response; 0 on a first visit."""
        drift = torch.zeros(len(places))
        known = [row for row, place in enumerate(places) if place in self.last]
        if not known:
            return drift
        pad = torch.nn.utils.rnn.pad_sequence
        stored = [self.last[places[row]] for row in known]
        tokens = pad([x[0] for x in stored], batch_first=True)
        before = pad([x[1] for x in stored], batch_first=True)
        mask = pad([torch.ones(len(x[0]), dtype=torch.bool) for x in stored], batch_first=True)
        device = rollouts.mask.device
        chosen = rollouts.select(torch.tensor(known))
        old = Rollouts(
            tokens.to(device),
            mask.to(device),
            before.to(device),
            chosen.reward,
            chosen.group,
            chosen.truncated,
            prompts=chosen.prompts,
        )
        now = score(old).cpu()
        moved = (now - before).abs().masked_fill(~mask, 0.0).sum(dim=1) / mask.sum(dim=1)
        drift[torch.tensor(known)] = moved
        return drift

    def _where(self, names: Sequence[str]) -> Tensor:
        return torch.tensor([self.place[name] for name in names])

    def state(self) -> dict[str, object]:
        last = {str(place): list(pair) for place, pair in self.last.items()}
        return {"alpha": self.alpha, "beta": self.beta, "last": last}

    def load(self, state: dict[str, object]) -> None:
        alpha, beta, last = state["alpha"], state["beta"], state["last"]
        assert isinstance(alpha, Tensor)
        assert isinstance(beta, Tensor)
        assert isinstance(last, dict)
        self.alpha, self.beta = alpha, beta
        self.last = {int(place): (pair[0], pair[1]) for place, pair in last.items()}
