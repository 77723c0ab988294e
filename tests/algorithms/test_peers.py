"""GRPO, RLOO, single-stream SPO and PPO against their authors' own functions, run beside ours.

fixtures/peers_grpo.json holds the batches, what the peers' functions returned for them, and whose
functions they are (repository, commit, names, settings). Every batch is laid out with holes and
garbage, so that the comparison does not depend on one layout.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged import Layout, layout

from segcredit.algorithms import make_algorithm
from segcredit.core import tracker
from segcredit.train.tracker import ValueTracker
from segcredit.types import Encoded, Outputs, Prompt, Rollouts

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "peers_grpo.json").read_text())
PEERS: dict[str, Any] = FIXTURE["peers"]
PPO = json.loads((Path(__file__).parent.parent / "fixtures" / "peers_ppo.json").read_text())
CLOSE = {"rel": 1e-6, "abs": 1e-6}


def laid_out(number: int, result: dict[str, Any]) -> tuple[Layout, Rollouts, Outputs]:
    batch = FIXTURE["batches"][number]
    rows = batch["rows"]
    place = layout([len(row["logp"]) for row in rows], seed=number)
    baseline = result.get("baseline")
    rollouts = Rollouts(
        tokens=place.mask.long(),
        mask=place.mask,
        logp_old=place.put([row["logp_old"] for row in rows]),
        reward=torch.tensor(batch["reward"], dtype=torch.float64),
        group=torch.tensor(batch["group"]),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        logp_ref=place.put([row["logp_ref"] for row in rows]),
        baseline=None if baseline is None else torch.tensor(baseline, dtype=torch.float64),
    )
    return place, rollouts, Outputs(place.put([row["logp"] for row in rows]).requires_grad_())


@pytest.mark.parametrize(
    ("peer", "number"), [(p, i) for p in PEERS for i in range(len(PEERS[p]["results"]))]
)
def test_advantages_loss_and_gradient_are_the_peers(peer: str, number: int) -> None:
    found = PEERS[peer]["results"][number]
    place, rollouts, outputs = laid_out(number, found)
    algorithm = make_algorithm(**PEERS[peer]["algorithm"])
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    loss = algorithm.loss(outputs, batch)
    loss.policy.backward()
    for ours, theirs in (
        (place.take(batch.credit.advantage), found["advantage"]),
        (place.take(outputs.logp.grad), found["grad"]),
    ):
        for row, expected in zip(ours, theirs, strict=True):
            assert row == pytest.approx(expected, **CLOSE)
    assert loss.policy.item() == pytest.approx(found["loss"], **CLOSE)
    for name in ("policy_loss", "kl_loss"):
        if name in found:
            assert loss.metrics[name].item() == pytest.approx(found[name], **CLOSE)


def test_presets_are_not_plain_grpo() -> None:
    """The comparison above can tell them apart: the plain loss is far from every preset's."""
    plain = make_algorithm("grpo")
    for peer in ("verl", "spo_grpo", "spo_rloo"):
        found = PEERS[peer]["results"][1]
        _, rollouts, outputs = laid_out(1, found)
        batch = plain.minibatch(plain.prepare(rollouts))
        assert abs(plain.loss(outputs, batch).policy.item() - found["loss"]) > 0.1


def test_tracked_value_is_the_recipes() -> None:
    for found in PEERS["single_stream"]["results"]:
        alpha, beta = (torch.tensor(found[x], dtype=torch.float64) for x in ("alpha", "beta"))
        assert tracker.tracker_value(alpha, beta).tolist() == pytest.approx(found["baseline"])


def test_drift_and_forgetting_are_the_recipes() -> None:
    """Two visits of six prompts, each after an update that moves log π.

    The recipe stores log π after the update of the step that drew the response
    (spo/spo_ray_trainer.py:297), so the drift of the second visit is the second update alone.
    """
    case = PEERS["single_stream"]["tracker"]
    old, moves = case["logp_old"], case["moves"]
    prompts = [Prompt(f"p{i}", ()) for i in range(len(old))]
    encoded = [Encoded(x, torch.zeros(1).long(), torch.zeros(1, 1).long()) for x in prompts]
    place = layout([len(row) for row in old], holes=True)
    ours = ValueTracker(prompts)
    ours.alpha, ours.beta = torch.tensor(case["alpha"]), torch.tensor(case["beta"])
    drawn, now = old, old
    for visit, move in zip(case["visits"], moves, strict=True):
        now = [
            [x + dx for x, dx in zip(*pair, strict=True)] for pair in zip(now, move, strict=True)
        ]

        def score(rollouts: Rollouts, now: list[list[float]] = now) -> torch.Tensor:
            logp = torch.zeros(rollouts.mask.shape)
            logp[rollouts.mask] = torch.tensor([x for row in now for x in row])
            return logp

        rollouts = Rollouts(
            tokens=place.mask.long(),
            mask=place.mask,
            logp_old=place.put(drawn, torch.float32),
            reward=torch.tensor(visit["reward"]),
            group=torch.arange(len(old)),
            truncated=torch.zeros(len(old), dtype=torch.bool),
            prompts=encoded,
        )
        measured = ours.update(rollouts, score)
        mean = sum(visit["drift"]) / len(old)
        assert measured["tracker/drift"] == pytest.approx(mean, abs=1e-6)
        rho = tracker.tracker_forgetting(torch.tensor(visit["drift"])).tolist()
        assert rho == pytest.approx(visit["rho"], rel=1e-6)
        assert ours.alpha.tolist() == pytest.approx(visit["alpha"], **CLOSE)
        assert ours.beta.tolist() == pytest.approx(visit["beta"], **CLOSE)
        for i, stored in enumerate(visit["stored"]):
            assert ours.last[i][1].tolist() == pytest.approx(stored, abs=1e-6)
        drawn = now


@pytest.mark.parametrize("number", range(len(PPO["batches"])))
def test_ppo_is_verls(number: int) -> None:
    """Credit, targets, both losses and both gradients: fixtures/peers_ppo.json."""
    case = PPO["batches"][number]
    place = layout([len(row) for row in case["logp"]], seed=number)
    rollouts = Rollouts(
        tokens=place.mask.long(),
        mask=place.mask,
        logp_old=place.put(case["logp_old"]),
        reward=torch.tensor(case["reward"], dtype=torch.float64),
        group=torch.arange(len(case["reward"])),
        truncated=torch.zeros(len(case["reward"]), dtype=torch.bool),
        logp_ref=place.put(case["logp_ref"]),
        value=place.put(case["value_old"]),
    )
    logp, value = (place.put(case[name]).requires_grad_() for name in ("logp", "value"))
    algorithm = make_algorithm("ppo")
    batch = algorithm.minibatch(algorithm.prepare(rollouts))
    loss = algorithm.loss(Outputs(logp, value), batch)
    loss.total.backward()
    for ours, theirs in (
        (batch.credit.advantage, case["advantage"]),
        (batch.credit.value_target, case["value_target"]),
        (logp.grad, case["grad"]),
        (value.grad, case["value_grad"]),
    ):
        for row, expected in zip(place.take(ours), theirs, strict=True):
            assert row == pytest.approx(expected, **CLOSE)
    assert loss.policy.item() == pytest.approx(case["policy_loss"], **CLOSE)
    assert loss.value.item() == pytest.approx(case["value_loss"], **CLOSE)
