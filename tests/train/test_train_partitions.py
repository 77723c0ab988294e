"""SAPO over other units, by name as a recipe has them, on responses that really have such units."""

from typing import Any

import pytest
import torch
from train.small import SMALL, recipe

from segcredit.models.codec import Codec
from segcredit.train.build import build, make_plan
from segcredit.train.stages import stage_of
from segcredit.train.step import train_step

PIECES = ["Step 1: ", "a", "\n", "Step 2: ", "b", "\n"]
"""Texts that token ids stand for here: the small worlds know neither lines nor steps."""


@pytest.mark.parametrize(
    "partition",
    ["newline", "step", {"name": "accumulate", "every": 2}, {"name": "probability", "every": 2}],
    ids=["newline", "step", "accumulate", "probability"],
)
def test_units_by_name_reach_credit_and_ratio(
    partition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Codec, "pieces", lambda self, tokens: [PIECES[x % len(PIECES)] for x in tokens]
    )
    rollout = {"prompts": 12, "max_tokens": 18}
    made = recipe(SMALL["chains"], {"name": "sapo", "partition": partition}, rollout=rollout)
    state = build(make_plan(made))
    state.stage = len(made.stages) - 1
    stage_of(state, made.stages[-1]).enter()
    stepped = train_step(state, state.train.take(0, 12))
    batch = stepped.batch
    segments = batch.credit.segments
    assert torch.equal(segments.index, batch.ratio_segments.index), "one partition for both"
    assert 1.5 < stepped.metrics["segments"] < stepped.metrics["response_length"]
    rollouts = batch.rollouts
    for row in range(len(rollouts)):
        length = int(rollouts.mask[row].sum())
        texts = [PIECES[x % len(PIECES)] for x in rollouts.tokens[row, :length].tolist()]
        unlikely = (rollouts.logp_old[row, :length].exp() < 0.9).tolist()
        index = segments.index[row, :length].tolist()
        begins = [t for t in range(1, length) if index[t] != index[t - 1]]
        if partition == "newline":  # blank lines join the one before
            assert all(texts[t - 1] == "\n" for t in begins)
        elif partition == "step":
            assert all(texts[t].startswith("Step ") for t in begins)
        elif partition["name"] == "accumulate":
            assert all(unlikely[t - 1] and sum(unlikely[:t]) % 2 == 0 for t in begins)
        else:
            assert all(unlikely[t] and sum(unlikely[:t]) % 2 == 0 for t in begins)
