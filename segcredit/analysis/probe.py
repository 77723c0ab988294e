"""Lift with a value that is known at every token: a linear probe on the policy's hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from segcredit.analysis.hidden import (
    OLDER,
    hidden_states,
    last_whole_checkpoint,
    load_policy,
    prompt_of,
)
from segcredit.analysis.lift import stage_slices
from segcredit.analysis.lift_curves import READING, lift_analysis
from segcredit.analysis.reading import Step, require_column
from segcredit.analysis.result import Analysis, CannotAnalyseError
from segcredit.analysis.ridge import FOLDS, folds_by_group, out_of_fold, r_squared
from segcredit.analysis.settings import Settings
from segcredit.runlog import Run

MOST_BYTES = 2**32
"""Of hidden states kept at once; beyond that, fewer responses of every step are read."""
NOTE = (
    "V is a ridge regression of the outcome reward on the last hidden states of the policy of {}, "
    "frozen, at every token; each response's V comes from a fit on other prompts. Out of fold it "
    "explains {} of the reward's variance{}. The intervals take the probe as given."
)
KNOWS_NOTHING = ", which is nothing: this V, and so this Lift, has no meaning"


@dataclass(frozen=True)
class Probed:
    """The steps with the probe's V in place of the critic's."""

    steps: list[Step]
    r_squared: float
    by_stage: dict[str, float]
    penalties: list[float]
    responses: int
    width: int


def lift_of_probe(run: Run, name: str, steps: Sequence[Step], settings: Settings) -> Analysis:
    """Lift of a run by the probe, for which its last checkpoint is loaded; holes are cut after."""
    require_column(steps, "entropy", "the method did not ask for it.")
    _check_rows(steps)
    checkpoint = last_whole_checkpoint(run)
    found = probe(run, steps, settings, load_policy(run, checkpoint, settings.trust_run))
    nothing = not found.r_squared > 0
    note = NOTE.format(checkpoint.name, f"{found.r_squared:.1%}", KNOWS_NOTHING if nothing else "")
    more: dict[str, Any] = {
        "probe": {
            "checkpoint": checkpoint.name,
            "r_squared": found.r_squared,
            "r_squared_by_stage": found.by_stage,
            "penalties": found.penalties,
            "folds": FOLDS,
            "responses": found.responses,
            "hidden_size": found.width,
        }
    }
    title = f"Lift by a value probe (R² = {found.r_squared:.2f})"
    cut = [step.without_holes() for step in found.steps]
    return lift_analysis("lift_probe", title, run, name, cut, settings, f"{note} {READING}", more)


def _check_rows(steps: Sequence[Step]) -> None:
    """What can be known to be missing before a model is loaded."""
    if not any(row.get("messages") for step in steps for row in step.rows):
        raise CannotAnalyseError(OLDER)
    if not any((step.token >= 0).any() for step in steps):
        raise CannotAnalyseError("its rollouts hold no token ids.")
    rewards = np.concatenate([step.reward for step in steps])
    rewards = rewards[np.isfinite(rewards)]
    if not len(rewards) or (rewards == rewards[0]).all():
        raise CannotAnalyseError("all recorded rewards are equal, so there is nothing to predict.")


def probe(run: Run, steps: Sequence[Step], settings: Settings, policy: Any) -> Probed:
    """Fit and predict, over all recorded steps at once."""
    width = int(policy.model.config.get_text_config().hidden_size)
    chosen = [_chosen(step, share) for step, share in _shares(steps, width)]
    states, prompts, encoded = [], [], {}
    for step, used in zip(steps, chosen, strict=True):
        rows = np.flatnonzero(used)
        asked = [prompt_of(step.rows[row], run.path) for row in rows]
        for prompt in asked:
            if repr(prompt) not in encoded:
                encoded[repr(prompt)] = policy.encode(prompt)
        tokens = [step.token[step.owner == row] for row in rows]
        inputs = [encoded[repr(prompt)] for prompt in asked]
        states += list(hidden_states(policy, inputs, tokens))
        prompts += [prompt.id for prompt, ids in zip(asked, tokens, strict=True) for _ in ids]
    if len({*prompts}) < 2:
        raise CannotAnalyseError("its usable responses answer fewer than 2 different prompts.")
    x = np.concatenate(states)
    if not np.isfinite(x).all():
        raise CannotAnalyseError("the policy's hidden states are not all finite.")
    y = np.concatenate(
        [
            step.reward[step.owner][used[step.owner]]
            for step, used in zip(steps, chosen, strict=True)
        ]
    )
    group = np.unique(np.array(prompts), return_inverse=True)[1]
    value, penalties = out_of_fold(x, y, folds_by_group(group, seed=settings.seed))
    made, by_stage = _put_back(steps, chosen, value)
    responses = int(sum(used.sum() for used in chosen))
    return Probed(made, r_squared(y, value), by_stage, penalties, responses, width)


def _shares(steps: Sequence[Step], width: int) -> list[tuple[Step, float]]:
    """How much of each step fits into memory, the same share of all."""
    size = sum(len(step.owner) for step in steps) * width * 4
    return [(step, min(1.0, MOST_BYTES / size)) for step in steps]


def _chosen(step: Step, share: float) -> Bool[np.ndarray, " R"]:
    """Responses with a reward and all their token ids; the first of them, if not all fit."""
    whole = np.ones(step.num_responses, dtype=bool)
    whole[step.owner[step.token < 0]] = False
    good = whole & np.isfinite(step.reward)
    most = max(1, int(share * step.num_responses)) if share < 1.0 else step.num_responses
    return good & (np.cumsum(good) <= most)


def _put_back(
    steps: Sequence[Step],
    chosen: Sequence[Bool[np.ndarray, " _"]],
    value: Float[np.ndarray, " N"],
) -> tuple[list[Step], dict[str, float]]:
    """The steps with the probe's V, NaN for responses it did not read; and R² of each stage."""
    made, first = [], 0
    for step, used in zip(steps, chosen, strict=True):
        here = used[step.owner]
        column = np.full(len(step.owner), np.nan)
        column[here] = value[first : first + int(here.sum())]
        first += int(here.sum())
        made.append(replace(step, value=column))
    by_stage = {}
    for stage, part in stage_slices(len(made)).items():
        y = np.concatenate([step.reward[step.owner] for step in made[part]])
        v = np.concatenate([step.value for step in made[part]])
        by_stage[stage] = r_squared(y[np.isfinite(v)], v[np.isfinite(v)])
    return made, by_stage
