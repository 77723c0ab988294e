"""The methods beyond critics and groups, each end to end: it must beat where it started."""

from typing import Any

import pytest
from train.small import SMALL, after_warm_start, recipe

MARGIN = 0.12
"""As in test_train_learning.py; measured gains stand beside the methods."""
UNITS = {"name": "fixed", "size": 4}
"""The small world's responses are one line."""
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "vineppo": ({"name": "vineppo", "samples": 3, "partition": UNITS}, {}),  # 0.28
    "spo_chain": ({"name": "spo_chain", "samples": 3, "every": 1}, {}),
    "spo_tree": (
        "spo_tree",
        {
            "rollout": {
                "prompts": 8,
                "max_tokens": 24,
                "tree": {"branching": [4, 4], "tokens": 8},
            }
        },
    ),  # 0.27
    "dpo": ("dpo", {"samples": 4}),  # 0.23
    "dpo_positive": ("dpo_positive", {"samples": 4, "steps": 20}),
    "dvo": ({"name": "dvo", "samples": 2, "partition": UNITS}, {}),  # 0.30
    "restem": (
        "restem",
        {
            "steps": 4,
            "rollout": {"prompts": 96, "samples": 4, "max_tokens": 24},
            "update": {"minibatches": 6, "epochs": 4},
        },
    ),  # 0.25 in one step, since each begins again
}


def gain(metrics: list[dict[str, float]]) -> float:
    accuracy = [x["accuracy"] for x in metrics]
    if len(accuracy) < 6:
        return accuracy[-1] - accuracy[0]
    return sum(accuracy[-3:]) / 3 - sum(accuracy[:3]) / 3


@pytest.mark.slow  # test_recipes_run.py has shorter runs of most
@pytest.mark.usefixtures("as_users_run_it")  # shape checks, which other tests make, take half
@pytest.mark.parametrize("method", METHODS)
def test_it_learns(method: str, warm) -> None:
    algorithm, settings = METHODS[method]
    made = recipe(SMALL["chains"], algorithm, **settings)
    _, metrics = after_warm_start(made, warm("chains"))
    assert gain(metrics) > MARGIN, [x["accuracy"] for x in metrics]
    for step in metrics:
        assert step["policy/refused"] == 0.0
        assert step.get("agreement/ratio_error", 0.0) < 1e-4
