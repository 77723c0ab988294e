"""A real run of a tiny vision-language model, made once."""

from pathlib import Path

import pytest
from tiny_runs import REWARD

from segcredit.train.trainer import Trainer


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of SAPO, all of them recorded; rewards differ, since they count tokens."""
    folder = tmp_path_factory.mktemp("analyzed")
    (folder / "reward.py").write_text(REWARD)
    Trainer(
        model={"tiny": "qwen2_5_vl", "hidden": 32, "layers": 1, "heads": 2},
        data={
            "world": "shape_grid",
            "settings": {"size": 2, "colors": 1, "shapes": 1, "terms": 1, "twice": False},
        },
        algorithm={"name": "sapo", "kl": 0.0},
        reward=f"{folder}/reward.py:by_length",
        stages=[
            {"kind": "warm_start", "steps": 1, "batch": 4},
            {"kind": "optimize", "steps": 4},
        ],
        rollout={"prompts": 8, "max_tokens": 12},
        update={"minibatches": 2},
        optimizer={"lr": 1e-3, "critic_lr": 1e-3},
        evaluation={"every": 0, "prompts": 2},
        save={"every": 2, "rollouts_every": 1, "rollouts": 8, "keep": 3},
        threads=1,
    ).train(folder / "run")
    return folder / "run"
