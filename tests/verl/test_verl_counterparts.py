"""Methods that verl computes itself run to the end with the keys that a recipe becomes."""

from pathlib import Path

import pytest
from running import base, run
from toy import make_model, make_rows

from segcredit.config import load_recipe
from segcredit.integrations.verl.translate import translate

GROUPS: dict[str, object] = {
    "trainer.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "data.train_batch_size": 8,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
}
OF_THE_METHOD = ("policy_loss", "clip_ratio", "tau_", "loss_agg", "loss_scale", "kl_loss")


@pytest.mark.parametrize(
    ("spec", "measured"),
    [
        ("{name: cispo}", {"actor/pg_loss", "actor/pg_clipfrac"}),
        ("{name: reinforce_pp_baseline, kl: 0.01}", {"actor/pg_loss", "actor/kl_loss"}),
    ],
)
def test_a_translated_method_runs_on_verl(spec: str, measured: set[str], tmp_path: Path) -> None:
    recipe = load_recipe("geo3k/qwen2.5-vl-3b-grpo", [f"algorithm={spec}"])
    method = {
        key: x
        for key, x in translate(recipe, tmp_path).settings.items()
        if key.startswith(("algorithm.", "critic.enable", "trainer.v1"))
        or any(name in key for name in OF_THE_METHOD)
    }
    model, rows = make_model(tmp_path / "model"), make_rows(tmp_path / "rows.jsonl")
    done = run(tmp_path / "run", base(tmp_path / "run", model, rows, 2) | GROUPS | method)
    assert done.code == 0, done.output[-4000:]
    assert measured <= {name for row in done.metrics for name in row}
