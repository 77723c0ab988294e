"""Whole runs of an unmodified verl on two CPU workers: the toy reward rises."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from running import HERE, Ran, arguments, base, run
from toy import make_model, make_rows

from segcredit.integrations.verl.dumps import adopt
from segcredit.runlog import read_run

SEGMENT = {"trainer.v1.trainer_mode": "segment_sync", "algorithm.use_kl_in_reward": True}
STEPS = 11
CLI = ["-c", "from segcredit.cli import main; main()"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    make_model(folder / "model")
    make_rows(folder / "rows.jsonl")
    return folder


def small(place: Path, folder: Path, steps: int = STEPS) -> dict[str, object]:
    return base(folder, place / "model", place / "rows.jsonl", steps) | SEGMENT


def assert_rises(ran: Ran, steps: int = STEPS) -> None:
    assert ran.code == 0, ran.output[-3000:]
    rewards = ran.column("critic/score/mean")
    assert len(rewards) == steps
    assert sum(rewards[:3]) / 3 < 0.25, rewards
    assert sum(rewards[-3:]) / 3 > 0.45, rewards
    assert all(x != 0 for x in ran.column("critic/rewards/mean"))
    # KL in the reward: what is learnt from is a little less than the score
    assert ran.column("actor/reward_kl_penalty")[-1] > 0


def test_sapo_across_two_nodes(place: Path, tmp_path: Path) -> None:
    """Two raylets on this machine, a data-parallel worker on each."""
    settings = {key: x for key, x in small(place, tmp_path).items() if "ray_init." not in key} | {
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "algorithm.lam": 0.99,
        "actor_rollout_ref.rollout.calculate_log_probs": True,  # verl's default
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.actor.clip_ratio_c": 1e9,
        "critic.cliprange_value": 1e9,
    }
    ran = run(tmp_path, settings, program=[str(HERE / "two_nodes.py")])
    assert_rises(ran)
    (nodes,) = [x for x in ran.output.splitlines() if x.startswith("WORKERS ON ")]
    assert nodes == "WORKERS ON 2 NODES"
    assert all(x > 0 for x in ran.column("critic/grad_norm"))
    assert "segment credit departs" not in ran.output
    assert "TopEntropy(fraction=0.3" in ran.output
    # of 12 tokens 4 are picked, and the last one; some responses are shorter
    assert all(2 < x <= 5 for x in ran.column("segment/num/mean"))


RECIPE = """
name: toy
seed: 1
model: {{path: {place}/model, attention: sdpa}}
data: {{train: [{place}/rows.jsonl], test: [{place}/rows.jsonl], max_prompt_tokens: 32}}
reward: {reward}:letters
algorithm: {{name: ppo, lam: 0.95, kl: 0.001}}
stages: [{{kind: optimize, steps: {steps}}}]
rollout: {{prompts: 32, max_tokens: 12}}
update: {{minibatches: 2, tokens_per_micro: 256}}
optimizer: {{lr: 4.0e-3, critic_lr: 1.0e-3}}
evaluation: {{every: 0, prompts: 8}}
save: {{every: 100, rollouts_every: 5, rollouts: 4}}
"""


LENGTHS = """
def length(completions, num_tokens, truncated, **_):
    return [n / 12 if n < 12 else 1 + cut for n, cut in zip(num_tokens, truncated)]
"""


def test_grpo_from_a_recipe_counts_tokens_and_is_resumed_with_its_log(
    place: Path, tmp_path: Path
) -> None:
    """verl's own trainer, without our plugin: what it does not do, the command does."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    recipe, folder = tmp_path / "toy.yaml", tmp_path / "run"
    text = RECIPE.format(place=place, reward="", steps=1).replace(":letters", "lengths.py:length")
    text = text.replace("{name: ppo, lam: 0.95, kl: 0.001}", "{name: grpo_verl, kl: 0.01}")
    recipe.write_text(text.replace("prompts: 32,", "prompts: 8, samples: 4, mismatch_cap: 2,"))
    for steps in (1, 2):
        changes = [f"stages.0.steps={steps}", "save.every=1", "rollout.old_logp=recompute"]
        ran = run(tmp_path, {}, program=command(place, recipe, folder, changes))
        assert ran.code == 0, ran.output[-3000:]
    assert (folder / "verl" / "metrics-001.jsonl").exists()
    adopt(folder)
    found = read_run(folder)
    assert found.series("reward", "optimize")[0] == [1, 2]
    for row in (x for x in found.metrics if x["stage"] == "optimize"):
        cut = row["truncated"]  # each earns 2 in place of 12 / 12
        assert row["reward"] == pytest.approx(row["response_length"] / 12 + cut, abs=1e-5)
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert all("sampled" not in row for row in found.metrics), "no accuracy is made up"


def command(place: Path, recipe: Path, folder: Path, changes: list[str]) -> list[str]:
    """``segcredit verl`` as a user types it, and what a CPU needs beside."""
    machine = ("use_torch_compile", "num_workers", "device", "ray_init", "ray_kwargs", "storage")
    known = base(folder, place / "model", place / "rows.jsonl", STEPS)
    own = [f"--verl={x}" for x in arguments(known) if any(part in x for part in machine)]
    own.append("--verl=reward.reward_model.rollout.name=hf")
    options = ["--out", str(folder), "--gpus=2", "--rollout=hf", "--tensor-parallel=2", *own]
    return [*CLI, "verl", str(recipe), *changes, *options]


