"""With the plugin installed and not selected, verl is what it was: to the last bit."""

import json
import subprocess
import sys
from pathlib import Path

from running import HERE, base, environment, run
from toy import make_model, make_rows

NOISE = ("timing", "perf/", "time", "throughput", "memory")


def own_algorithm(place: Path, folder: Path) -> dict[str, object]:
    """verl's own trainer, estimator and loss; the same prompts, draws and order in every run."""
    return base(folder, place / "model", place / "rows.jsonl", 2) | {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.v1.sampler.custom_sampler.path": HERE / "ordered_sampler.py",
        "trainer.v1.sampler.custom_sampler.name": "OrderedReplayBuffer",
    }


def test_a_run_of_verls_own_is_bit_identical_with_and_without_the_plugin(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    make_rows(tmp_path / "rows.jsonl")
    found = {}
    for plugins in ("none", "auto"):
        folder = tmp_path / plugins
        ran = run(
            folder,
            own_algorithm(tmp_path, folder),
            VERL_USE_EXTERNAL_PLUGINS=plugins,
            ROLLOUT_REPEATABLE="1",
        )
        assert ran.code == 0, ran.output[-3000:]
        found[plugins] = [
            {key: x for key, x in row.items() if not any(part in key for part in NOISE)}
            for row in ran.metrics
        ]
    assert len(found["none"]) == 2
    assert {"actor/pg_loss", "actor/grad_norm", "actor/kl_loss"} <= found["none"][0].keys()
    assert found["none"][0]["actor/grad_norm"] > 0
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
