"""Values tracked per prompt from step to step: the baseline of single-stream SPO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from segcredit.core.tracker import tracker_init, tracker_update
from segcredit.train.collect import Context, current_logp
from segcredit.train.curriculum import PromptCounts
from segcredit.train.metrics import Metrics
from segcredit.train.provider import Provider, SavedRun
from segcredit.train.source import PromptList
from segcredit.train.state import State, generator
from segcredit.types import Prompt, Rollouts

Score = Callable[[Rollouts], Tensor]
"""Function that computes log π of each token under the current policy, (B, T)."""
OFFLINE_SAMPLES = 8
"""Number of responses per prompt from which its first value is estimated."""


class ValueTracker(PromptCounts):
    """Beta(α, β) per prompt, and the prompt's last response, to measure how far π has moved."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__(prompts, 0.5)
        self.last: dict[int, tuple[Tensor, Tensor]] = {}
        """Each prompt's last response: its tokens, and their log π after the step that drew it."""

    def begin(self, names: Sequence[str], reward: Float[Tensor, " B"]) -> None:
        """Estimate the initial values from samples of the policy."""
        where = self._where(names)
        successes = torch.zeros_like(self.alpha).index_add_(0, where, reward.cpu())
        count = torch.bincount(where, minlength=len(self.alpha))
        samples = int(count.max())
        assert bool((count == samples).all()), "every prompt is sampled equally often"
        self.alpha, self.beta = tracker_init(successes, samples)

    @torch.no_grad()
    def update(self, rollouts: Rollouts, score: Score) -> dict[str, float]:
        """Discount old counts by the policy's drift, then count the rewards; call after the step.

        log π is stored after the step, so that the next drift measures only later steps.
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
        """Compute the mean |Δ log π| over tokens of each prompt's previous response; 0 at first."""
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

    def state_dict(self) -> dict[str, Any]:
        last = {str(place): list(pair) for place, pair in self.last.items()}
        return {**super().state_dict(), "last": last}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        super().load_state_dict(kept)
        self.last = {int(place): (pair[0], pair[1]) for place, pair in kept["last"].items()}


class UnstartedTracker(Provider):
    """Provider of the tracked baseline before reinforcement learning starts."""

    def prepare(self, state: State) -> Provider:
        """Estimate each prompt's initial value from samples of the current policy."""
        prompts, at_once = _prompts(state), state.recipe.rollout.prompts
        tracker = ValueTracker(prompts)
        names, rewards = [], []
        for first in range(0, len(prompts), at_once):
            context = Context(state, Metrics(), ("tracker", first))
            found = context.sample(prompts[first : first + at_once], OFFLINE_SAMPLES)
            names += [x.prompt.id for x in found.responses]
            rewards.append(found.rollouts.reward.cpu())
        tracker.begin(names, torch.cat(rewards))
        return TrackerProvider(tracker)

    def restore(self, state: State, saved: SavedRun) -> Provider | None:
        kept = saved.state[TrackerProvider.state_key]
        if kept is None:
            if state.stage_kind == "optimize":
                raise saved.missing_error(
                    "this algorithm tracks a value for every prompt", state.recipe
                )
            return None
        tracker = ValueTracker(_prompts(state))
        tracker.load_state_dict(kept)
        if len(tracker.alpha) != len(tracker.place):
            count = len(tracker.alpha)
            raise saved.missing_error(f"this run tracks values of {count} prompts", state.recipe)
        return TrackerProvider(tracker)


def _prompts(state: State) -> Sequence[Prompt]:
    assert isinstance(state.train, PromptList), "checked when the run was planned"
    return state.train.prompts


@dataclass(eq=False)
class TrackerProvider(Provider):
    """Provider of each prompt's tracked value, which also decides how often it is sampled."""

    state_key = "tracker"
    prepares_every_stage = True
    held_out = False  # only training prompts are tracked

    tracker: ValueTracker

    def choose_prompts(self, state: State, count: int) -> list[Prompt]:
        drawn = self.tracker.draw(count, generator(state.seed, "tracked prompts", state.step))
        return [_prompts(state)[i] for i in drawn]

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        assert rollouts.prompts is not None
        value = self.tracker.value([x.prompt.id for x in rollouts.prompts])
        return rollouts.replace(baseline=value.to(rollouts.mask.device))

    def after_update(self, context: Context, rollouts: Rollouts) -> dict[str, float]:
        return self.tracker.update(rollouts, partial(current_logp, context.state))

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()
