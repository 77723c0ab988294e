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
}


def gain(metrics: list[dict[str, float]]) -> float:
    accuracy = [x["accuracy"] for x in metrics]
    return sum(accuracy[-3:]) / 3 - sum(accuracy[:3]) / 3


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
