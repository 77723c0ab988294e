"""Predictions beside what was measured on a GPU (measured.json says how and when)."""

import copy
import json
from functools import cache
from typing import Any

import pytest
from accuracy import HERE, compared, predicted, value
from each import each

from segcredit.plan import Prediction

MEASURED = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))
RUNS = {run["name"]: run for run in MEASURED["runs"]}
ALL = [(name, what) for name, run in RUNS.items() for what in run["measured"]]


@cache
def prediction(name: str) -> Prediction:
    return predicted(RUNS[name], RUNS[name].get("model", MEASURED["model"]))


@pytest.mark.slow
@each(("name", "what"), ALL)
def test_a_prediction_is_near(name: str, what: str):
    x = compared(RUNS[name], what, prediction(name))
    allowed = {"memory": 0.10, "peak": 0.10, "time": 0.25, "PFLOP": 0.02}[what.split()[0]]
    assert abs(x.error) <= allowed, f"{x.predicted:.4g} for {x.low} – {x.high}"


@pytest.mark.parametrize("run", MEASURED["runs"], ids=lambda run: run["name"])
def test_what_phases_add_to_what_is_held_is_near(run: dict[str, Any]):
    """Ten per cent of a hundred gigabytes would hide any mistake in activations."""
    held = run["measured"].get("memory between phases")
    found = prediction(run["name"])
    held = (held[0] if held else 104.97, found.between / 2**30)
    for what, (low, high) in run["measured"].items():
        if what.startswith("memory in "):
            measured, said = (low + high) / 2 - held[0], value(found, what) - held[1]
            assert said == pytest.approx(measured, rel=0.15), what


@pytest.mark.slow
@each("minibatches", [1, 2, 4])
@each("run", MEASURED["runs"])
def test_what_was_not_recorded_does_not_decide(run: dict[str, Any], minibatches: int):
    changed = copy.deepcopy(run)
    changed["recipe"]["update"]["minibatches"] = minibatches
    found = predicted(changed, run.get("model", MEASURED["model"]))
    for what, (low, high) in run["measured"].items():
        if what.startswith("memory"):
            assert value(found, what) == pytest.approx((low + high) / 2, rel=0.10), what


def test_every_measurement_says_where_it_comes_from():
    assert {"date", "device", "software", "model", "reconstructed"} <= MEASURED.keys()
    for run in MEASURED["runs"]:
        assert run["command"].startswith("python benchmarks/real_step.py ")
        assert run["measured"]
