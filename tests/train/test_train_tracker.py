"""Single-stream SPO's tracker inside the trainer: what it stores, and how it is scored."""

from typing import Any

import pytest
import torch
from tiny_runs import changed

from segcredit.columns import BASELINE
from segcredit.config import parse_recipe
from segcredit.models import Policy
from segcredit.train.build import build, make_plan
from segcredit.train.collect import current_logp
from segcredit.train.stages import stage_of
from segcredit.train.state import State
from segcredit.train.step import train_step
from segcredit.types import Rollouts

BUDGET = 100
"""Prompt and response tokens of a micro-batch: a few rows."""


def tracked() -> State:
    """A state at the beginning of optimization, with large updates."""
    made = changed(
        algorithm="single_stream_spo",
        reward="exact",
        stages=[{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": 2}],
        data__size=8,
        optimizer__lr=0.05,
        update__tokens_per_micro=BUDGET,
    )
    state = build(make_plan(parse_recipe(made)))
    state.stage = 1
    stage_of(state, state.recipe.stages[1]).enter()
    return state


def step(state: State) -> dict[str, float]:
    prompts = list(state.train.prompts)
    found = train_step(state, prompts)
    state.step += 1
    return found.metrics


def test_log_probs_are_stored_as_they_are_after_the_update() -> None:
    """spo/spo_ray_trainer.py:297 of verl-recipe: the drift counts the updates since."""
    state = tracked()
    state.providers[BASELINE].tracker.begin(
        [x.id for x in state.train.prompts], torch.arange(8) % 2.0
    )
    first = train_step(state, list(state.train.prompts))
    rollouts = first.sampled.rollouts
    after = current_logp(state, rollouts)
    moved = (after - rollouts.logp_old)[rollouts.mask].abs().mean()
    assert moved > 1e-3, "the update moved the policy"
    for row in range(len(rollouts)):
        tokens, stored = state.providers[BASELINE].tracker.last[row]
        assert torch.equal(tokens, rollouts.tokens[row][rollouts.mask[row]])
        assert stored.tolist() == pytest.approx(after[row][rollouts.mask[row]].tolist(), abs=1e-6)
    # without a further update the policy has not drifted from what is stored
    measured = state.providers[BASELINE].tracker.update(rollouts, lambda x: current_logp(state, x))
    assert measured["tracker/drift"] == pytest.approx(0.0, abs=1e-6)


def test_scoring_keeps_to_tokens_per_micro(monkeypatch: pytest.MonkeyPatch) -> None:
    state = tracked()
    step(state)
    seen: list[int] = []
    score = Policy.score

    def counted(self: Policy, rollouts: Rollouts, *rest: Any, **more: Any) -> Any:
        asked = max(len(x.tokens) for x in rollouts.prompts)
        written = int(rollouts.mask.sum(dim=1).max())
        seen.append(len(rollouts) * (asked + written) if len(rollouts) > 1 else 0)
        return score(self, rollouts, *rest, **more)

    monkeypatch.setattr(Policy, "score", counted)
    step(state)
    assert len(seen) > 3
    assert max(seen) <= BUDGET