def test_ppo_from_a_recipe_to_a_report(place: Path, tmp_path: Path) -> None:
    """``segcredit verl RECIPE``, then ``segcredit report``: the same commands as a user types."""
    recipe, folder = tmp_path / "toy.yaml", tmp_path / "run"
    recipe.write_text(RECIPE.format(place=place, reward=HERE / "toy.py", steps=STEPS))
    ran = run(tmp_path, {}, program=command(place, recipe, folder, []))
    ran = Ran(ran.code, ran.output, folder, "verl/metrics.jsonl")
    steps = [row for row in ran.metrics if "critic/score/mean" in row]
    assert len(ran.metrics) == len(steps) + 1  # and a validation before the first
    assert_rises(ran)
    assert "departs" not in ran.output
    assert all(x == 1 for x in ran.column("segment/length/mean"))
    done = run(tmp_path, {}, program=[*CLI, "report", str(folder), "--no-analyses"])
    assert done.code == 0, done.output[-3000:]
    assert (folder / "report.html").stat().st_size > 50_000
    kept = read_run(folder)
    assert kept.series("reward", "optimize")[0] == list(range(1, STEPS + 1))
    assert kept.rollout_steps == [1, 5, 10]
    rows = kept.rollouts(5)
    assert len(rows) == 4
    assert all(row["segment"] == list(range(len(row["tokens"]))) for row in rows)


def test_vc_ppo_pretrains_its_critic_and_decouples_lambda(place: Path, tmp_path: Path) -> None:
    steps, pretraining = STEPS + 3, 3
    settings = small(place, tmp_path, steps) | {
        "+segment.algorithm": "vc_ppo",
        "+segment.critic_pretraining_steps": pretraining,
        "algorithm.lam": 0.95,
    }
    ran = run(tmp_path, settings)
    assert_rises(ran, steps)
    assert "lam_critic=1.0" in ran.output
    alone = [row["segment/critic_pretraining"] == 1 for row in ran.metrics]
    assert alone == [True] * pretraining + [False] * STEPS
    assert ["actor/pg_loss" in row for row in ran.metrics] == [not x for x in alone]
    value, target = ran.column("critic/values/mean"), ran.column("critic/returns/mean")
    assert value[0] == 0
    expected = sum(target[: pretraining + 1]) / (pretraining + 1)  # of one step it is too noisy
    assert 0.5 * expected < value[pretraining] < 2.0 * expected


def test_a_vision_language_model_with_pictures_and_a_critic(tmp_path: Path) -> None:
    import tiny_vision

    model = tiny_vision.make_model(tmp_path / "model")
    rows = tiny_vision.make_rows(tmp_path / "rows.parquet")
    folder = tmp_path / "run"
    settings = base(folder, model, rows, 3) | SEGMENT
    ran = run(folder, settings)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.metrics) == 3
    assert all(x > 0 for x in ran.column("critic/grad_norm"))
    assert all(x > 0 for x in ran.column("actor/grad_norm"))
    # a picture of 56 × 56 takes 4 tokens, one of 56 × 84 takes 6
    lengths = ran.metrics[0]["prompt_length/max"] - ran.metrics[0]["prompt_length/min"]
    assert lengths == 2
    # the critic moved away from 0, where it begins
    assert ran.column("critic/values/mean")[0] == 0
    assert ran.column("critic/values/mean")[-1] != 0


def test_the_trainer_whose_rollouts_outlast_a_step(place: Path, tmp_path: Path) -> None:
    settings = small(place, tmp_path, 3) | {"trainer.v1.trainer_mode": "segment_colocate_async"}
    ran = run(tmp_path, settings)
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.metrics) == 3
    assert max(ran.column("training/off_policy/trajectory_staleness/max")) > 0
    assert all(x > 0 for x in ran.column("actor/grad_norm"))


def test_the_trainer_whose_rollouts_have_devices_of_their_own(place: Path, tmp_path: Path) -> None:
    """One device learns and lends a hand, the other samples; weights go from one to the other."""
    (tmp_path / "weights").mkdir()
    rollout = "actor_rollout_ref.rollout"
    settings = small(place, tmp_path, 3) | {
        "trainer.v1.trainer_mode": "segment_separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 2,
        "trainer.n_gpus_per_node": 1,
        f"{rollout}.nnodes": 1,
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.checkpoint_engine.backend": "file",
        f"{rollout}.checkpoint_engine.custom_backend_module": "verl_on_cpu_weights",
    }
    ran = run(tmp_path, settings, ROLLOUT_WEIGHTS=str(tmp_path / "weights"))
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.metrics) == 3
    assert all(x > 0 for x in ran.column("actor/grad_norm"))
    assert all(x > 0 for x in ran.column("segment/num/mean"))
    # before the first step and after each: what is sampled from is what was learnt
    sent = [torch.load(tmp_path / "weights" / f"{n}.pt", weights_only=True) for n in range(4)]
    for before, after in pairwise(sent):
        assert any(not torch.equal(x, after[name]) for name, x in before.items())
