"""Columns: names and objects in ``needs``, and a user's column with state through a checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import changed, metrics

from segcredit.algorithms import ALGORITHMS, sapo
from segcredit.algorithms.credit import Case, LeaveOneOut
from segcredit.algorithms.requirements import requirements
from segcredit.columns import BASELINE, COLUMNS, ENTROPY, INITIAL_POLICY, LOGP_OLD, VALUE, resolve
from segcredit.config import parse_recipe
from segcredit.core.advantages import Credit
from segcredit.core.segments import Segments
from segcredit.partition import Partition, Token
from segcredit.train.build import make_plan
from segcredit.train.collect import Context
from segcredit.train.columns import PROVIDERS, provider_of
from segcredit.train.provider import OwnColumn, Provider
from segcredit.train.state import State
from segcredit.train.trainer import Trainer
from segcredit.types import Rollouts


def test_a_string_names_a_built_in_column() -> None:
    assert resolve({"entropy", VALUE}) == {ENTROPY, VALUE}
    with pytest.raises(ValueError, match=r"unknown column 'entropie'\. Did you mean 'entropy'\?"):
        resolve({"entropie"})


def test_every_built_in_column_has_a_provider_and_a_description() -> None:
    for column in COLUMNS.values():
        assert isinstance(provider_of(column), Provider)
        assert column.description
    assert {type(x) for x in COLUMNS.values()} == set(PROVIDERS)


def test_needs_of_methods_are_columns() -> None:
    for name, make in ALGORITHMS.items():
        columns = requirements(make()).columns
        assert all(column in COLUMNS.values() or column.name in COLUMNS for column in columns), name
    assert LOGP_OLD not in requirements(ALGORITHMS["dpo"]()).columns, "its loss reads no π_old"
    assert INITIAL_POLICY in requirements(ALGORITHMS["restem"]()).columns


@dataclass(frozen=True)
class Misspelled(Partition):
    """Cut at every token, but ask for a column that is not there."""

    def __call__(self, rollouts: Rollouts) -> Segments:
        return Token()(rollouts)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entrpy"})


def test_a_misspelled_name_in_a_part_is_found() -> None:
    with pytest.raises(ValueError, match=r"unknown column 'entrpy'\. Did you mean 'entropy'\?"):
        sapo(partition=Misspelled()).needs  # noqa: B018


@dataclass(frozen=True)
class Count(OwnColumn):
    """How often each step's rollouts have been filled, kept in checkpoints."""

    name = "count"
    description = "number of training steps before this one"
    start: float = 0.0

    def prepare(self, state: State) -> Provider:
        return Counter(self.start)

    def check(self, recipe: Any, method: str) -> list[str]:
        few = recipe.rollout.prompts < 2
        return [f"{method} counts pairs: set rollout.prompts=2 or more"] if few else []


class Counter(Provider):
    held_out = False

    def __init__(self, count: float) -> None:
        self.count = count

    def fill(self, context: Context, rollouts: Rollouts) -> Rollouts:
        return rollouts.with_column("count", torch.full((len(rollouts),), self.count))

    def describe(self, rollouts: Rollouts) -> dict[str, float]:
        return {"count": float(rollouts.column("count", "the test").mean())}

    def after_update(self, context: Context, rollouts: Rollouts) -> dict[str, float]:
        self.count += 1.0
        return {"counted": self.count}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        self.count = kept["count"]


@dataclass(frozen=True)
class Counted(LeaveOneOut):
    """Leave-one-out credit, plus the count."""

    @property
    def needs(self) -> frozenset[Count]:
        return frozenset({Count(10.0)})

    def __call__(self, case: Case) -> Credit:
        credit = super().__call__(case)
        count = case.rollouts.column("count", "Counted")
        return replace(credit, advantage=credit.advantage + count[:, None] * case.rollouts.mask)


def counting(steps: int, prompts: int = 8) -> Trainer:
    made = changed(
        reward="exact",
        stages=[{"kind": "warm_start", "steps": 1}, {"kind": "optimize", "steps": steps}],
        rollout={"prompts": prompts, "samples": 2, "max_tokens": 8},
        evaluation={"prompts": 2, "every": 0, "watch": 2},
    )
    trainer = Trainer.__new__(Trainer)
    trainer._objects = {"algorithm": replace(ALGORITHMS["rloo"](kl=0.0), credit=Counted())}
    trainer.plan = make_plan(parse_recipe(made), **trainer._objects)
    return trainer


@pytest.mark.slow
def test_state_of_a_column_goes_through_checkpoints(tmp_path: Path) -> None:
    counting(steps=2).train(tmp_path / "run")
    with pytest.warns(UserWarning, match="Settings changed from this step on: stages"):
        counting(steps=4).train(tmp_path / "run", resume=True)
    found = [x for x in metrics(tmp_path / "run") if x["stage"] == "optimize"]
    assert [x["count"] for x in found] == [10.0, 11.0, 12.0, 13.0]
    assert [x["counted"] for x in found] == [11.0, 12.0, 13.0, 14.0]
    assert [x["advantage_mean"] for x in found] == pytest.approx([10.0, 11.0, 12.0, 13.0])
    rows = (next((tmp_path / "run" / "watched").iterdir())).read_text().splitlines()
    assert all("advantage" not in json.loads(row) for row in rows), "not for held-out prompts"


def test_settings_are_checked_by_the_column() -> None:
    with pytest.raises(ValueError, match="this method counts pairs: set rollout"):
        counting(steps=1, prompts=1)


@dataclass(frozen=True)
class SecondBaseline(OwnColumn):
    name = "baseline"
    description = "another baseline"


def test_two_columns_of_one_name_are_refused() -> None:
    class Both(LeaveOneOut):
        needs = frozenset({BASELINE, SecondBaseline()})

    algorithm = replace(ALGORITHMS["rloo"](kl=0.0), credit=Both())
    with pytest.raises(ValueError, match="expected one column named 'baseline' in needs; got two"):
        requirements(algorithm)


def test_columns_of_ones_own_are_selected_with_their_rows() -> None:
    rollouts = Rollouts.from_columns(torch.ones(3, 2, dtype=torch.bool))
    some = rollouts.with_column("mine", torch.arange(3.0)).select(torch.tensor([2, 0]))
    assert some.column("mine", "the test").tolist() == [2.0, 0.0]
    with pytest.raises(ValueError, match="the test needs the rollouts' 'yours'; got none"):
        some.column("yours", "the test")
