"""What is read off a run, against hand numbers."""

import json
import math
from pathlib import Path

import pytest
from small import plan, pretend

from segcredit.runlog import read_run
from segcredit_lab.study import Options
from segcredit_lab.study.store import area_under, measure, read_measurement


def test_the_area_is_the_mean_over_the_curve() -> None:
    assert area_under([0, 10, 20], [0.2, 0.4, 0.6]) == pytest.approx(0.4)
    assert area_under([0, 1, 10], [0.0, 1.0, 1.0]) == pytest.approx(0.95), "unequal steps"
    assert area_under([5, 15], [0.5, 0.5]) == 0.5, "wherever it begins"
    assert area_under([3], [0.7]) == 0.7
    assert math.isnan(area_under([], []))


def test_a_run_in_numbers(tmp_path: Path) -> None:
    made = plan(tmp_path)
    run = made.run("ppo", 0, 1e-3)
    recorded = {
        "clip_fraction": 0.25,
        "explained_variance": 0.5,
        "continuations/tokens": 30.0,
        "time/sample": 1.5,
        "time/update": 0.5,
    }
    folder = pretend(made.store, run, [0.1, 0.3, 0.7], **recorded)
    found = measure(read_run(folder))
    assert found.steps == (0, 1, 2)
    assert found.accuracy == (0.1, 0.3, 0.7)
    assert found.area == pytest.approx(0.35)
    assert found.final == 0.7
    assert found.tokens == 2 * 16 * 10 + 2 * 30, "responses, continuations"
    assert found.pretraining_tokens == 16 * 10
    assert found.seconds == 4.0
    assert (found.clip_fraction, found.explained_variance) == (0.25, 0.5)
    assert math.isnan(found.entropy), "it was not recorded"
    assert math.isnan(found.explained_before)


def test_dynamic_samplings_tokens_count(tmp_path: Path) -> None:
    """Two prompts of four responses with 10 tokens in the first batch, and 500 tokens beyond it."""
    shape = Options(overrides=("rollout.prompts=2", "rollout.samples=4"))
    made = plan(tmp_path, shape)
    run = made.run("ppo", 0, 1e-3)
    rollout = run.whole.rollout
    assert (rollout.prompts, rollout.samples) == (2, 4)
    extra = {"refill/extra_tokens": 500.0, "refill/batches": 3.0}
    assert measure(read_run(pretend(made.store, run, [0.1, 0.3], **extra))).tokens == 80 + 500
    other = made.run("sapo", 0, 1e-3)
    both = extra | {"continuations/tokens": 7.0}
    folder = pretend(made.store, other, [0.1, 0.2, 0.3], **both)
    assert measure(read_run(folder)).tokens == 2 * (80 + 500 + 7)


def test_steps_that_lack_a_number_do_not_count_for_it(tmp_path: Path) -> None:
    made = plan(tmp_path)
    folder = pretend(made.store, made.run("ppo", 0, 1e-3), [0.1, 0.3], entropy=0.5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "stage": "optimize", "entropy": None}) + "\n")
    assert measure(read_run(folder)).entropy == 0.5


def test_without_held_out_prompts_there_is_nothing_to_measure(tmp_path: Path) -> None:
    made = plan(tmp_path)
    folder = pretend(made.store, made.run("ppo", 0, 1e-3), [])
    with pytest.raises(ValueError, match=r"no held-out accuracy.*data\.test"):
        measure(read_run(folder))


def test_what_a_shared_critic_cost_counts_for_whoever_uses_it(tmp_path: Path) -> None:
    made = plan(tmp_path)
    run = made.run("ppo", 0, 1e-3)
    assert run.start is not None
    folder = pretend(made.store, run, [0.1, 0.3])
    critic = pretend(made.store, run.start, [0.1])
    told = {"step": 1, "stage": "pretrain_critic", "response_length": 5.0, "time/update": 2.0}
    lines = [{**told, "explained_variance": x} for x in (-1.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    (critic / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    alone, found = read_measurement(folder), read_measurement(folder, critic)
    unknown = read_measurement(folder, tmp_path / "nowhere")
    assert math.isnan(unknown.pretraining_tokens)
    assert math.isnan(unknown.explained_before)
    assert found.pretraining_tokens == 6 * 16 * 5
    assert (found.tokens, found.seconds) == (alone.tokens, alone.seconds)
    assert found.explained_before == pytest.approx(0.3), "of the last five batches"
    assert (found.area, found.accuracy) == (alone.area, alone.accuracy)


def test_pretraining_may_ask_more_prompts_than_optimization(tmp_path: Path) -> None:
    made = plan(tmp_path, Options(overrides=("stages.1.prompts=64",)))
    start = made.run("ppo", 0, 1e-3).start
    assert start is not None
    assert measure(read_run(pretend(made.store, start, [0.1]))).pretraining_tokens == 64 * 10


def test_where_no_reward_says_what_is_correct_the_reward_is_measured(tmp_path: Path) -> None:
    made = plan(tmp_path)
    folder = pretend(made.store, made.run("ppo", 0, 1e-3), [0.1, 0.3])
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().replace('"sampled"', '"reward"'))
    found = measure(read_run(folder))
    assert (found.accuracy, found.measure) == ((0.1, 0.3), "reward")


def test_test_sets_and_the_reward_in_training(tmp_path: Path) -> None:
    made = plan(tmp_path)
    curves = {"gsm8k": [0.0, 0.1, 0.3], "svamp": [0.2, 0.4, 0.4]}
    folder = pretend(made.store, made.run("ppo", 0, 1e-3), [0.1, 0.2, 0.35], curves, reward=0.25)
    found = measure(read_run(folder))
    assert found.by_set == {"gsm8k": (0.0, 0.1, 0.3), "svamp": (0.2, 0.4, 0.4)}
    svamp = found.of_set("svamp")
    assert (svamp.accuracy, svamp.final) == ((0.2, 0.4, 0.4), 0.4)
    assert svamp.area == pytest.approx(0.35)
    assert found.training_reward == (0.25, 0.25)
    assert math.isnan(found.of_set("math").final), "an arm of another study may lack a set"


def test_the_last_ten_steps_are_the_final_reward_in_training(tmp_path: Path) -> None:
    made = plan(tmp_path)
    folder = pretend(made.store, made.run("ppo", 0, 1e-3), [0.1])
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(20):
            row = {"step": 2 + step, "stage": "optimize", "reward": float(step >= 10)}
            file.write(json.dumps(row) + "\n")
    assert measure(read_run(folder)).training_reward == (0.5, 1.0)
