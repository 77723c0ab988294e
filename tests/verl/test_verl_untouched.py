"""With the plugin installed and not selected, verl is what it was: to the last bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import HERE, base, environment, finish, start
from toy import make_model, make_rows, make_value_model

NOISE = ("timing", "perf/", "time", "throughput", "memory")


ONE_WORKER: dict[str, object] = {
    "trainer.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
}
OWN: dict[str, tuple[dict[str, object], set[str]]] = {
    "reinforce_plus_plus": (
        {
            "algorithm.use_kl_in_reward": True,
            "actor_rollout_ref.actor.entropy_coeff": 0.01,
            "actor_rollout_ref.actor.use_kl_loss": True,
        },
        {"actor/kl_loss", "actor/reward_kl_penalty"},
    ),
    "grpo": (
        {
            **ONE_WORKER,
            "data.train_batch_size": 8,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.use_kl_loss": True,
            "actor_rollout_ref.actor.entropy_coeff": 0.01,
            "algorithm.use_kl_in_reward": True,
        },
        {"actor/kl_loss", "actor/reward_kl_penalty"},
    ),
    "gae": ({**ONE_WORKER, "algorithm.lam": 0.95}, {"critic/vf_loss", "critic/grad_norm"}),
}
"""verl's own algorithms: settings, and what they must have measured. The first runs on two workers,
the last is PPO, with verl's own critic."""


def own_algorithm(place: Path, folder: Path, name: str) -> dict[str, object]:
    """verl's own trainer, estimator and loss; the same prompts, draws and order in every run."""
    return (
        base(folder, place / "model", place / "rows.jsonl", 2)
        | {
            "algorithm.adv_estimator": name,
            "trainer.v1.sampler.custom_sampler.path": HERE / "ordered_sampler.py",
            "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
            "critic.model.path": place / "value_model",
        }
        | OWN[name][0]
    )


@pytest.mark.parametrize("name", OWN)
def test_a_run_of_verls_own_is_bit_identical_with_and_without_the_plugin(
    name: str, tmp_path: Path
) -> None:
    make_model(tmp_path / "model")
    make_value_model(tmp_path / "value_model")
    make_rows(tmp_path / "rows.jsonl")
    folders = {plugins: tmp_path / plugins for plugins in ("none", "auto")}
    running = {
        plugins: start(
            folder,
            own_algorithm(tmp_path, folder, name),
            VERL_USE_EXTERNAL_PLUGINS=plugins,
            ROLLOUT_REPEATABLE="1",
        )
        for plugins, folder in folders.items()
    }  # side by side: much of a run is waiting
    found = {}
    for plugins, process in running.items():
        ran = finish(process, folders[plugins])
        assert ran.code == 0, ran.output[-3000:]
        found[plugins] = [
            {key: x for key, x in row.items() if not any(part in key for part in NOISE)}
            for row in ran.metrics
        ]
    assert len(found["none"]) == 2
    assert {"actor/pg_loss", "actor/grad_norm", *OWN[name][1]} <= found["none"][0].keys()
    assert all(row["actor/grad_norm"] > 0 for row in found["none"])
    assert found["none"] == found["auto"]


def test_only_three_names_are_added_to_verls_tables(tmp_path: Path) -> None:
    tables = {}
    for plugins in ("none", "auto"):
        done = subprocess.run(
            [sys.executable, HERE / "tables.py"],
            env=environment(tmp_path, VERL_USE_EXTERNAL_PLUGINS=plugins),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        tables[plugins] = json.loads(done.stdout.splitlines()[-1])
    ours = {"segment_sync", "segment_colocate_async", "segment_separate_async"}
    assert set(tables["auto"].pop("trainers")) == {*tables["none"].pop("trainers"), *ours}
    # every function and class of verl's modules is the one that verl defines
    before, after = tables["none"].pop("functions"), tables["auto"].pop("functions")
    assert len(before) > 300
    assert {name: after.get(name) for name in before} == before
    assert tables["auto"] == tables["none"]
