"""The prompt curriculum (data.curriculum): success rates, draws, resumption."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each import each
from forked_cli import run_several
from tiny_runs import assert_same_run, changed, metrics, write_recipe
from train.small import SMALL, recipe
from train.test_train_refill import HalfHopeless, hopeless
from train.test_train_resume import after_lines, finish, kill, make, undisturbed
from train.test_train_sharded import assert_close

from segcredit.config import RecipeError, parse_recipe
from segcredit.core.tracker import count_successes
from segcredit.models import Policy
from segcredit.runlog.storage import load_state
from segcredit.train.build import build, make_plan
from segcredit.train.curriculum import Curriculum
from segcredit.train.metrics import RolloutBatch
from segcredit.train.stages import stage_of
from segcredit.train.state import State, generator
from segcredit.types import Encoded, Prompt, Response, Rollouts

pytestmark = pytest.mark.usefixtures("unchecked")
PROMPTS = [Prompt(f"p{n}", ({"role": "user", "content": "?"},)) for n in range(4)]


def batch_of(
    which: list[int], rewards: list[float], correct: list[bool] | None = None
) -> RolloutBatch:
    empty = torch.zeros(1, dtype=torch.long)
    encoded = [Encoded(PROMPTS[n], empty, empty[None]) for n in which]
    rollouts = Rollouts.from_columns(
        torch.ones(len(which), 1, dtype=torch.bool),
        reward=torch.tensor(rewards),
        prompts=encoded,
        correct=None if correct is None else torch.tensor(correct),
    )
    return RolloutBatch(rollouts, [], [])


def test_hand_numbers() -> None:
    """Prior 1, 1. Prompt 0: 1 of 2, then 0 of 2; prompt 1: 3 of 3; the others are not drawn."""
    found = Curriculum(PROMPTS)
    first = found.update(batch_of([0, 0, 1, 1, 1], [1.0, 0.0, 1.0, 1.0, 1.0]))
    # ½ · 1 + ½ · 1 + s and n − s
    assert found.alpha.tolist() == [2.0, 4.0, 1.0, 1.0]
    assert found.beta.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert first == {"curriculum/seen": 0.5, "curriculum/rate": pytest.approx((0.5 + 0.8) / 2)}
    found.update(batch_of([0, 0], [0.0, 0.0]))
    # ½ · 2 + ½ and ½ · 2 + ½ + 2
    assert found.alpha.tolist() == [1.5, 4.0, 1.0, 1.0]
    assert found.beta.tolist() == [3.5, 1.0, 1.0, 1.0]
    assert found.value(["p0", "p1", "p2"]).tolist() == pytest.approx([0.3, 0.8, 0.5])


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_the_loops(seed: int) -> None:
    """Naive oracle: one prompt at a time."""
    chooser = random.Random(seed)
    found, expected = Curriculum(PROMPTS), {x.id: [1.0, 1.0] for x in PROMPTS}
    for _ in range(6):
        which = [chooser.randrange(4) for _ in range(chooser.randint(1, 9))]
        correct = [chooser.random() < 0.4 for _ in which]
        found.update(batch_of(which, [9.0] * len(which), correct))  # the reward is not read
        for n in set(which):
            rights = [c for place, c in zip(which, correct, strict=True) if place == n]
            a, b = expected[f"p{n}"]
            expected[f"p{n}"] = [
                0.5 * a + 0.5 + sum(rights),
                0.5 * b + 0.5 + len(rights) - sum(rights),
            ]
        assert torch.stack([found.alpha, found.beta], dim=1).tolist() == [
            pytest.approx(expected[x.id]) for x in PROMPTS
        ]


def test_dropped_responses_count() -> None:
    """With dynamic sampling: the first batch and all refills, not what was selected of them."""
    found = Curriculum(PROMPTS)
    selected = batch_of([0, 1], [1.0, 1.0])
    first, more = batch_of([0, 2], [1.0, 0.0]), batch_of([1, 3], [1.0, 0.0])
    parts = RolloutBatch(selected.rollouts, [], [], unfiltered=first, refills=(more,))
    found.update(parts)
    assert found.alpha.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert found.beta.tolist() == [1.0, 1.0, 2.0, 2.0]


@each("rewards", [[1.5, 0.0], [-0.5, 0.0]])
def test_rewards_outside_0_and_1_are_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\].* data\.curriculum=false"):
        Curriculum(PROMPTS).update(batch_of([0, 1], rewards))


def test_draws_follow_the_weights() -> None:
    """Rates 0, ½ and 1 of 30 prompts each: drawn as .05 : .55 : .05, one at a time."""
    prompts = [SimpleNamespace(id=str(n)) for n in range(90)]
    found = Curriculum(prompts)  # type: ignore[arg-type]
    found.alpha = torch.tensor([0.0, 5.0, 10.0]).repeat_interleave(30)
    found.beta = torch.tensor([10.0, 5.0, 0.0]).repeat_interleave(30)
    drawn = torch.Generator().manual_seed(1)
    counts = Counter(found.draw(1, drawn)[0] // 30 for _ in range(6000))
    expected = [0.05, 0.55, 0.05]
    for kind, weight in enumerate(expected):
        share = weight / sum(expected)
        deviation = (share * (1 - share) / 6000) ** 0.5
        assert abs(counts[kind] / 6000 - share) < 5 * deviation
    many = found.draw(40, drawn)
    assert len(set(many)) == 40
    assert sorted(found.draw(200, drawn)) == list(range(90))


def trained(folder: Path, steps: int, size: int = 48, **rollout: int) -> tuple[State, list[Any]]:
    """Half of the prompts are hopeless; the responses of each step."""
    settings = {"prompts": 8, "samples": 4, "max_tokens": 24, **rollout}
    made = recipe(SMALL["chains"], {"name": "grpo", "kl": 0.0}, rollout=settings, steps=steps)
    data = made.data.model_copy(update={"size": size, "curriculum": True})
    made = parse_recipe(made.model_copy(update={"data": data}).as_dict())
    state = build(make_plan(made), Policy.from_pretrained(folder))
    state.reward = HalfHopeless(state.reward)
    state.stage = len(made.stages) - 1
    stage_of(state).enter()
    found = []
    for _ in range(steps):
        found.append(stage_of(state).step())
        state.step += 1
        state.stage_step += 1
    return state, found


def test_hopeless_prompts_are_drawn_less() -> None:
    """100 prompts are never solved, 100 half of the time; 8 responses to each of 10 per step.

    A hopeless prompt's β goes to ½β + ½ + 8 = 17, its rate to 1/18 and its weight to
    √(17/18²) + .05 = .279; the others' is .55 at a rate of ½ and .53 on average: a share of .345.
    """
    prompts = [Prompt(str(n), ()) for n in range(200)]
    found, chooser, late = Curriculum(prompts), random.Random(0), []
    empty = torch.zeros(1, dtype=torch.long)
    encoded = [Encoded(x, empty, empty[None]) for x in prompts]
    for step in range(400):
        rows = [n for n in found.draw(10, generator(0, step)) for _ in range(8)]
        reward = torch.tensor([float(n % 2 and chooser.random() < 0.5) for n in rows])
        rollouts = Rollouts.from_columns(
            torch.ones(80, 1, dtype=torch.bool), reward=reward, prompts=[encoded[n] for n in rows]
        )
        found.update(RolloutBatch(rollouts, [], []))
        late += [n % 2 == 0 for n in rows[::8]] if step >= 200 else []
    assert 0.30 < sum(late) / len(late) < 0.39


@pytest.mark.slow
def test_rates_of_a_run(warm: Any) -> None:
    """Settings of a world in which half of the prompts are hopeless."""
    state, found = trained(warm("chains"), steps=12, size=24)
    assert state.curriculum is not None
    values = state.curriculum.value([x.id for x in state.train.prompts])  # type: ignore[attr-defined]
    lost = torch.tensor([is_lost(x) for x in state.train.prompts])  # type: ignore[attr-defined]
    seen = state.curriculum.alpha + state.curriculum.beta > 2
    assert values[lost & seen].max() < 0.5
    assert values[~lost & seen].mean() > values[lost & seen].mean() + 0.1
    rates = [measured["curriculum/seen"] for measured, _ in found]
    assert rates == sorted(rates)
    assert rates[-1] > 0.9


def is_lost(prompt: Prompt) -> bool:
    return hopeless(Response(prompt, "", 0, False, 0))


def test_refills_draw_other_random_numbers(warm: Any) -> None:
    state, found = trained(warm("chains"), steps=2, refills=2)
    measured, result = found[0]
    assert measured["refill/batches"] >= 1
    assert len(result.sampled.refills) == measured["refill/batches"]
    first, second = (
        {x.prompt.id for x in batch.responses}
        for batch in (result.sampled.unfiltered, result.sampled.refills[0])
    )
    assert first != second
    assert state.position == 8 * sum(1 + x["refill/batches"] for x, _ in found)


SHORT: dict[str, Any] = {
    "algorithm": {"name": "grpo", "kl": 0.0},
    "rollout__samples": 2,
    "rollout__prompts": 4,
    "data__size": 10,
    "data__curriculum": True,
    "stages": [{"kind": "warm_start", "steps": 1, "batch": 4}, {"kind": "optimize", "steps": 6}],
    "evaluation": {"prompts": 2, "every": 0, "greedy": False, "watch": 0},
    "save__every": 2,
}


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    whole = undisturbed(make(tmp_path / "whole"), **SHORT)
    folder = make(tmp_path / "killed")
    write_recipe(folder, **SHORT)
    kill(folder, after_lines(5), 0.0)
    finish(folder)
    assert_same_run(folder / "run", whole)
    kept = load_state(whole / "checkpoints" / "step-000007")["curriculum"]
    assert float((kept["alpha"] + kept["beta"]).max()) > 3
    assert all("curriculum/rate" in x for x in metrics(whole) if x["stage"] == "optimize")


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    stages = [SHORT["stages"][0], {"kind": "optimize", "steps": 4}]
    changes = {**SHORT, "stages": stages, "save__every": 9, "optimizer__eps": 1e-3}
    made = write_recipe(tmp_path, **changes)
    run_several(tmp_path, 1, "train", made, "--folder", "one")
    run_several(tmp_path, 2, "train", made, "--folder", "two")
    assert_close(tmp_path / "one", tmp_path / "two")


def test_the_state_is_saved_only_with_the_setting(tmp_path: Path) -> None:
    run = undisturbed(tmp_path, **{**SHORT, "data__curriculum": False})
    assert "curriculum" not in load_state(run / "checkpoints" / "step-000007")


@each(
    ("changes", "message"),
    [
        ({"data__size": None}, "data.curriculum draws prompts again .* set data.size"),
        (
            {"rollout__samples": 1, "algorithm": "single_stream_spo"},
            "single_stream_spo draws prompts by their tracked values already",
        ),
        (
            {
                "algorithm": "spo_tree",
                "rollout__samples": 1,
                "rollout__tree": {"branching": [2, 2], "tokens": 4},
            },
            "data.curriculum counts the successes of independent responses: remove rollout.tree",
        ),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(changed(**{**SHORT, **changes}))


def test_prompts_that_were_not_drawn_keep_their_counts() -> None:
    alpha, beta = torch.tensor([3.0, 3.0]), torch.tensor([1.0, 1.0])
    zero = torch.zeros(2)
    got = count_successes(alpha, beta, zero, zero, 1.0)
    assert torch.equal(got[0], alpha)
    assert torch.equal(got[1], beta)


def test_a_step_determines_its_prompts() -> None:
    one, other = (Curriculum(PROMPTS).draw(2, generator(3, "curriculum", 8)) for _ in range(2))
    assert one == other
