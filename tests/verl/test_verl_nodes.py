"""Two Ray nodes on one machine: a run across both."""

from pathlib import Path

from running import HERE, base, run
from toy import make_model, make_rows


def test_a_run_across_two_nodes(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    make_rows(tmp_path / "rows.jsonl")
    settings = base(tmp_path, tmp_path / "model", tmp_path / "rows.jsonl", 2)
    given = {key: x for key, x in settings.items() if "ray_init." not in key} | {
        "trainer.v1.trainer_mode": "segment_sync",
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
    }
    ran = run(tmp_path, given, program=[str(HERE / "two_nodes.py")])
    assert ran.code == 0, ran.output[-3000:]
    assert len(ran.metrics) == 2
    assert all(x > 0 for x in ran.column("critic/grad_norm"))
    (nodes,) = [x for x in ran.output.splitlines() if x.startswith("WORKERS ON ")]
    assert nodes == "WORKERS ON 2 NODES"
